"""The saves of a training loop: one at a time, what they cost, and what becomes of their errors."""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from jaxshard import _checkpoint
from jaxshard._errors import JaxshardError, Kind, StorageError
from jaxshard._options import SaveOptions
from jaxshard._pace import Pace
from jaxshard._pending import PendingSave
from jaxshard._policy import SavedStep
from jaxshard._store import Store
from jaxshard._writer import RunWriter

logger = logging.getLogger("jaxshard")

_FAILURES_MAX = 3
_HISTORY = 100  # saves that a policy is shown
_FIRST_SAVE_S = 5.0  # what it is taken to need


class Saves:
    """The saves of one loop.

    Attributes:
      last: newest step that was saved or resumed from; -1 before the first.
      history: what a policy is shown.
      running: the save in the background, None if there is none.
    """

    def __init__(self, store: Store, writer: RunWriter, on_error: Literal["warn", "raise"]) -> None:
        self.last = -1
        self.history: deque[SavedStep] = deque(maxlen=_HISTORY)
        self.running: PendingSave | None = None
        self._store = store
        self._writer = writer
        self._on_error = on_error
        self._failures = 0
        self._pace = Pace()
        self._told: str | None = None

    # What it costs

    def begin_at(self, step: int) -> None:
        """Training goes on from a step."""
        self.last = step
        self.history.clear()
        self.history.append(SavedStep(step, time.monotonic(), took_s=0.0))

    def step_begins(self) -> None:
        """The next step begins now."""
        self._pace.step_begins(time.monotonic())

    def step_ended(self) -> float:
        """A step is over; what time it is."""
        now = time.monotonic()
        self._pace.step_ended(now, beside_save=self.running is not None)
        return now

    @property
    def needed_s(self) -> float:
        """How long one more step and a save will take."""
        took = [saved.took_s for saved in self.history if saved.took_s]
        return self._pace.step_s + 1.5 * max(took, default=_FIRST_SAVE_S) + 1.0

    # One at a time

    @property
    def busy(self) -> str | None:
        """What a save that begins now would have to wait for; None if it is nothing."""
        if self.running is not None:
            return f"the save of step {self.running.step} is still running"
        return "old steps are still being deleted" if self._writer.tidier.lags else None

    @property
    def newest(self) -> int:
        """The newest step that was saved, or is being saved."""
        return max(self.last, -1 if self.running is None else self.running.step or 0)

    def skipped(self, step: int, why: str) -> None:
        """Tell that a step is not saved; once for what it would have waited for."""
        if self._told != why:
            self._told = why
            logger.warning("step %d is not saved: %s", step, why)
            self._writer.ledger.add("skip", step=step, why=why)

    def begin(
        self,
        step: int,
        state: Any,
        metadata: Mapping[str, Any],
        options: SaveOptions,
        *,
        wait: bool,
    ) -> PendingSave:
        """Begin a save, once the one before has ended; with `wait`, end it, and raise its error."""
        self.wait()
        self._writer.tidier.catch_up()
        began = time.monotonic()
        step_dir = self._writer.next_dir(step)
        shared = self._writer.sharing.earlier is not None
        pending = _checkpoint.save_step_async(
            self._store.child(step_dir.name),
            state,
            step,
            metadata,
            options,
            then=lambda job: self._writer.saved(step_dir, job),
            owned=True,
            epoch=self._writer.epoch,
            sharing=self._writer.sharing,
        )
        self.history.append(SavedStep(step, began))
        self._pace.save_began(time.monotonic() - began)
        self.running = pending
        if not wait:
            return pending
        pending.outcome()  # Ctrl-C may end this, and then it is still running
        self.running = None
        error = self._note(pending)
        if error is not None and shared and _may_be_of_sharing(error):
            logger.warning("step %d is saved again, sharing nothing: %s", step, error)
            return self.begin(step, state, metadata, options, wait=True)
        self._writer.tidier.settle()
        if error is not None:
            raise error
        return pending

    def collect(self) -> None:
        """Take note of a save that has ended."""
        if self.running is not None and self.running.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
          JaxshardError: it failed, and that is not only to be logged.
        """
        if self.running is not None:
            pending = self.running
            pending.outcome()  # Ctrl-C may end this, and then it is still running
            self.running = None
            self._count(pending)

    def end(self, timeout_s: float | None = None) -> None:
        """Wait for the save in the background; an error of it is logged.

        Raises:
          StorageTimeoutError: it did not end within `timeout_s`.
        """
        if self.running is not None:
            pending = self.running
            pending.outcome(timeout_s)
            self.running = None
            error = self._note(pending)
            if error is not None and not pending.told:
                logger.warning("step %s was not saved: %s", pending.step, error)

    def _note(self, pending: PendingSave) -> BaseException | None:
        """Wait for a save, remember how it ended, and return its error."""
        error = pending.outcome()
        step = pending.step or 0
        saved = self.history.pop()
        report = pending.report
        if report is not None:
            self._failures = 0
            self.last = max(self.last, step)
            cost_s = self._pace.save_cost_s()
            saved = saved._replace(took_s=report.seconds, cost_s=cost_s)
            self._writer.ledger.add(
                "save",
                step=step,
                nbytes=report.nbytes,
                reused=report.reused_nbytes,
                seconds=report.seconds,
                blocked_s=report.blocked_s,
                cost_s=cost_s,
            )
        else:
            self._failures += 1
            self._writer.share_nothing()  # what could not be shared may be why
            saved = saved._replace(took_s=time.monotonic() - saved.clock_s)
            self._writer.ledger.add("save-failed", step=step, error=str(error))
        self.history.append(saved)
        return error

    def _count(self, pending: PendingSave) -> None:
        error = self._note(pending)
        if error is None or pending.told:
            return
        fatal = not isinstance(error, JaxshardError) or error.kind is Kind.SECOND_WRITER
        if self._on_error == "raise" or fatal:
            raise error
        if self._failures >= _FAILURES_MAX:
            raise StorageError(
                f"{self._store.url}: {self._failures} saves in a row failed, the last of step "
                f"{pending.step}: {error}",
                kind=Kind.SAVES_FAIL,
                path=self._store.url,
                step=pending.step,
                hint="look at the store; earlier steps are untouched",
            ) from error
        logger.warning("step %s was not saved, training goes on: %s", pending.step, error)


def _may_be_of_sharing(error: BaseException) -> bool:
    return isinstance(error, StorageError) and error.kind is Kind.STORAGE
