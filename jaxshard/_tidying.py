"""What happens behind a save: old steps are deleted, or only a part of them is kept.

On a thread of its own that ends with it, so that the next save waits for no deletion; but never two
behind, so that a run takes at most two steps more than what is kept.
"""

import logging
import threading

from jaxshard import _branching, _commit, _steps, _thinning
from jaxshard._epochs import Epoch
from jaxshard._errors import CorruptionError, JaxshardError, LeafMismatchError
from jaxshard._keeping import Keeper
from jaxshard._ledger import Ledger
from jaxshard._reader import open_checkpoint
from jaxshard._steps import StepDir
from jaxshard._store import Store

logger = logging.getLogger("jaxshard")


class Tidier:
    """Deletes and thins what a `Keep` releases.

    Args:
      store: the directory of the run.
      keeper: says what stays.
      epoch: of this process; nothing is touched once a later one has begun.
      ledger: is told what was done.
    """

    def __init__(self, store: Store, keeper: Keeper, epoch: Epoch, ledger: Ledger) -> None:
        self._store = store
        self._keeper = keeper
        self._epoch = epoch
        self._ledger = ledger
        self._thinned: set[str] = set()  # or tried to
        self._changed = threading.Condition()
        self._behind: list[StepDir] = []  # saves; the first is being looked at
        self._thread: threading.Thread | None = None

    def begin(self, just_saved: StepDir) -> None:
        """Begin behind a save that was committed, or go on with it later."""
        with self._changed:
            self._behind.append(just_saved)
            if len(self._behind) > 1:
                return  # the thread that is running goes on with it
            self._thread = threading.Thread(target=self._work, name="jaxshard-tidy", daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # Python 3.12 starts none once the main thread has ended
            self._thread = None
            self._work()

    def _work(self) -> None:
        just_saved: StepDir | None = self._behind[0]
        while just_saved is not None:
            try:
                self._tidy(just_saved)
            except Exception:  # whoever waits for it must not wait for ever
                logger.exception("deleting old steps of %s failed", self._store.url)
            with self._changed:
                del self._behind[0]
                just_saved = self._behind[0] if self._behind else None
                self._changed.notify_all()

    @property
    def lags(self) -> bool:
        """Whether it is two saves behind."""
        return len(self._behind) > 1

    def catch_up(self) -> None:
        """Wait until it is at most one save behind."""
        with self._changed:
            self._changed.wait_for(lambda: not self.lags)

    def settle(self) -> None:
        """Wait until it is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._behind)
        if self._thread is not None:
            self._thread.join()

    def _tidy(self, just_saved: StepDir) -> None:
        """Failing at it fails no save."""
        try:
            gone = self._delete(just_saved)
        except (OSError, JaxshardError) as e:
            logger.warning(
                "deleting old steps of %s failed, will be tried again: %s", self._store.url, e
            )
            return
        if gone:
            self._ledger.add("prune", names=gone)
            logger.info("pruned %s: %s", self._store.url, ", ".join(gone))
        thinned = self._thin(just_saved)
        if thinned:
            self._ledger.add("thin", names=thinned, to=self._keeper.thin_to)
            logger.info("thinned %s: %s", self._store.url, ", ".join(thinned))

    def _delete(self, just_saved: StepDir) -> list[str]:
        there = _steps.step_dirs(self._store)  # first: what comes later is not ours to judge
        now = _branching.look(self._store)
        kept = self._keeper.kept(now) | {just_saved.name, *(d.name for d in now.late)}
        gone = [d.name for d in there if d.name not in kept and d.step <= just_saved.step]
        for name in gone:
            # Just before each, since this thread may have slept.
            self._epoch.require_newest()
            if name not in _branching.look(self._store).standing.protected:
                _commit.delete(self._store.child(name))
        child = self._store.child(just_saved.name)
        _commit.remove_other_attempts(child, open_checkpoint(child.url).attempt)
        return gone

    def _thin(self, just_saved: StepDir) -> list[str]:
        """Leave only a part of older steps; one that cannot be thinned stays whole."""
        done = []
        for step_dir in self._keeper.thinned(_branching.look(self._store)):
            if step_dir.name in self._thinned or step_dir.step >= just_saved.step:
                continue
            child = self._store.child(step_dir.name)
            try:
                self._epoch.require_newest()
                if _thinning.thin(child, self._keeper.thin_to, self._epoch):
                    done.append(step_dir.name)
            except (CorruptionError, LeafMismatchError) as e:
                logger.warning("step %d stays whole: %s", step_dir.step, e)
            except (OSError, JaxshardError) as e:
                logger.warning("step %d stays whole, until the next save: %s", step_dir.step, e)
                continue
            self._thinned.add(step_dir.name)
        return done
