"""`jaxshard unprotect`: let a run decide about a step again."""

import click

from jaxshard import _branching
from jaxshard.cli._verb import DECISION_KEYS, Verb, json_option, run_and_step, tell_decision


@click.command(
    "unprotect",
    cls=Verb,
    examples=["jaxshard unprotect runs/lm@3000"],
    keys=DECISION_KEYS,
)
@click.argument("step", metavar="RUN@STEP")
@json_option
def command(step: str, *, as_json: bool) -> None:
    """Let a run decide again whether to keep a step.

    Also while the job is running.
    """
    store, number = run_and_step(step)
    decision = _branching.unprotect(store, number)
    tell_decision(
        store, decision, f"step {number} is kept or deleted as all others", as_json=as_json
    )
