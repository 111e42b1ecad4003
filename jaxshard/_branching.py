"""Decide about the steps of a run: protect, mark bad, roll back, undo.

Each is one decision, a file; nothing that was saved is changed or deleted by it.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from jaxshard import _decisions, _epochs, _steps
from jaxshard._decisions import Decision, Standing, Verdict
from jaxshard._errors import ConflictError, CorruptionError, FormatError, Kind, NotFoundError
from jaxshard._reader import open_checkpoint
from jaxshard._steps import StepDir
from jaxshard._store import Store, storage_errors

_LEASE_S = 60.0


class Look(NamedTuple):
    """One look at a run: its committed steps, and what was decided about them."""

    committed: list[StepDir]
    late: list[StepDir]
    standing: Standing

    @property
    def branch(self) -> list[StepDir]:
        """The steps that count, rising."""
        return _steps.newest_versions(d for d in self.committed if self.standing.counts(d.name))

    @property
    def others(self) -> dict[str, str]:
        """The committed steps that do not count, and why."""
        why = {d.name: "committed by a job that had been taken over" for d in self.late}
        why |= {d.name: "set aside by a rollback" for d in self.committed}
        why |= self.standing.bad
        names = [d.name for d in (*self.committed, *self.late)]
        counting = {d.name for d in self.committed if self.standing.counts(d.name)}
        return {name: why[name] for name in sorted(names) if name not in counting}


def look(store: Store) -> Look:
    """What there is, now."""
    with storage_errors("listing", store.url):
        standing = _decisions.fold(_decisions.read(store))
        return Look(*_steps.committed(store), standing)


def find_step(steps: list[StepDir], step: int | None, path: str) -> StepDir:
    """One of these steps by its number, the newest one if None.

    Raises:
      NotFoundError: there is none; the error names those that there are.
    """
    found = [d for d in steps if step is None or d.step == step]
    if not found:
        have = ", ".join(str(d.step) for d in steps) or "none"
        wanted = "a committed step" if step is None else f"step {step}"
        raise NotFoundError(
            f"{path}: expected {wanted}, found: {have}", path=path, step=step,
            hint="all_steps() lists the committed ones",
        )  # fmt: skip
    return found[-1]


def protect(store: Store, step: int) -> Decision:
    """Never delete a step, nor thin it."""
    was_whole = not _thinned_to(store, find_step(look(store).committed, step, store.url))
    decision = _decide(store, Verdict.PROTECT, step)
    # Its job may have been deleting or thinning it just now.
    thinned_to = _thinned_to(store, find_step(look(store).committed, step, store.url))
    if was_whole and thinned_to:
        raise _is_a_part(store, step, thinned_to)
    return decision


def _thinned_to(store: Store, step_dir: StepDir) -> tuple[str, ...]:
    try:
        return open_checkpoint(store.child(step_dir.name).url).thinned_to
    except (CorruptionError, FormatError):  # it can be protected all the same
        return ()


def _is_a_part(store: Store, step: int, thinned_to: tuple[str, ...]) -> NotFoundError:
    return NotFoundError(
        f"{store.url}: expected all of step {step}, found a part: {', '.join(thinned_to)}",
        path=store.url,
        step=step,
        hint=f"`jaxshard ls {store.url}` shows which steps are whole",
    )


def unprotect(store: Store, step: int) -> Decision:
    """Treat a step like all others again."""
    return _decide(store, Verdict.UNPROTECT, step)


def mark_bad(store: Store, step: int, why: str) -> Decision:
    """Never resume from a step."""
    return _decide(store, Verdict.MARK_BAD, step, why)


def fall_back(store: Store, step_dir: StepDir, why: str) -> Decision:
    """Remember that a step was found damaged."""
    names = (step_dir.name,)
    with storage_errors("writing a decision to", store.url):
        return _decisions.add(store, Verdict.FALLBACK, step=step_dir.step, names=names, why=why)


def _decide(store: Store, verdict: Verdict, step: int, why: str = "") -> Decision:
    now = look(store)
    there = _steps.newest_versions(d for d in now.committed if d.name not in now.standing.aside)
    step_dir = find_step(there, step, store.url)
    with storage_errors("writing a decision to", store.url):
        return _decisions.add(store, verdict, step=step, names=(step_dir.name,), why=why)


def names(store: Store) -> list[str]:
    """Names of the committed steps that are part of the run."""
    return [d.name for d in _steps.committed_versions(store)]


@contextlib.contextmanager
def alone(store: Store) -> Iterator[None]:
    """Be the only writer of a run for a while.

    Raises:
      ConflictError: a job is writing to it.
    """
    with storage_errors("opening", store.url):
        before = _epochs.newest(store)
        epoch = _epochs.begin(store, lambda: names(store), lease_s=_LEASE_S, takeover=False)
        epoch.carry_on(before)
    try:
        yield
    finally:
        epoch.end()


def rollback(store: Store, step: int, why: str, skip_batches: int) -> Decision:
    """Go on from an earlier step; those after it are set aside. Nobody else may be writing."""
    if skip_batches < 0:
        raise ValueError(
            f"rollback: skip_batches must be 0 or more: {skip_batches}\nhint: skip_batches=100"
        )
    now = look(store)
    for name, reason in now.others.items():
        if name in {d.name for d in now.committed if d.step == step} - {d.name for d in now.branch}:
            raise NotFoundError(
                f"{store.url}: expected step {step} to count, found that it is out: {reason}",
                path=store.url,
                step=step,
                hint=f"another step (`jaxshard ls {store.url}`), or `jaxshard undo` first",
            )
    thinned_to = _thinned_to(store, find_step(now.branch, step, store.url))
    if thinned_to:
        raise _is_a_part(store, step, thinned_to)
    aside = [d for d in now.committed if d.step > step and d.name not in now.standing.aside]
    with storage_errors("writing a decision to", store.url):
        return _decisions.add(
            store,
            Verdict.ROLLBACK,
            step=step,
            names=tuple(d.name for d in aside),
            why=why,
            skip_batches=skip_batches,
        )


def undo(store: Store) -> Decision:
    """Let the last decision be as if it had never been. Nobody else may be writing.

    What was saved since a rollback is set aside in its turn.

    Raises:
      ConflictError: there is none; or of the branch that a rollback has left nothing is there.
    """
    with storage_errors("listing", store.url):
        made = _decisions.read(store)
    last = _decisions.last_to_undo(made)
    if last is None:
        raise ConflictError(
            f"{store.url}: expected a decision to undo, found none",
            kind=Kind.NOTHING_TO_UNDO,
            path=store.url,
            hint="jaxshard ls shows what holds",
        )
    aside: tuple[str, ...] = ()
    if last.verdict is Verdict.ROLLBACK:
        now = look(store)
        since = [d for d in now.branch if d.step > (last.step or 0)]
        aside = tuple(d.name for d in since)
        if since and not any(d.name in last.names for d in now.committed):
            raise ConflictError(
                f"{store.url}: decision {last.number}, the rollback to step {last.step}, cannot be "
                "undone: training has gone on, and of what it had set aside nothing is left",
                kind=Kind.NOTHING_TO_UNDO,
                path=store.url,
                hint="jaxshard ls --all shows what is there; rollback goes back to any of it",
            )
    with storage_errors("writing a decision to", store.url):
        return _decisions.add(store, Verdict.UNDO, step=last.step, names=aside, of=last.number)
