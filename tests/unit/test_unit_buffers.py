"""Large buffers: aligned, used again, and never one for two arrays."""

import errno
import gc
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxshard import _buffers

MIB = 1 << 20
F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def areas(monkeypatch):
    """Areas of their own for each test."""
    made = _buffers._Areas()
    monkeypatch.setattr(_buffers, "_areas", made)
    return made


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (MIB,), (3 * MIB + 7,), (33, 17, 4099)])
def test_an_array_is_aligned_and_can_be_written(shape):
    array = _buffers.empty(shape, F32)
    assert (array.shape, array.dtype) == (shape, F32)
    assert array.size == 0 or address(array) % 64 == 0
    array[...] = 7
    assert (array == 7).all()


def test_memory_is_used_again_once_all_views_are_gone():
    first = _buffers.empty((8 * MIB,), F32)
    at, view = address(first), first[5:].reshape(-1)[::2]
    del first
    second = _buffers.empty((8 * MIB,), F32)
    assert address(second) != at
    del view
    gc.collect()
    third = _buffers.empty((8 * MIB,), F32)
    assert address(third) == at


def test_what_does_not_fit_is_replaced_and_not_added(areas):
    for mib in (8, 64, 8, 100, 16, 8):
        buffers = [_buffers.empty((mib * MIB,), np.dtype(np.uint8)) for _ in range(3)]
        del buffers
        assert sum(map(len, areas._free)) <= 3 * 102 * MIB
    assert len(areas._free) <= 9


def test_threads_never_share_a_buffer():
    def is_mine(number):
        for _ in range(60):
            buffer = _buffers.empty((5 * MIB,), np.dtype(np.uint8))
            buffer[:: MIB // 4] = number
            if not (buffer[:: MIB // 4] == number).all():
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(is_mine, range(6)))


class Refusing(mmap.mmap):
    """What madvise is where the kernel was built without it."""

    def madvise(self, *_):
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_kernel_without_huge_pages_or_lazy_freeing_will_do(areas, monkeypatch):
    monkeypatch.setattr(mmap, "mmap", Refusing)
    for _ in range(2):
        array = _buffers.empty((8 * MIB,), F32)
        array[...] = 1
        del array
    assert areas._free == []


def test_huge_pages_are_given_up_where_they_come_slowly(areas, monkeypatch):
    monkeypatch.setattr(_buffers, "_SLOW_S", -1.0)
    asked = []
    monkeypatch.setattr(areas, "_use_huge_pages", spied(areas._use_huge_pages, asked))
    kept = [_buffers.empty((8 * MIB,), F32) for _ in range(5)]
    assert len(asked) == _buffers._SLOW_MAX < len(kept)


def spied(method, calls):
    def call(*args):
        calls.append(args)
        return method(*args)

    return call


def test_more_than_there_can_be_is_a_memory_error():
    with pytest.raises(MemoryError, match="bytes"):
        _buffers.empty((1 << 60,), np.dtype(np.uint8))


def test_scratch_memory_is_lent_to_one_at_a_time():
    scratch = _buffers.Scratch()
    with scratch.lend(100) as a, scratch.lend(5 * MIB) as b:
        assert not np.shares_memory(a, b)
        at = address(b)
    with scratch.lend(5 * MIB) as again:
        assert address(again) == at
    with scratch.lend(40 * MIB):
        pass
    assert sum(map(len, scratch._free)) <= _buffers._SCRATCH_BYTES_MAX
