"""Run many reads or writes with bounded bytes in flight; the first error wins.

One loop in the calling thread over the futures of TensorStore, or of `_threads.Workers`: no event
loop. Requests are made lazily, so that what they hold in memory is bounded too.
"""

import concurrent.futures
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from jaxshard._errors import StorageTimeoutError

# Enough to keep 16 I/O threads busy; bounds what 20,000 small requests can hold.
_IN_FLIGHT_MAX = 64
_SETTLE_S = 5.0


class Future(Protocol):
    """What the futures of TensorStore and of Python have."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait; raise the error if there was one."""


class _Done(NamedTuple):
    value: Any

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002
        return self.value


def done(value: Any = None) -> Future:
    """A future whose value is there."""
    return _Done(value)


class Request(NamedTuple):
    """One read or write.

    Attributes:
      nbytes: memory that it holds while it is in flight.
      start: begins it.
      finish: called with its result, in the calling thread.
      failed: turns its error into ours; gets the error, returns the one to raise.
    """

    nbytes: int
    start: Callable[[], Future]
    finish: Callable[[Any], None]
    failed: Callable[[Exception], Exception]


def run(
    requests: Iterable[Request | None], *, bytes_max: int, timeout_s: float | None = None
) -> None:
    """Run all requests, at most `bytes_max` in flight (one larger one alone).

    None among the requests means that the next one is not there yet: what is in flight is finished
    meanwhile, since the next one may wait for the memory that it holds.

    When one fails, no further one is begun, those in flight are waited for (a few seconds at most:
    a disk may hang), and its error is raised.

    Raises:
      StorageTimeoutError: not done after `timeout_s`.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    flying: deque[tuple[Request, Future]] = deque()
    held = 0
    try:
        for request in requests:
            if request is None:
                if flying:
                    held -= _finish_first(flying, deadline, timeout_s)
                continue
            while flying and (held + request.nbytes > bytes_max or len(flying) >= _IN_FLIGHT_MAX):
                held -= _finish_first(flying, deadline, timeout_s)
            flying.append((request, request.start()))
            held += request.nbytes
        while flying:
            _finish_first(flying, deadline, timeout_s)
    finally:
        _settle(flying)


def _finish_first(
    flying: deque[tuple[Request, Future]], deadline: float | None, timeout_s: float | None
) -> int:
    """Wait for the oldest request; the bytes that it held.

    An error keeps the frames that it passed, and they must not keep the error: only a collection
    would end such a cycle, and until then all that a failed load has read would stay in memory.
    """
    request, future = flying[0]
    left = None if deadline is None else deadline - time.monotonic()
    try:
        with late(timeout_s):
            if left is not None and left <= 0:
                raise TimeoutError  # noqa: TRY301  (one way out, late or not yet done)
            result = future.result(left)
    except StorageTimeoutError:
        raise
    except Exception as e:
        flying.popleft()
        if (error := request.failed(e)) is e:
            raise
        try:
            raise error from e
        finally:
            del error
    finally:
        del future
    flying.popleft()
    request.finish(result)
    return request.nbytes


@contextlib.contextmanager
def late(timeout_s: float | None) -> Iterator[None]:
    """Say of a TimeoutError what did not end."""
    try:
        yield
    except TimeoutError as e:
        if e.errno is not None:  # the file system's own, of a server that does not answer
            raise
        raise StorageTimeoutError(
            f"reading or writing did not end within timeout_s: {timeout_s}",
            hint="raise timeout_s in the options, or look at the disk",
        ) from e


def _settle(flying: deque[tuple[Request, Future]]) -> None:
    """Wait for what can no longer be stopped; its outcome does not matter any more."""
    _cancel(flying)
    deadline = time.monotonic() + _SETTLE_S
    while flying:
        with contextlib.suppress(Exception):  # the first error is on its way
            flying.popleft()[1].result(max(0, deadline - time.monotonic()))


def _cancel(flying: Iterable[tuple[Request, Future]]) -> None:
    """Begin no call that waits for a thread."""
    for _, future in flying:
        if isinstance(future, concurrent.futures.Future):
            future.cancel()
