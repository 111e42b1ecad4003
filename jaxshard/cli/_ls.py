"""`jaxshard ls`: the steps of a run."""

import datetime
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from jaxshard import _branching, _commit, _steps
from jaxshard._branching import Look
from jaxshard._errors import (
    CorruptionError,
    FormatError,
    NotCommittedError,
    NotFoundError,
    size_text,
)
from jaxshard._manifest import FILE
from jaxshard._reader import Checkpoint, open_checkpoint
from jaxshard._steps import StepDir
from jaxshard._store import Store, open_store, storage_errors
from jaxshard.cli._output import Styled, note, print_json, print_table
from jaxshard.cli._verb import Verb, json_option, locate

_COLORS = {
    "committed": "green",
    "protected": "green",
    "thinned": "cyan",
    "set aside": "yellow",
    "uncommitted": "yellow",
    "replaced": "yellow",
    "late": "yellow",
}
_HIDDEN = {"replaced", "uncommitted", "late"}


class _Row(NamedTuple):
    """One line; the fields are the keys of the JSON document."""

    path: str
    step: int | None
    state: str
    saved: str | None
    nbytes: int | None
    leaves: int | None
    metadata: dict[str, Any] | None
    why: str | None = None
    reused_nbytes: int = 0
    thinned_to: tuple[str, ...] = ()


@click.command(
    "ls",
    cls=Verb,
    examples=["jaxshard ls runs/lm", "jaxshard ls runs/lm --all", "jaxshard ls runs/lm --json"],
    keys={
        "path": "the run or checkpoint",
        "steps[].path": "directory of the step; of an attempt with --all, its own",
        "steps[].step": "completed updates, or null",
        "steps[].state": "committed; protected; thinned (a part of it, by Keep(thin_to=): not "
        "resumable); bad (marked so); damaged; set aside (by a "
        "rollback); unreadable (a newer version's); with --all also replaced (saved again since), "
        "late (committed by a job that had been taken over) and uncommitted (begun, never "
        "finished, or still going on)",
        "steps[].why": "of one that is bad or damaged, or null",
        "steps[].saved": "UTC, ISO 8601: when it was committed, or last changed",
        "steps[].nbytes": "bytes of its arrays in memory; of an attempt, bytes on disk",
        "steps[].reused_nbytes": "of these, bytes in files that are also those of the step before",
        "steps[].thinned_to": "patterns of the leaves that were left of it; empty if it is whole",
        "steps[].leaves": "number of leaves",
        "steps[].metadata": "what was given to save; metrics of a run are in it",
    },
)
@click.argument("path")
@click.option("--all", "show_all", is_flag=True, help="Also what is not, or no longer, in use.")
@json_option
def command(path: str, *, show_all: bool, as_json: bool) -> None:
    """List the steps of a run: time, size, state.

    PATH is a run, a checkpoint, or RUN@STEP.
    """
    store = _store_at(path, show_all=show_all)
    with storage_errors("listing", store.url):
        rows = list(_rows(store))
    used = [row for row in rows if row.state not in _HIDDEN]
    shown = rows if show_all else used
    if as_json:
        print_json({"path": store.url, "steps": [row._asdict() for row in shown]})
        return
    if shown:
        _print(store, shown)
    if not used:
        note(f"no step was committed in {store.url} yet")
    if len(shown) < len(rows):
        hidden = len(rows) - len(shown)
        note(f"{hidden} more {'is' if hidden == 1 else 'are'} not in use; --all shows them")


def _store_at(path: str, *, show_all: bool) -> Store:
    try:
        found = locate(path)
    except (CorruptionError, FormatError):  # one checkpoint: its state is the answer
        return open_store(path)
    except NotCommittedError:
        if not show_all:
            raise
        return open_store(path)
    return open_store(found.path)


