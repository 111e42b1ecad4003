"""Daemon threads that run calls, a few at a time.

Daemons, since a disk that hangs must not keep the interpreter from ending.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_TURN_S = 0.005  # a thread that works may wait as long for its turn (sys.getswitchinterval)
_Call = tuple[Future[Any], Callable[[], Any]]


def cores() -> int:
    """How many threads of this process can run at once."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Threads that are started as calls come, and ended by `end`.

    Args:
      name: of the threads.
      limit: of their number, where calls keep the cores busy.
      limit_waiting: of their number once calls were seen to wait, for a disk or for a network.
    """

    def __init__(self, name: str, limit: int, limit_waiting: int) -> None:
        self._name = name
        self._limit = limit
        self._limit_waiting = limit_waiting
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def start(self, call: Callable[[], Any]) -> "Future[Any]":
        """Begin a call."""
        future: Future[Any] = Future()
        self._start_thread()
        if self._threads:
            self._calls.put((future, call))
        else:
            _run(future, call)
        return future

    def _start_thread(self) -> None:
        """Start one more, if there may be one more."""
        with self._starting:
            if len(self._threads) >= self._limit:
                return
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            # Python 3.12 starts none once the main thread has ended, when the last save of a
            # script may still be under way; then there are fewer, or the caller does it.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._threads.append(thread)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            began, worked = time.monotonic(), time.thread_time()
            _run(*item)
            del item  # what the call holds is not kept until the next one comes
            if time.monotonic() - began > 2 * (time.thread_time() - worked) + _TURN_S:
                self._waits()

    def _waits(self) -> None:
        with self._starting:
            if self._limit >= self._limit_waiting:
                return
            self._limit = self._limit_waiting
        for _ in range(self._calls.qsize()):
            self._start_thread()

    def end(self, timeout_s: float | None = None) -> bool:
        """Let the threads end after what was begun; whether they did within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._starting:
            self._limit = self._limit_waiting = 0  # a thread that is running may start no other
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is threading.current_thread():  # the last owner was let go there
                continue
            thread.join(None if deadline is None else max(0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _run(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as e:  # noqa: BLE001  (it is raised where the result is asked for)
        future.set_exception(e)
    else:
        future.set_result(result)
    finally:
        del future, call  # the error holds this frame, and the future the error: a cycle
