"""Values of pieces in host memory, safe from the next training step, under a byte budget.

On CPU a piece is a NumPy view of its shard: while the view lives, a step that donates the array
copies instead of reusing its memory, so each view is dropped as soon as its piece is written.
NumPy arrays, and everything that is not on CPU, are copied, and the copies are charged to a
budget that makes the caller wait when it is spent.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxshard import _arrays, _plan, _tensors
from jaxshard._boxes import Box
from jaxshard._plan import Entry, Piece, ProcessPlan
from jaxshard._source import layout_of
from jaxshard._spec import LeafSpec

Array = np.ndarray[Any, Any]
_CGROUP = "/sys/fs/cgroup"
_UNKNOWN_FREE_BYTES = 4 << 30


class Staged(NamedTuple):
    """The elements of one piece or pack entry, in the leaf's own dtype; `release` when written."""

    of: Piece | Entry
    values: Array
    release: Callable[[], None]


class Budget:
    """Bytes that copies may take; `acquire` waits until they are there."""

    def __init__(self, bytes_max: int) -> None:
        self._free = bytes_max
        self._max = bytes_max
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self, nbytes: int) -> bool:
        """Take bytes (one piece larger than the budget is let through alone); False if closed."""
        wanted = min(nbytes, self._max)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted or self._closed)
            self._free -= wanted
            return not self._closed

    def release(self, nbytes: int) -> None:
        """Give bytes back."""
        with self._changed:
            self._free += min(nbytes, self._max)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody who waits: nothing will be written any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def stage(
    plan: ProcessPlan,
    leaves: Sequence[LeafSpec],
    values: Sequence[Any],
    *,
    budget: Budget | None = None,
    copy_all: bool = False,
) -> Iterator[Staged]:
    """Bring the pieces, then the pack entries of a plan to host memory, in the plan's order.

    Args:
      plan: of this process.
      leaves: with layouts.
      values: the leaf values, by leaf number.
      budget: None for a synchronous save, where nobody changes a value meanwhile: nothing is
        copied that does not have to be. Else copies are made now and charged to it.
      copy_all: copy even what a view would protect.
    """
    shards: dict[int, dict[tuple[int, ...], _arrays.Shard]] = {}
    at: tuple[Any, Array | None] = (None, None)
    tasks: list[Piece | Entry] = [*plan.pieces, *plan.entries]
    for task in tasks:
        leaf = leaves[task.leaf]
        if task.leaf not in shards:
            shards[task.leaf] = {s.box.offset: s for s in _arrays.shards(leaf, values[task.leaf])}
        box = _plan.element_box(task.box, layout_of(leaf), leaf.array_shape or ())
        shard = _holding(shards[task.leaf], box)
        key = (task.leaf, shard.box.offset)
        if at[0] != key:
            at = (None, None)  # never two shards at once
            at = (key, shard.host())
        host = at[1]
        assert host is not None
        part = host[box.relative_to(shard.box).slices]
        copied = budget is not None and (copy_all or not _arrays.is_view(leaf, values[task.leaf]))
        if not copied or budget is None:
            yield Staged(task, part, _nothing)
            continue
        if not budget.acquire(part.nbytes):
            return
        yield Staged(task, _copy(part), _releaser(budget, part.nbytes))


def _copy(part: Array) -> Array:
    copied = _tensors.empty(part.shape, part.dtype)
    copied[...] = part
    return copied


def _nothing() -> None:
    pass


def _releaser(budget: Budget, nbytes: int) -> Callable[[], None]:
    return lambda: budget.release(nbytes)


def _holding(shards: dict[tuple[int, ...], _arrays.Shard], box: Box) -> _arrays.Shard:
    """The shard in which a piece lies; all shards of a leaf have the same shape."""
    size = next(iter(shards.values())).box.shape
    return shards[tuple(o // s * s for o, s in zip(box.offset, size, strict=True))]


def copied_bytes(leaves: Sequence[LeafSpec], values: Sequence[Any], *, copy_all: bool) -> int:
    """Bytes that an asynchronous snapshot would copy."""
    return sum(
        leaf.nbytes
        for leaf, value in zip(leaves, values, strict=True)
        if leaf.layout is not None and (copy_all or not _arrays.is_view(leaf, value))
    )


def free_host_bytes() -> int:
    """Host memory that can still be taken, within the cgroup of this process."""
    fields = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
    available = fields.get("MemAvailable", "").split()
    found = [int(available[0]) << 10] if available else []
    limit, used = _text(f"{_CGROUP}/memory.max").strip(), _text(f"{_CGROUP}/memory.current")
    if limit.isdigit() and used:
        found.append(int(limit) - int(used))
    return max(0, min(found, default=_UNKNOWN_FREE_BYTES))


def _text(path: str) -> str:
    """A file of the kernel; empty where there is none (not on Linux, or another cgroup version)."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
