"""What happens behind a save: old steps are deleted, or only a part of them is kept.

On a thread of its own that ends with it, so that the next save waits for no deletion. If saves are
faster it does one thing at a time and leaves the rest for later, so that a save waits for no more
than one deletion, and a run takes little more than what is kept.
"""

import logging
import threading

from jaxshard import _branching, _commit, _steps, _thinning
from jaxshard._epochs import Epoch
from jaxshard._errors import ConflictError, CorruptionError, JaxshardError, LeafMismatchError
from jaxshard._keeping import Keeper
from jaxshard._ledger import Ledger
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
        self._changed = threading.Condition()
        self._behind: list[tuple[StepDir, str]] = []  # saves; the first is being looked at
        self._hurried = False
        self._thread: threading.Thread | None = None

    def begin(self, just_saved: StepDir, attempt: str) -> None:
        """Begin behind a save that was committed, or go on with it later."""
        with self._changed:
            self._behind.append((just_saved, attempt))
            if len(self._behind) > 1:
                return  # the thread that is running goes on with it
            self._thread = threading.Thread(target=self._work, name="jaxshard-tidy", daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # Python 3.12 starts none once the main thread has ended
            self._thread = None
            self._work()

    def _work(self) -> None:
        more = True
        while more:
            try:
                self._tidy(*self._behind[0])
            except Exception:
                logger.exception("deleting old steps of %s failed", self._store.url)
            finally:  # whoever waits for it must not wait for ever
                with self._changed:
                    del self._behind[0]
                    more = bool(self._behind)
                    self._changed.notify_all()

    @property
    def lags(self) -> bool:
        """Whether it is two saves behind."""
        return len(self._behind) > 1

    def catch_up(self) -> None:
        """Wait until it is at most one save behind."""
        with self._changed:
            self._changed.wait_for(lambda: not self.lags)

    def hurry(self) -> None:
        """Begin nothing more: the process is about to end, and the next one goes on with it."""
        self._hurried = True

    def settle(self) -> None:
        """Wait until it is done."""
        if self._thread is threading.current_thread():  # a hook, or a finalizer
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._behind)
        if self._thread is not None:
            self._thread.join()

    def _enough(self, done: int) -> bool:
        """Whether the rest is for the next time: so that nobody waits for more than one step."""
        return self._hurried or (self.lags and done > 0)

    def _tidy(self, just_saved: StepDir, attempt: str) -> None:
        """Failing at it fails no save."""
        try:
            gone = self._delete(just_saved)
            _commit.remove_other_attempts(self._store.child(just_saved.name), attempt)
            if gone:
                self._ledger.add("prune", names=gone)
                logger.info("pruned %s: %s", self._store.url, ", ".join(gone))
            thinned = self._thin(just_saved)
        except (OSError, JaxshardError) as e:
            logger.warning(
                "deleting old steps of %s failed, will be tried again: %s", self._store.url, e
            )
            return
        if thinned:
            self._ledger.add("thin", names=thinned, to=self._keeper.thin_to)
            logger.info("thinned %s: %s", self._store.url, ", ".join(thinned))

    def _delete(self, just_saved: StepDir) -> list[str]:
        there = _steps.step_dirs(self._store)  # first: what comes later is not ours to judge
        now = _branching.look(self._store)
        kept = self._keeper.kept(now) | {just_saved.name, *(d.name for d in now.late)}
        gone: list[str] = []
        for name in [d.name for d in there if d.name not in kept and d.step <= just_saved.step]:
            if self._enough(len(gone)):
                break
            # Just before each, since this thread may have slept.
            self._epoch.require_newest()
            if name not in _branching.look(self._store).standing.protected:
                _commit.delete(self._store.child(name))
                gone.append(name)
        return gone

    def _thin(self, just_saved: StepDir) -> list[str]:
        """Leave only a part of older steps; one that cannot be thinned stays whole."""
        done: list[str] = []
        while not self._enough(len(done)):
            step_dir = next((d for d in self._to_thin() if d.step < just_saved.step), None)
            if step_dir is None:
                break
            try:
                if self._thin_one(step_dir):
                    done.append(step_dir.name)
            except ConflictError as e:
                logger.info("step %d is not thinned: %s", step_dir.step, e)
                break  # another job has taken over, or somebody has decided something
            except LeafMismatchError as e:
                logger.warning("steps stay whole: %s", e)
                self._keeper.thin_none()
                break
            except CorruptionError as e:
                logger.warning("step %d stays whole: %s", step_dir.step, e)
            self._keeper.was_thinned(step_dir)
        return done

    def _to_thin(self) -> list[StepDir]:
        return self._keeper.thinned(_branching.look(self._store))

    def _thin_one(self, step_dir: StepDir) -> bool:
        def still_wanted() -> None:
            if step_dir not in self._to_thin():
                raise ConflictError(f"{step_dir.name} was protected, or is needed as it is")

        self._epoch.require_newest()
        child = self._store.child(step_dir.name)
        return _thinning.thin(child, self._keeper.thin_to, self._epoch, still_wanted)
