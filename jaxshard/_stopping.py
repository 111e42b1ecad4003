"""Asked to stop: by a signal, or by a time at which the job will be killed."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

logger = logging.getLogger("jaxshard")

EXIT_CODE = 75  # EX_TEMPFAIL: whoever started the job may start it again
_SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970


class StopRequest:
    """Whether somebody wants the job to end.

    Args:
      signals: names of signals that ask for it; a handler that was there is called too.
      deadline_s: seconds until the job will be killed; None asks Slurm, if it runs the job.
    """

    def __init__(self, signals: Iterable[str], deadline_s: float | None) -> None:
        self.reason: str | None = None
        self._deadline = _deadline(deadline_s)
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._closed = False
        numbers = [_signal(name) for name in signals]
        if threading.current_thread() is not threading.main_thread():
            if numbers:
                logger.info("not the main thread: signals do not stop this run")
            return
        for number in numbers:
            self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._closed or os.getpid() != self._pid:
            # Somebody has put this handler back, or is a child that was forked.
            self._as_before(number, frame)
            return
        if self.reason is None:
            self.reason = signal.Signals(number).name
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        """What would happen if this handler had never been."""
        before = self._before.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def check(self, needed_s: float) -> str | None:
        """Why to stop, None if there is no reason.

        Args:
          needed_s: how long one more step and a save take: as long before the deadline it is time.
        """
        if self.reason is None and self._deadline is not None:
            left_s = self._deadline - time.monotonic()
            if left_s <= needed_s:
                self.reason = f"the deadline in {max(0.0, left_s):.0f} s"
        return self.reason

    def close(self) -> None:
        """Give the signals back to the handlers that were there before."""
        self._closed = True
        if threading.current_thread() is not threading.main_thread():
            return  # then `_on_signal` does as they would
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if before is None else before)


def _signal(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError as e:
        raise ValueError(
            f"signals: expected names of signals, found {name!r}\n"
            'hint: signals=("SIGTERM", "SIGUSR1")'
        ) from e


def _deadline(deadline_s: float | None) -> float | None:
    """When the job will be killed, by the monotonic clock."""
    if deadline_s is not None:
        if not deadline_s > 0:
            raise ValueError(
                f"deadline_s: expected seconds from now, more than 0, found {deadline_s}\n"
                "hint: deadline_s=4 * 3600 for a job of four hours"
            )
        return time.monotonic() + deadline_s
    end = os.environ.get(_SLURM_END, "")
    return time.monotonic() + int(end) - time.time() if end.isdecimal() else None
