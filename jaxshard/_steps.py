"""The steps of a run: which directories hold committed ones, and which of them count."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxshard import _decisions, _epochs
from jaxshard._manifest import FILE
from jaxshard._store import Store


class StepDir(NamedTuple):
    """The directory of one step of a run; `version` counts the times it was written."""

    step: int
    version: int

    @property
    def name(self) -> str:
        """Its name: `step_00000120`, `step_00000120.2`."""
        return f"step_{self.step:08d}" + (f".{self.version}" if self.version > 1 else "")


def step_of(name: str) -> StepDir | None:
    """The step that a directory is of, None if it is of none."""
    stem, _, version = name.removeprefix("step_").partition(".")
    is_one = name.startswith("step_") and stem.isdecimal() and (not version or version.isdecimal())
    return StepDir(int(stem), int(version or 1)) if is_one else None


def step_dirs(store: Store) -> list[StepDir]:
    """Directories of steps, committed or not, oldest first."""
    return sorted(d for name in store.entries() if (d := step_of(name)) is not None)


def committed(store: Store) -> tuple[list[StepDir], list[StepDir]]:
    """Committed directories of steps, oldest first: those that are part of the run, and late ones.

    Late is what a writer committed that had been taken over.
    """
    there = [d for d in step_dirs(store) if store.size(f"{d.name}/{FILE}") is not None]
    epoch = _epochs.newest(store)
    if epoch is None:
        return there, []
    late = {
        d
        for d in there
        if d.name not in epoch.steps and _epochs.epoch_of(store, d.name) not in (None, epoch.number)
    }
    return [d for d in there if d not in late], sorted(late)


def committed_versions(store: Store) -> list[StepDir]:
    """Committed directories of steps that are part of the run, oldest first."""
    return committed(store)[0]


def newest_versions(dirs: Iterable[StepDir]) -> list[StepDir]:
    """Of several versions of a step the newest; steps rising."""
    newest = {d.step: d for d in sorted(dirs)}
    return [newest[step] for step in sorted(newest)]


def branch(store: Store) -> list[StepDir]:
    """The steps that count, rising: committed, not bad, and on the branch that goes on."""
    standing = _decisions.fold(_decisions.read(store))
    return newest_versions(d for d in committed_versions(store) if standing.counts(d.name))


def newest_step(store: Store) -> str | None:
    """Name of the newest step that counts."""
    steps = branch(store)
    return steps[-1].name if steps else None
