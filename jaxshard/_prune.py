"""`prune` frees what dead writers left behind, and the steps that a policy releases.

It deletes only what jaxshard itself names so (attempts, temporary files, directories of steps)
and what no manifest refers to. A manifest that cannot be read may refer to anything: beside it
nothing is deleted. Files of somebody else are never touched.
"""

import dataclasses
import logging
import time
from collections import Counter

from jaxshard import _branching, _commit, _reader, _steps
from jaxshard._errors import CorruptionError, FormatError, bullet_list, counted, size_text
from jaxshard._keep import Keep
from jaxshard._keeping import Keeper
from jaxshard._manifest import FILE, Manifest
from jaxshard._registry import Shown
from jaxshard._steps import StepDir
from jaxshard._store import PathLike, Store, open_store, storage_errors
from jaxshard._verify import is_temporary, verify

logger = logging.getLogger("jaxshard")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport(Shown):
    """What `prune` deleted, or with `dry_run` would delete; names are relative to `path`.

    Attributes:
      path: the run or checkpoint.
      steps: directories of committed steps that `keep` released.
      leftovers: attempts, temporary files and uncommitted steps that dead writers left behind.
      nbytes: bytes freed: of files that no step shares which stays.
      recent: leftovers that stay, because something in them changed within `older_than_s`.
      damaged: committed steps that are not whole; they stay, and do not count for `keep`.
      dry_run: whether nothing was deleted.
    """

    path: str
    steps: tuple[str, ...]
    leftovers: tuple[str, ...]
    nbytes: int
    recent: tuple[str, ...]
    damaged: tuple[str, ...]
    dry_run: bool

    @property
    def deleted(self) -> tuple[str, ...]:
        """Everything that was deleted."""
        return self.steps + self.leftovers

    def __str__(self) -> str:
        verb = "would delete" if self.dry_run else "deleted"
        what = f"{counted(len(self.steps), 'step')} and {counted(len(self.leftovers), 'leftover')}"
        lines = [f"step: {name}" for name in self.steps]
        lines += [f"leftover: {name}" for name in self.leftovers]
        lines += [f"kept, changed recently: {name}" for name in self.recent]
        lines += [f"kept, damaged: {name}" for name in self.damaged]
        return bullet_list(f"{self.path}: {verb} {what}, {size_text(self.nbytes)}", tuple(lines))


def prune(
    root: PathLike,
    *,
    keep: Keep | None = None,
    older_than_s: float = 3600.0,
    dry_run: bool = False,
) -> PruneReport:
    """Delete what dead writers left behind and, with `keep`, the steps that it releases.

    Left behind are attempts that were never committed or have been replaced, temporary files, and
    directories of steps without a manifest. They go if nothing in them changed for `older_than_s`:
    a save that is still going on changes its files, so leave this longer than a save can pause.
    What a manifest names stays, and so do files that are not jaxshard's.

    Args:
      root: the directory of a run, or one checkpoint.
      keep: which committed steps of a run to keep; None keeps all. A step that lacks files or has
        cut ones is neither counted nor deleted; `verify` finds every other damage.
      older_than_s: age, in seconds, from which leftovers are deleted.
      dry_run: delete nothing, only say what would be deleted.

    Returns:
      What was deleted, what stayed and why.

    Raises:
      NotFoundError: neither a run nor a checkpoint is at `root`.
      CorruptionError: the manifest of the one checkpoint at `root` is damaged.
      FormatError: it was written by a newer version.
      StorageError: the store failed; what was deleted so far is gone, the rest untouched.

    Example:
      >>> import jaxshard, numpy as np
      >>> with jaxshard.ResumeManager("memory://doc/prune", keep=jaxshard.Keep()) as run:
      ...     for step in (1, 2, 3):
      ...         _ = run.save(step, {"w": np.ones(4)}, wait=True)
      >>> jaxshard.prune("memory://doc/prune", keep=jaxshard.Keep(last=2)).steps
      ('step_00000001',)
    """
    if not older_than_s >= 0:
        raise ValueError(f"prune: older_than_s must be 0 or more: {older_than_s}\nhint: 3600.0")
    store = open_store(root)
    with storage_errors("pruning", store.url):
        found = _commit.look(store)
        if found not in {_commit.Found.RUN, _commit.Found.CHECKPOINT, _commit.Found.ATTEMPTS}:
            raise _reader.why_not_there(store)
        if keep is not None and found is not _commit.Found.RUN:
            raise ValueError(
                f"{store.url}: expected a run for keep=, found one checkpoint\n"
                "hint: without keep= its leftovers are deleted"
            )
        sweep = _Sweep(store, older_than_s, dry_run=dry_run)
        if found is _commit.Found.RUN:
            sweep.run(keep)
        else:
            sweep.checkpoint("")
    report = sweep.report()
    if report.deleted and not dry_run:
        logger.info("pruned %s: %s", store.url, ", ".join(report.deleted))
    return report


