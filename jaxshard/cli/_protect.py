"""`jaxshard protect`: keep a step for good."""

import click

from jaxshard import _branching
from jaxshard.cli._verb import DECISION_KEYS, Verb, json_option, run_and_step, tell_decision


@click.command(
    "protect",
    cls=Verb,
    examples=["jaxshard protect runs/lm@3000"],
    keys=DECISION_KEYS,
)
@click.argument("step", metavar="RUN@STEP")
@json_option
def command(step: str, *, as_json: bool) -> None:
    """Never delete a step of a run, whatever its job keeps.

    Also while the job is running.
    """
    store, number = run_and_step(step)
    decision = _branching.protect(store, number)
    tell_decision(store, decision, f"step {number} is never deleted", as_json=as_json)
