"""`jaxshard mark-bad`: never resume from a step."""

import click

from jaxshard import _branching
from jaxshard.cli._verb import DECISION_KEYS, Verb, json_option, run_and_step, tell_decision


@click.command(
    "mark-bad",
    cls=Verb,
    examples=['jaxshard mark-bad runs/lm@3000 --why "loss is NaN"'],
    keys=DECISION_KEYS,
)
@click.argument("step", metavar="RUN@STEP")
@click.option("--why", required=True, metavar="TEXT", help="For those who look at the run.")
@json_option
def command(step: str, *, why: str, as_json: bool) -> None:
    """Never resume from a step of a run; it is not deleted for that.

    Also while the job is running; it takes effect when the job starts next.
    """
    store, number = run_and_step(step)
    decision = _branching.mark_bad(store, number, why)
    tell_decision(store, decision, f"step {number} is not resumed from", as_json=as_json)
