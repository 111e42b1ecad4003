"""Run many reads or writes with bounded bytes in flight; the first error wins.

One loop in the calling thread over the futures of TensorStore, or of `_threads.Workers`: no event
loop. Requests are made lazily, so that what they hold in memory is bounded too.
"""

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

    When one fails, no further one is begun, those in flight are waited for (each a few seconds at
    most: a disk may hang), and its error is raised.

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
                    _finish(*flying[0], deadline, timeout_s)
                    held -= flying.popleft()[0].nbytes
                continue
            while flying and (held + request.nbytes > bytes_max or len(flying) >= _IN_FLIGHT_MAX):
                _finish(*flying[0], deadline, timeout_s)
                held -= flying.popleft()[0].nbytes
            flying.append((request, request.start()))
            held += request.nbytes
        while flying:
            _finish(*flying[0], deadline, timeout_s)
            flying.popleft()
    finally:
        for _, future in flying:
            _settle(future)


def _finish(
    request: Request, future: Future, deadline: float | None, timeout_s: float | None
) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    try:
        with late(timeout_s):
            if left is not None and left <= 0:
                raise TimeoutError  # noqa: TRY301  (one way out, late or not yet done)
            result = future.result(left)
    except StorageTimeoutError:
        raise
    except Exception as e:
        raise request.failed(e) from e
    request.finish(result)


@contextlib.contextmanager
def late(timeout_s: float | None) -> Iterator[None]:
    """Say of a TimeoutError what did not end."""
    try:
        yield
    except TimeoutError as e:
        raise StorageTimeoutError(
            f"reading or writing did not end within timeout_s: {timeout_s}",
            hint="raise timeout_s in the options, or look at the disk",
        ) from e


def _settle(future: Future) -> None:
    """Wait for what can no longer be stopped; its outcome does not matter any more."""
    with contextlib.suppress(Exception):  # the first error is on its way
        future.result(_SETTLE_S)
