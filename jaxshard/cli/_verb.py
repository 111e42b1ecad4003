"""What all verbs share: how a checkpoint is named, `--json`, and the sections of a help text."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

import jaxshard
from jaxshard._decisions import Decision
from jaxshard._reader import Checkpoint
from jaxshard._run import Run
from jaxshard._store import Store, open_store
from jaxshard.cli._output import Failure, note, print_json


class Verb(click.Command):
    """A command whose help has examples, the keys of its JSON, and what exit code 1 means."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str],
        keys: Mapping[str, str],
        bad: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.keys = keys
        self.bad = bad

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The sections behind the options."""
        del ctx
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        with formatter.section("Keys of the JSON document"):
            formatter.write_dl(list(self.keys.items()))
        codes = [("0", "done")] + [("1", self.bad)] * bool(self.bad) + [("2", "could not be done")]
        with formatter.section("Exit codes"):
            formatter.write_dl(codes)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
)


def locate(text: str) -> Checkpoint | Run:
    """What a path on the command line means; `RUN@STEP` where nothing has that very name.

    Raises:
      NotFoundError: nothing is there.
    """
    try:
        return jaxshard.open(text)
    except jaxshard.NotFoundError:
        path, at, step = text.rpartition("@")
        if not at or not step.isdecimal():
            raise
    found = jaxshard.open(path)
    if isinstance(found, Run):
        return found.open(int(step))
    raise jaxshard.NotFoundError(
        f"{text}: expected {path} to be a run, found one checkpoint",
        path=path,
        hint=f"give {path}",
    )


def run_and_step(text: str) -> tuple[Store, int]:
    """The run and the step that RUN@STEP means.

    Raises:
      NotFoundError: there is no run.
    """
    path, at, step = text.rpartition("@")
    if not at or not step.isdecimal():
        raise Failure(f"{text}: expected RUN@STEP, as in runs/lm@300\nhint: jaxshard ls {text}")
    return run_at(path), int(step)


def run_at(path: str) -> Store:
    """The run at a path.

    Raises:
      NotFoundError: there is none.
    """
    found = jaxshard.open(path)
    if isinstance(found, Run):
        return open_store(path)
    raise Failure(f"{found.path}: expected a run, found one checkpoint")


def tell_decision(store: Store, decision: Decision, text: str, *, as_json: bool) -> None:
    """Say what was decided."""
    if as_json:
        print_json({"path": store.url, **decision._asdict()})
        return
    click.echo(f"{store.url}: {text} (decision {decision.number})")


DECISION_KEYS = {
    "path": "the run",
    "number, verdict": "of the decision; decisions are counted from 1",
    "step, names": "the step, and the directories that are meant (of a rollback: set aside)",
    "why": "what was given",
    "skip_batches": "of a rollback",
    "of": "number of the decision that was undone",
    "at, by": "UTC, ISO 8601; host and process",
}


def open_one(text: str) -> Checkpoint:
    """The checkpoint that a path means; of a run the newest one, and a note that says so.

    Raises:
      NotFoundError: nothing is there, or a run without a committed step.
    """
    found = locate(text)
    if isinstance(found, Checkpoint):
        return found
    newest = found.open()
    note(f"{text} is a run: this is its newest step, {newest.step}")
    return newest
