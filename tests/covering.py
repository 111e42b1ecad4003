"""Whether boxes cover an array exactly once: what grids, plans and places are held to."""

from bisect import bisect_left
from collections.abc import Iterable

from jaxshard._boxes import Box


def covers_exactly_once(boxes: Iterable[Box], outer: Box) -> bool:
    """Whether the boxes tile `outer`: every element lies in exactly one of them.

    A sweep over the first dimension, recursive in the others: O(n log n) for grids, no memory
    proportional to the array.
    """
    boxes = [b for b in boxes if b.size]
    if not all(outer.contains(b) for b in boxes):
        return False
    if sum(b.size for b in boxes) != outer.size:
        return False
    return _disjoint(boxes, 0)


def _disjoint(boxes: list[Box], axis: int) -> bool:
    if len(boxes) < 2:
        return True
    if axis == len(boxes[0].shape):
        return False  # two boxes that overlap in every dimension
    edges = sorted({b.offset[axis] for b in boxes} | {b.end[axis] for b in boxes})
    slabs: dict[int, list[Box]] = {start: [] for start in edges}
    for box in boxes:
        first = bisect_left(edges, box.offset[axis])
        last = bisect_left(edges, box.end[axis])
        for start in edges[first:last]:
            slabs[start].append(box)
    return all(_disjoint(slab, axis + 1) for slab in slabs.values())