def _rows(store: Store) -> Iterator[_Row]:
    if _commit.look(store) is not _commit.Found.RUN:
        yield from _rows_of(store, None, _state_in_run(store))
        return
    now = _branching.look(store)
    for step_dir in _steps.step_dirs(store):
        state = _state(step_dir, now)
        for row in _rows_of(store.child(step_dir.name), step_dir, state):
            yield row._replace(why=now.standing.bad.get(step_dir.name))


def _state_in_run(store: Store) -> str:
    """What one checkpoint is to the run that it is in, if it is in one."""
    parent, _, name = store.url.rpartition("/")
    step_dir = _steps.step_of(name)
    run = open_store(parent) if step_dir is not None and parent else None
    if run is None or step_dir is None or _commit.look(run) is not _commit.Found.RUN:
        return "committed"
    return _state(step_dir, _branching.look(run))


def _state(step_dir: StepDir, now: Look) -> str:
    """What a committed directory of a step is to its run."""
    name, standing = step_dir.name, now.standing
    if name in standing.aside:
        return "set aside"
    if name in standing.bad:
        return "bad" if name in standing.marked else "damaged"
    if step_dir in now.late:
        return "late"
    if step_dir not in now.committed:  # between two looks
        return "committed"
    if step_dir not in now.branch:
        return "replaced"
    return "protected" if name in standing.protected else "committed"


def _rows_of(store: Store, step_dir: StepDir | None, state: str = "committed") -> Iterator[_Row]:
    """The checkpoint in a directory, if there is one, and the attempts beside it."""
    attempt = None
    step = None if step_dir is None else step_dir.step
    try:
        checkpoint = open_checkpoint(store.url)
    except CorruptionError:
        yield _Row(store.url, step, "damaged", None, None, None, None)
    except FormatError:
        yield _Row(store.url, step, "unreadable", None, None, None, None)
    except (NotCommittedError, NotFoundError):
        pass
    else:
        attempt = checkpoint.attempt
        yield _committed(checkpoint, state)
    readable = attempt is not None or FILE not in store.entries()
    for name in store.entries() if readable else ():
        if _commit.is_leftover(name) and name != attempt:
            yield _attempt(store, name, step)


def _committed(checkpoint: Checkpoint, state: str) -> _Row:
    thinned = state == "committed" and checkpoint.thinned_to
    return _Row(
        checkpoint.path,
        checkpoint.step,
        "thinned" if thinned else state,
        checkpoint.created,
        checkpoint.nbytes,
        len(checkpoint),
        checkpoint.metadata,
        reused_nbytes=checkpoint.reused_nbytes,
        thinned_to=checkpoint.thinned_to,
    )


def _attempt(store: Store, name: str, step: int | None) -> _Row:
    child = store.child(name)
    changed = store.changed_at(name)
    when = None
    if changed is not None:
        utc = datetime.datetime.fromtimestamp(changed, datetime.UTC)
        when = utc.isoformat(timespec="seconds")
    nbytes = sum(child.size(file) or 0 for file in child.walk())
    return _Row(child.url, step, "uncommitted", when, nbytes, None, None)


def _print(store: Store, rows: list[_Row]) -> None:
    print_table(
        ["STEP", "SAVED (UTC)", "SIZE", "STATE", "NAME", "NOTES"],
        [
            [
                "" if row.step is None else str(row.step),
                (row.saved or "")[:19].replace("T", " "),
                "" if row.nbytes is None else size_text(row.nbytes),
                Styled(row.state, _COLORS.get(row.state, "red")),
                row.path.removeprefix(f"{store.url}/"),
                _notes(row),
            ]
            for row in rows
        ],
        right="STEP SIZE",
    )


def _notes(row: _Row) -> str:
    metrics = (row.metadata or {}).get("metrics")
    numbers = [f"{k}={_short(v)}" for k, v in metrics.items()] if isinstance(metrics, dict) else []
    notes = [" ".join(numbers), row.why]
    if row.thinned_to:
        notes.append(f"only {', '.join(row.thinned_to)}: not resumable")
    if row.reused_nbytes:
        notes.append(f"{size_text(row.reused_nbytes)} of it unchanged when it was saved")
    return "; ".join(filter(None, notes))


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
