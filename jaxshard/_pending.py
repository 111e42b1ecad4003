"""A save in the background, and the error of one that nobody has asked for yet."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxshard import _saving, _writing
from jaxshard._errors import StorageTimeoutError, size_text
from jaxshard._saving import SaveJob, SaveReport
from jaxshard._snapshot import Budget, Staged

logger = logging.getLogger("jaxshard")

_POLL_S = 0.01
_END: Any = object()


class PendingSave:
    """A save in the background; made by `save_async`.

    One thread lives as long as the save does; the interpreter does not end before it.

    Attributes:
      path: where the checkpoint will be.
      step: its step, if it has one.
      told: whether `wait` or `exception` has told somebody how it ended.
    """

    def __init__(
        self,
        job: SaveJob,
        budget: Budget,
        then: Callable[[SaveJob], None] | None,
        *,
        owned: bool,
    ) -> None:
        self.path = job.store.url
        self.step = job.step
        self._job: SaveJob | None = job
        self._began = job.began
        self._then = then
        self._owned = owned  # by a ResumeManager, which tells of errors in its own way
        self.told = False
        self._budget = budget
        self._staged: queue.SimpleQueue[Staged] = queue.SimpleQueue()
        self._blocked_s = 0.0
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._filled = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jaxshard-save", daemon=False)

    def fill(self, staged: Iterator[Staged], *, write_meanwhile: bool) -> None:
        """Take the snapshot: hand all values to the writer, waiting when the budget is spent.

        Args:
          staged: the values; a budget that they may wait for asks for `write_meanwhile`.
          write_meanwhile: whether to begin writing before all values are there. Of views it would
            only make the caller wait for the interpreter: 2,000 leaves blocked twice as long.
        """
        if write_meanwhile:
            self._thread.start()
        try:
            for item in staged:
                self._staged.put(item)
        except BaseException:
            self._end_snapshot()
            self.exception()  # the writer only saw its input end early; the caller gets the cause
            raise
        self._end_snapshot()

    def _end_snapshot(self) -> None:
        self._staged.put(_END)
        self._blocked_s = time.monotonic() - self._began
        self._filled.set()
        if not self._thread.ident:
            self._thread.start()

    def _work(self) -> None:
        assert self._job is not None
        try:
            reused = _writing.write(self._job, self._arrivals())
            self._filled.wait()
            self._report = _saving.report(self._job, reused, blocked_s=self._blocked_s)
            log_saved(self._report)
            if self._then is not None:
                self._then(self._job)
        except BaseException as e:  # noqa: BLE001  (raised by wait, or by the next call)
            self._error = e
            if not self._owned:
                _remember(self)
            logger.error("saving %s failed: %s", self.path, e)  # noqa: TRY400  (whoever gets it has the traceback)
        finally:
            self._budget.close()
            self._staged = queue.SimpleQueue()  # drops the views of what was not written
            self._job = None

    def _arrivals(self) -> Iterator[Staged | None]:
        """What the snapshot hands over; None while it waits, perhaps for memory that we hold."""
        while True:
            try:
                item = self._staged.get(timeout=_POLL_S)
            except queue.Empty:
                yield None
                continue
            if item is _END:
                return
            yield item

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed.

        Args:
          timeout_s: how long to wait, in seconds; the save goes on if it passes.

        Raises:
          StorageTimeoutError: still not done after `timeout_s`.
          StorageError: the store failed; there is no checkpoint, earlier ones are untouched.
          ConflictError: another save committed at the path first.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        assert self._report is not None
        return self._report

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait, and return the error instead of raising it; None if all went well.

        Args:
          timeout_s: as for `wait`.

        Raises:
          StorageTimeoutError: still not done after `timeout_s`.
        """
        error = self.outcome(timeout_s)
        _forget(self)
        self.told = True
        return error

    def outcome(self, timeout_s: float | None = None) -> BaseException | None:
        """`exception`, for a manager: whether somebody was told stays as it is."""
        self._join(timeout_s)
        return self._error

    @property
    def report(self) -> SaveReport | None:
        """What was saved, once it is committed."""
        return self._report

    def _join(self, timeout_s: float | None) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise StorageTimeoutError(
                f"{self.path}: the save did not end within timeout_s: {timeout_s}",
                path=self.path,
                step=self.step,
                hint="it goes on in the background; wait() again",
            )

    def __repr__(self) -> str:
        state = "in progress" if not self.done() else "failed" if self._error else "committed"
        return f"<PendingSave {self.path!r}: {state}>"


_failed: list[PendingSave] = []
_failed_lock = threading.Lock()


def _remember(pending: PendingSave) -> None:
    with _failed_lock:
        _failed.append(pending)


def _forget(pending: PendingSave) -> None:
    with _failed_lock:
        if pending in _failed:
            _failed.remove(pending)


def raise_background_errors() -> None:
    """Raise the error of an earlier `save_async` that nobody has seen yet.

    Raises:
      JaxshardError: whatever that save failed with.
    """
    with _failed_lock:
        pending = _failed.pop(0) if _failed else None
    if pending is not None:
        error = pending.exception()
        assert error is not None
        error.add_note(f"raised in the background by the earlier save of {pending.path!r}")
        raise error


def log_saved(report: SaveReport) -> None:
    """One line per save."""
    logger.info(
        "saved %s: %s in %.2f s (%.2f GB/s), blocked for %.3f s",
        report.path,
        size_text(report.nbytes),
        report.seconds,
        report.bytes_per_s / 1e9,
        report.blocked_s,
    )
