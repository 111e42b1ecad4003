"""Rectangles of a global array: `Box(offset, shape)`, in elements.

Everything that is written or read is first described as boxes; this room knows how they meet.
Pure: no jax, no disk.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple


class Box(NamedTuple):
    """A rectangle: `offset[d] <= i[d] < offset[d] + shape[d]` in every dimension d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box of a whole array."""
        return cls((0,) * len(shape), shape)

    @classmethod
    def from_slices(cls, slices: tuple[slice, ...], shape: tuple[int, ...]) -> "Box":
        """The box that unit-stride `slices` select of an array of `shape`."""
        spans = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=True)]
        return cls(tuple(a for a, _ in spans), tuple(max(0, b - a) for a, b in spans))

    @property
    def end(self) -> tuple[int, ...]:
        """First index beyond the box, per dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[Any, ...]:
        """The box as an index into the array it lies in; of a 0-d array too it gives a view."""
        return (*(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True)), ...)

    def intersect(self, other: "Box") -> "Box | None":
        """The common part of two boxes, or None if they share no element."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(int.__sub__, map(min, self.end, other.end), start))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def contains(self, other: "Box") -> bool:
        """Whether every element of `other` lies in this box."""
        starts = zip(self.offset, other.offset, strict=True)
        ends = zip(self.end, other.end, strict=True)
        return all(a <= b for a, b in starts) and all(b <= a for a, b in ends)

    def relative_to(self, outer: "Box") -> "Box":
        """The same rectangle, with offsets counted from the corner of `outer`."""
        return Box(tuple(map(int.__sub__, self.offset, outer.offset)), self.shape)


class Lattice(NamedTuple):
    """A regular cut of an array of `shape` into cells of `cell`; cells at the far edge are clipped.

    Cells are numbered in C order. A zero-size array has no cells, a 0-d array has one.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of cells along each dimension."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    @property
    def size(self) -> int:
        """Number of cells."""
        return math.prod(self.counts)

    def position(self, index: int) -> tuple[int, ...]:
        """Cell number to cell coordinates."""
        coordinates = []
        for count in reversed(self.counts):
            index, here = divmod(index, count)
            coordinates.append(here)
        return tuple(reversed(coordinates))

    def number(self, position: tuple[int, ...]) -> int:
        """Cell coordinates to cell number."""
        index = 0
        for here, count in zip(position, self.counts, strict=True):
            index = index * count + here
        return index

    def box(self, index: int) -> Box:
        """The elements of one cell, clipped to the array."""
        return self.box_at(self.position(index))

    def box_at(self, position: tuple[int, ...]) -> Box:
        """The elements of the cell at `position`, clipped to the array."""
        offset = tuple(p * c for p, c in zip(position, self.cell, strict=True))
        clipped = (min(c, n - o) for c, n, o in zip(self.cell, self.shape, offset, strict=True))
        return Box(offset, tuple(clipped))

    def touching(self, box: Box) -> Iterator[int]:
        """Numbers of the cells that share an element with `box`, in C order."""
        if box.size == 0 or self.size == 0:
            return iter(())
        ranges = (
            range(o // c, (e - 1) // c + 1)
            for o, e, c in zip(box.offset, box.end, self.cell, strict=True)
        )
        return map(self.number, itertools.product(*ranges))
