"""`jaxshard undo`: take back the last decision about a run."""

import click

from jaxshard import _branching
from jaxshard.cli._verb import DECISION_KEYS, Verb, json_option, run_at, tell_decision


@click.command(
    "undo",
    cls=Verb,
    examples=["jaxshard undo runs/lm"],
    keys=DECISION_KEYS,
)
@click.argument("path", metavar="RUN")
@json_option
def command(path: str, *, as_json: bool) -> None:
    """Take back the last decision: a rollback, a mark, a protection, a step found damaged.

    Steps that were saved since a rollback are set aside in their turn. The job must not be running.
    """
    store = run_at(path)
    with _branching.alone(store):
        decision = _branching.undo(store)
    tell_decision(store, decision, f"decision {decision.of} is undone", as_json=as_json)
