"""`jaxshard rollback`: go on from an earlier step."""

import click

from jaxshard import _branching
from jaxshard.cli._verb import DECISION_KEYS, Verb, json_option, run_and_step, tell_decision


@click.command(
    "rollback",
    cls=Verb,
    examples=['jaxshard rollback runs/lm@3000 --why "spike at 3120" --skip-batches 200'],
    keys=DECISION_KEYS,
)
@click.argument("step", metavar="RUN@STEP")
@click.option("--why", required=True, metavar="TEXT", help="For those who look at the run.")
@click.option(
    "--skip-batches",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Batches of data to leave out from there on.",
)
@json_option
def command(step: str, *, why: str, skip_batches: int, as_json: bool) -> None:
    """Let a run go on from an earlier step.

    Later steps are set aside: they count no more, and are deleted when training has gone on beyond
    all of them. The job must not be running: stop it first, for example by SIGTERM.
    """
    store, number = run_and_step(step)
    with _branching.alone(store):
        decision = _branching.rollback(store, number, why, skip_batches)
    tell_decision(
        store,
        decision,
        f"goes on from step {number} at its next start, {len(decision.names)} later set aside",
        as_json=as_json,
    )
