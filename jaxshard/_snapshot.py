"""Values of pieces in host memory, safe from the next training step, under a byte budget.

On CPU a piece is a NumPy view of its shard: while the view lives, a step that donates the array
copies instead of reusing its memory, so each view is dropped as soon as its piece is written.
NumPy arrays, and everything that is not on CPU, are copied, and the copies are charged to a
budget that makes the caller wait when it is spent.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxshard import _arrays, _buffers, _plan
from jaxshard._boxes import Box
from jaxshard._plan import Piece, ProcessPlan, Stretch
from jaxshard._spec import Layout, LeafSpec, layout_of

Array = np.ndarray[Any, Any]
_CGROUP = "/sys/fs/cgroup"
_UNKNOWN_FREE_BYTES = 4 << 30


class Staged(NamedTuple):
    """Elements of one piece, or of each entry of a stretch, in the leaf's own dtype.

    Attributes:
      of: the piece or the stretch.
      values: its elements; none of a piece that is not to be looked at.
      release: to be called when they were written.
      views: whether they are memory of the arrays themselves, and so cost none.
    """

    of: Piece | Stretch
    values: list[Array]
    release: Callable[[], None]
    views: bool


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
    unchanged: Collection[int] = (),
) -> Iterator[Staged]:
    """Bring the pieces, then the stretches of pack entries of a plan to host memory, in its order.

    Args:
      plan: of this process.
      leaves: with layouts.
      values: the leaf values, by leaf number.
      budget: None for a synchronous save, where nobody changes a value meanwhile: nothing is
        copied that does not have to be. Else copies are made now and charged to it.
      copy_all: copy even what a view would protect.
      unchanged: leaves whose pieces are not to be looked at.
    """
    staging = _Staging(plan, leaves, values)
    stretches = itertools.chain.from_iterable(plan.stretches())
    tasks: Iterator[Piece | Stretch] = itertools.chain(plan.each_piece(leaves), stretches)
    for task in tasks:
        if isinstance(task, Piece) and task.leaf in unchanged:
            yield Staged(task, [], _nothing, views=True)
            continue
        parts = staging.parts(task)
        views = staging.shards(task.leaf).views
        if budget is None or (views and not copy_all):
            yield Staged(task, parts, _nothing, views)
            continue
        nbytes = sum(part.nbytes for part in parts)
        if not budget.acquire(nbytes):
            return
        yield Staged(task, [_copy(part) for part in parts], _releaser(budget, nbytes), views=False)


class _Staging:
    """The shards of the leaves of a plan, brought to host memory one at a time."""

    def __init__(
        self, plan: ProcessPlan, leaves: Sequence[LeafSpec], values: Sequence[Any]
    ) -> None:
        self._tiles = plan.entries["tile"].tolist()
        self._leaves = leaves
        self._values = values
        self._shards: dict[int, _arrays.Shards] = {}
        self._last: tuple[Any, Array | None] = (None, None)

    def shards(self, leaf: int) -> _arrays.Shards:
        found = self._shards.get(leaf)
        if found is None:
            found = _arrays.shards(self._leaves[leaf], self._values[leaf])
            self._shards[leaf] = found
        return found

    def parts(self, task: Piece | Stretch) -> list[Array]:
        leaf = self._leaves[task.leaf]
        layout, shape = layout_of(leaf), leaf.array_shape or ()
        shards = self.shards(task.leaf)
        if isinstance(task, Piece):
            box = _plan.element_box(task.box, layout, shape)
            return [self._part(task.leaf, shards, *_place(box, shards.boxes))]
        places = _tile_places(layout._replace(path=""), shape, shards.boxes)
        tiles = self._tiles[task.first : task.stop]
        host = shards.host
        return [
            host(number) if inside is None else self._part(task.leaf, shards, number, inside)
            for number, inside in map(places.__getitem__, tiles)
        ]

    def _part(
        self, leaf: int, shards: _arrays.Shards, number: int, inside: tuple[slice, ...] | None
    ) -> Array:
        if inside is None:
            return shards.host(number)
        if self._last[0] != (leaf, number):
            self._last = (None, None)  # never two shards at once
            self._last = ((leaf, number), shards.host(number))
        host = self._last[1]
        assert host is not None
        part: Array = host[inside]
        return part


Place = tuple[int, tuple[slice, ...] | None]


def _place(box: Box, shards: tuple[Box, ...]) -> Place:
    """The shard that holds a box, and where in it; None: it is all of it."""
    number = next(i for i, shard in enumerate(shards) if shard.contains(box))
    shard = shards[number]
    return number, None if shard == box else box.relative_to(shard).slices


@functools.lru_cache(maxsize=1024)
def _tile_places(
    layout: Layout, shape: tuple[int, ...], shards: tuple[Box, ...]
) -> tuple[Place, ...]:
    """By tile: where its elements are. Made once for all leaves with the same grid and shards."""
    tiles = _plan.tile_lattice(layout)
    boxes = (_plan.element_box(tiles.box(i), layout, shape) for i in range(tiles.size))
    return tuple(_place(box, shards) for box in boxes)


def _copy(part: Array) -> Array:
    copied = _buffers.empty(part.shape, part.dtype)
    copied[...] = part
    return copied


def _nothing() -> None:
    pass


def _releaser(budget: Budget, nbytes: int) -> Callable[[], None]:
    return lambda: budget.release(nbytes)


def copied_bytes(
    leaves: Sequence[LeafSpec],
    values: Sequence[Any],
    *,
    copy_all: bool,
    unchanged: Collection[int] = (),
) -> int:
    """Bytes that an asynchronous snapshot would copy."""
    return sum(
        leaf.nbytes
        for number, (leaf, value) in enumerate(zip(leaves, values, strict=True))
        if leaf.layout is not None
        and number not in unchanged
        and (copy_all or not _arrays.is_view(leaf, value))
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
