"""Host memory that elements pass through: large buffers in huge pages, used again.

Page faults decide how fast a load is: *big* takes 0.17 s into memory that was touched before,
0.22 s into fresh huge pages, 0.33 s into fresh pages of 4 KiB. But where a hypervisor has taken
free memory back, or where it is cut into small parts, the first touch of a huge page takes
milliseconds, and the whole load 1.7 s. (benchmarks/load.py)
"""

import contextlib
import ctypes
import functools
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_HUGE_PAGE = 2 << 20
_SLOW_S = 0.0015  # to clear a huge page takes a tenth
_SLOW_MAX = 2  # in a row: one may have waited for its turn
_SCRATCH_BYTES_MAX = 32 << 20  # that lie idle
TRIM_BYTES = 16 << 20  # less traffic than this leaves nothing worth giving back


class _Areas:
    """Mappings that large arrays lie in, kept when those are gone.

    What is kept is marked with MADV_FREE: it is the system's as soon as that needs it, and else
    still there for the next array. So it is no more than was in use before.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # oldest first; append and remove are atomic
        self._slow = 0 if hasattr(mmap, "MADV_HUGEPAGE") else _SLOW_MAX

    def take(self, nbytes: int) -> mmap.mmap:
        """A private mapping with at least so many bytes behind its first multiple of 2 MiB."""
        length = (-(-nbytes // _HUGE_PAGE) + 1) * _HUGE_PAGE
        return self._kept(length) or self._new(length)

    def _kept(self, length: int) -> mmap.mmap | None:
        for area in tuple(self._free):
            if length <= len(area) <= 2 * length:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._free.remove(area)
                    return area
        return None

    def _new(self, length: int) -> mmap.mmap:
        unfit = 0
        while unfit < length and self._free:
            with contextlib.suppress(IndexError):
                unfit += len(self._free.pop(0))
        try:
            area = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise MemoryError(f"{length:,} bytes: {e.strerror}") from e
        if self._slow < _SLOW_MAX:
            self._use_huge_pages(area)
        return area

    def _use_huge_pages(self, area: mmap.mmap) -> None:
        try:
            area.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            self._slow = _SLOW_MAX
            return
        began = time.perf_counter()
        area[_HUGE_PAGE] = 0
        slow = time.perf_counter() - began > _SLOW_S
        self._slow = self._slow + 1 if slow else 0

    def give_back(self, area: mmap.mmap) -> None:
        """No array lies in it any more."""
        if hasattr(mmap, "MADV_FREE"):
            with contextlib.suppress(OSError):  # locked memory cannot be lent back
                area.madvise(mmap.MADV_FREE)
                self._free.append(area)


_areas = _Areas()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array, in memory of its own if it is large.

    Its beginning is a multiple of 64 bytes, of a page if it is as long as one.

    Large ones do not come from malloc: of the threads of asynchronous saves they stayed in its
    arenas, 250 MiB more after 20 saves of 16 MiB.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < 2 * _HUGE_PAGE:
        align = 64 if nbytes < mmap.PAGESIZE else mmap.PAGESIZE
        raw = np.empty(nbytes + align, np.uint8)
        start = -raw.ctypes.data % align
    else:
        area = _areas.take(nbytes)
        raw = np.frombuffer(area, np.uint8)
        weakref.finalize(raw, _areas.give_back, area).atexit = False  # views keep raw alive
        start = -raw.ctypes.data % _HUGE_PAGE
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class Scratch:
    """Memory that elements pass through, used again; for several threads.

    Into fresh pages, tiles on their way to several devices took half of the time of a load on
    another mesh. (benchmarks/load.py)
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[Array]:
        """`[nbytes]` of uint8, uninitialised, for a while."""
        with self._lock:
            fits = next((i for i, raw in enumerate(self._free) if len(raw) >= nbytes), None)
            raw = None if fits is None else self._free.pop(fits)
        if raw is None:
            raw = empty((nbytes,), np.dtype(np.uint8))
        try:
            yield raw[:nbytes]
        finally:
            with self._lock:
                if sum(map(len, self._free)) + len(raw) <= _SCRATCH_BYTES_MAX:
                    self._free.append(raw)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl and macOS do not


def trim_heap() -> None:
    """Give what malloc keeps back to the system, after TensorStore; takes a few milliseconds.

    TensorStore's threads take and drop buffers of a tile each, which glibc keeps in an arena for
    each thread: 100 MiB and more after 50 saves of 32 MiB.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