class _Sweep:
    """One call of `prune`: what has been deleted, and what stayed."""

    def __init__(self, store: Store, older_than_s: float, *, dry_run: bool) -> None:
        self._store = store
        self._older_than_s = older_than_s
        self._dry_run = dry_run
        self._steps: list[str] = []
        self._leftovers: list[str] = []
        self._recent: list[str] = []
        self._damaged: list[str] = []
        self._nbytes = 0
        self._seen: Counter[int] = Counter()  # of a dry run: names of files that would go

    def report(self) -> PruneReport:
        return PruneReport(
            path=self._store.url,
            steps=tuple(self._steps),
            leftovers=tuple(self._leftovers),
            nbytes=self._nbytes,
            recent=tuple(self._recent),
            damaged=tuple(self._damaged),
            dry_run=self._dry_run,
        )

    # A run

    def run(self, keep: Keep | None) -> None:
        for name in self._store.entries():
            if _commit.is_leftover(name):
                self._sweep_away(name)
        if keep is not None:
            for step_dir in self._released(keep):
                self._delete_step(step_dir.name)
        for step_dir in _steps.step_dirs(self._store):
            if step_dir.name not in self._steps:
                self.checkpoint(step_dir.name)

    def _released(self, keep: Keep) -> list[StepDir]:
        """Committed steps that `keep` does not keep, where only whole ones count."""
        keeper = Keeper(self._store, keep)
        now = _branching.look(self._store)
        counted_ones = now.committed
        while True:
            kept = keeper.kept(now._replace(committed=counted_ones))
            damaged = {n for n in kept if not verify(self._url(n), read_data=False).ok}
            if not damaged:
                return [d for d in counted_ones if d.name not in kept]
            self._damaged += sorted(damaged)
            counted_ones = [d for d in counted_ones if d.name not in damaged]

    def _delete_step(self, name: str) -> None:
        self._steps.append(name)
        self._nbytes += self._freed(name)
        if self._dry_run:
            return
        child = self._store.child(name)
        if not _commit.unexpected(child.entries()):
            _commit.delete(child)
            return
        child.remove(FILE)
        _commit.remove_other_attempts(child, "")

    # A checkpoint, or a directory that should have become one

    def checkpoint(self, prefix: str) -> None:
        store = self._store.child(prefix) if prefix else self._store
        before = store.entries()
        try:
            named = Manifest.from_bytes(store.read(FILE), FILE).attempt if FILE in before else None
        except (CorruptionError, FormatError):
            if not prefix:
                raise
            self._damaged += [] if prefix in self._damaged else [prefix]
            return
        except FileNotFoundError:  # deleted meanwhile
            return
        stale = prefix and named is None and self._is_old(prefix)
        gone = [
            name
            for name in before
            if name != named and _commit.is_leftover(name) and self._sweep_away(_join(prefix, name))
        ]
        if named is not None:
            for file in store.child(named).walk():
                if is_temporary(file):
                    self._sweep_away(_join(prefix, f"{named}/{file}"))
        elif prefix and gone == before and (gone or stale):
            self._leftovers.append(prefix)
            if not self._dry_run:
                self._store.remove_empty(prefix)

    def _freed(self, name: str) -> int:
        """Bytes that the removal of this frees: of files whose last name it is."""
        nbytes = 0
        for file, names, size in self._store.files_below(name):
            self._seen[file] += self._dry_run
            nbytes += size if names == max(1, self._seen[file]) else 0
        return nbytes

    # One leftover

    def _sweep_away(self, name: str) -> bool:
        """Delete a leftover if it is old enough; whether it went."""
        if not self._is_old(name):
            self._recent.append(name)
            return False
        self._leftovers.append(name)
        self._nbytes += self._freed(name)
        if not self._dry_run:
            self._store.remove_tree(name)
        return True

    def _is_old(self, name: str) -> bool:
        changed = self._store.changed_at(name)
        if changed is None:  # a store without times, or it has just gone
            return self._older_than_s == 0
        return time.time() - changed >= self._older_than_s

    def _url(self, name: str) -> str:
        return self._store.child(name).url


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
