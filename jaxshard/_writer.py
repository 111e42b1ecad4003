"""The writing side of a run: its epoch, where the next step goes, what is deleted behind it."""

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxshard import _branching, _commit, _decisions, _epochs, _steps
from jaxshard._decisions import Decision
from jaxshard._errors import (
    ConflictError,
    FormatError,
    JaxshardError,
    Kind,
)
from jaxshard._identity import Identity
from jaxshard._keep import Keep
from jaxshard._keeping import Keeper
from jaxshard._ledger import Hook, Ledger
from jaxshard._manifest import FILE, canonical
from jaxshard._patterns import matches, matches_any
from jaxshard._reader import Checkpoint, open_checkpoint
from jaxshard._reuse import Earlier, Marks, Sharing
from jaxshard._saving import SaveJob
from jaxshard._steps import StepDir
from jaxshard._store import Store, storage_errors
from jaxshard._tidying import Tidier

logger = logging.getLogger("jaxshard")

_VERSION = 1


class RunWriter:
    """The one process that writes to a run.

    Attributes:
      is_done: whether training has come to its end.
      tidier: deletes what is not kept, behind each save.
      sharing: what the next step may share with the one that was saved, or resumed from, last.

    Args:
      store: the directory of the run; made if it does not exist.
      keep: which steps to keep.
      frozen: patterns of leaves that do not change.
      reuse_max: after how many steps that have shared a file it is written anew.
      lease_s: a writer that gives no sign of life for so long is dead.
      takeover: begin even beside one that is alive.
      hooks: see `Ledger`.

    Raises:
      ConflictError: a checkpoint is there, or another process is writing.
      FormatError: a run of a newer version.
    """

    def __init__(
        self,
        store: Store,
        keep: Keep,
        *,
        frozen: Sequence[str],
        reuse_max: int,
        lease_s: float,
        takeover: bool,
        hooks: Sequence[Hook],
    ) -> None:
        self._store = store
        self.sharing = Sharing(None, frozen, reuse_max)
        self._before: _Saved | None = None
        self.is_done = False
        with storage_errors("opening", store.url):
            _make(store)
            before = _epochs.newest(store)
            self.epoch = _epochs.begin(
                store, lambda: _branching.names(store), lease_s=lease_s, takeover=takeover
            )
            try:
                self.ledger = Ledger(store, hooks)
                self.keeper = Keeper(store, keep)
                self.tidier = Tidier(store, self.keeper, self.epoch, self.ledger)
                late = _branching.look(store).late
            except BaseException:
                self.epoch.end()
                raise
        self.ledger.add(
            "start",
            epoch=self.epoch.number,
            who=str(Identity.of_this_process()),
            last_step=None if before is None else before.step,
            last_seen=None if before is None else before.seen,
        )
        if late:
            logger.warning(
                "%s: %s committed by a job that had been taken over; ignored. Was it put back from "
                "a copy? Without %s/%s all steps count",
                store.url,
                ", ".join(d.name for d in late),
                store.url,
                _epochs.DIR,
            )

    def next_dir(self, step: int) -> StepDir:
        """Where to write a step: over what was not committed, else beside it.

        Never where a decision or an epoch has named something else, which may be gone.
        """
        with storage_errors("listing", self._store.url):
            there = {d for d in _steps.step_dirs(self._store) if d.step == step}
            committed = {d for d in there if self._store.size(f"{d.name}/{FILE}") is not None}
            made = _decisions.read(self._store)
            epoch = _epochs.newest(self._store)
        named = {name for decision in made for name in decision.names}
        earlier = self.sharing.earlier
        if earlier is not None and not _decisions.fold(made).counts(earlier.name):
            self.share_nothing()  # what is bad is not shared
        named |= epoch.steps if epoch is not None else set()
        taken = {d for d in map(_steps.step_of, named) if d is not None and d.step == step}
        last = max((d.version for d in committed | taken), default=0)
        return StepDir(step, max([last + 1, *(d.version for d in there)]))

    def resumed_from(self, checkpoint: Checkpoint) -> None:
        """The next step may share files with this one."""
        self._go_on_from(checkpoint, None)

    def share_nothing(self) -> None:
        """The next save writes everything."""
        self.sharing = self.sharing._replace(earlier=None)

    def saved(self, step_dir: StepDir, job: SaveJob) -> None:
        """Behind a save: look at what was saved, and begin to delete what is not kept."""
        try:
            checkpoint = open_checkpoint(self._store.child(step_dir.name).url)
        except (OSError, JaxshardError) as e:
            logger.warning("%s: step %d cannot be opened: %s", self._store.url, step_dir.step, e)
            return
        before, now = self._before, self._go_on_from(checkpoint, job.marks)
        if before is None or not before.is_ours:
            _warn_of_dead_patterns(self._store.url, "frozen", self.sharing.frozen, checkpoint)
            _warn_of_dead_patterns(self._store.url, "thin_to", self.keeper.thin_to, checkpoint)
        if before is not None:
            _warn_if_stale(self._store.url, before, now)
            _warn_if_not_frozen(checkpoint.path, self.sharing.frozen, before, now)
        self.tidier.begin(step_dir, job.attempt)

    def _go_on_from(self, checkpoint: Checkpoint, marks: Marks | None) -> "_Saved":
        source = checkpoint.source
        earlier = Earlier(source, marks)
        self.sharing = self.sharing._replace(earlier=earlier if earlier.numbers else None)
        leaves = source.manifest.tree.leaves
        digests = {leaf.name: leaf.digest for leaf in leaves if leaf.digest}
        self._before = _Saved(checkpoint.step, digests, is_ours=marks is not None)
        return self._before

    def record(self, step_dir: StepDir, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a step that was saved."""
        self.ledger.add("record", step=step_dir.step, name=step_dir.name, metrics=metrics)
        self.keeper.record(step_dir, metrics)

    def decide(self, decision: Callable[[], Decision]) -> Decision:
        """Decide something, as the one that writes to the run.

        Raises:
          ConflictError: another job has taken over.
        """
        self.epoch.require_newest()
        made = decision()
        self._tell(made)
        return made

    def fall_back(self, step_dir: StepDir, why: str) -> None:
        """Remember that a step was found damaged, if the store can."""
        try:
            self.decide(lambda: _branching.fall_back(self._store, step_dir, why))
        except JaxshardError as e:
            logger.warning("%s: this cannot be written down: %s", self._store.url, e)

    def leave_behind(self, step_dir: StepDir) -> None:
        """Set aside what is newer than a step and cannot be resumed from, if the store can."""
        why = "what is newer had been thinned, or was damaged"
        step = step_dir.step
        try:
            # Batches that an earlier rollback to the same step leaves out stay left out.
            held = _branching.look(self._store).standing.skip_batches
            skip = held[1] if held is not None and held[0] == step else 0
            self.decide(lambda: _branching.rollback(self._store, step, why, skip))
        except JaxshardError as e:
            logger.warning("%s: this cannot be written down: %s", self._store.url, e)

    def _tell(self, decision: Decision) -> None:
        fields = decision._asdict()
        self.ledger.add(
            fields.pop("verdict"), **{n: v for n, v in fields.items() if v and n != "at"}
        )

    def close(self, error: BaseException | None) -> None:
        """End the epoch: the next job need not wait.

        Args:
          error: that training has ended with, if it has.
        """
        self.tidier.settle()
        what = {} if error is None else {"error": f"{type(error).__name__}: {error}"}
        self.ledger.add("end", step=self.epoch.step, done=self.is_done, **what)
        self.epoch.end()


class _Saved(NamedTuple):
    """A step that was saved, or (not `is_ours`) resumed from: the digests of its leaves."""

    step: int | None
    digests: Mapping[str, str]
    is_ours: bool


def _warn_if_stale(url: str, before: _Saved, now: _Saved) -> None:
    """A loop that saves the state of before loses all that it has learned since."""
    if before.is_ours and now.digests and now.digests == before.digests:
        logger.warning(
            "%s: every array of step %s equals that of step %s: is an old state being saved?\n"
            "hint: pass what the update has returned, not what was given to it",
            url,
            now.step,
            before.step,
        )


def _warn_of_dead_patterns(
    url: str, what: str, patterns: Sequence[str], checkpoint: Checkpoint
) -> None:
    for pattern in patterns:
        if not any(matches(pattern, name) for name in checkpoint):
            logger.warning("%s: %s %r matches no leaf", url, what, pattern)


def _warn_if_not_frozen(path: str, frozen: Sequence[str], before: _Saved, now: _Saved) -> None:
    """Where nobody had looked at the leaf, steps in between hold what it was."""
    names = [name for name in now.digests if matches_any(frozen, name)]
    changed = [n for n in names if before.digests.get(n, now.digests[n]) != now.digests[n]]
    if changed:
        logger.warning(
            "%s: %s frozen, and not what %s at step %s: earlier steps may hold older values\n"
            "hint: frozen= is for what training never changes",
            path,
            f"{changed[0]!r} is" if len(changed) == 1 else f"{len(changed)} leaves are",
            "it was" if len(changed) == 1 else "they were",
            before.step,
        )


def _make(store: Store) -> None:
    """Make the directory of a run, or find that it is one."""
    if store.size(FILE) is not None or store.is_file():
        raise ConflictError(
            f"{store.url}: expected a run directory or nothing, found a checkpoint or a file",
            path=store.url,
            hint="give ResumeManager a directory of its own",
        )
    store.make_dirs([""])
    identity = {"format": "jaxshard-run", "version": _VERSION, "run_id": secrets.token_hex(16)}
    if not store.create(_commit.RUN_FILE, canonical(identity) + b"\n"):
        _require_version(store)


def _require_version(store: Store) -> None:
    file = f"{store.url}/{_commit.RUN_FILE}"
    try:
        found = json.loads(store.read(_commit.RUN_FILE))
        known = found["format"] == "jaxshard-run" and int(found["version"]) <= _VERSION
    except (ValueError, KeyError, TypeError) as e:
        raise FormatError(f"{file}: expected the description of a run: {e}", path=file) from e
    if not known:
        raise FormatError(
            f"{file}: expected version {_VERSION} or older, found {found}",
            kind=Kind.FORMAT_VERSION,
            path=file,
            hint="pip install --upgrade jaxshard",
        )
