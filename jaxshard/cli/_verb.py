"""What all verbs share: how a checkpoint is named, `--json`, and the sections of a help text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

import jaxshard
from jaxshard import _branching, _steps
from jaxshard._decisions import Decision
from jaxshard._reader import Checkpoint, open_checkpoint
from jaxshard._run import Run
from jaxshard._store import Store, open_store
from jaxshard.cli._output import Failure, note, print_json

_SECONDS = {"ms": 0.001, "": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


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


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click
    """A number with `ms`, `s`, `m`, `h` or `d` behind it, in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smhd]?)", str(value))
        if match is None:
            self.fail(
                f"expected a duration such as 500ms, 90s, 30m, 2h or 7d, found {value!r}",
                param,
                ctx,
            )
        return float(match[1]) * _SECONDS[match[2]]


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click
    """A number with `KB`, `MB`, `GB`, `TB`, or `KiB` and so on, in bytes."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGT])(i?)B|B?)", str(value))
        if match is None:
            self.fail(f"expected a size such as 500MB, 20GB or 1GiB, found {value!r}", param, ctx)
        power = " KMGT".index(match[2]) if match[2] else 0
        return float(match[1]) * float(1024 if match[3] else 1000) ** power


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
)


html_option = click.option(
    "--html", "as_html", is_flag=True, help="Print one HTML page instead of text."
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
        return _step_of(found, int(step))
    raise jaxshard.NotFoundError(
        f"{text}: expected {path} to be a run, found one checkpoint",
        path=path,
        hint=f"give {path}",
    )


def _step_of(run: Run, step: int) -> Checkpoint:
    """A step that counts; else one that is there: what is bad is looked at, too."""
    try:
        return run.open(step)
    except jaxshard.NotFoundError:
        there = _steps.newest_versions(_branching.look(open_store(run.path)).committed)
        found = [d for d in there if d.step == step]
        if not found:
            raise
        return open_checkpoint(f"{run.path}/{found[-1].name}")


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
