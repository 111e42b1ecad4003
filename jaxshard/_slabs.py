"""What has to be read for the boxes that are wanted of one leaf, so that each tile is read once.

Pure: boxes in, boxes out.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxshard import _plan
from jaxshard._boxes import Box
from jaxshard._spec import Layout


class Slab(NamedTuple):
    """A box of whole tiles of one piece, to be read at once.

    `target` is the number of the wanted box that holds all of it and no other wanted box touches,
    so that it can be read straight into place; None means: through scratch memory, to `targets`.
    """

    box: Box
    piece: int
    target: int | None
    targets: tuple[int, ...]


def plan_load(layout: Layout, wanted: Sequence[Box], *, slab_bytes_max: int) -> list[Slab]:
    """Slabs that cover every tile that the wanted boxes touch, each tile once.

    Args:
      layout: of the leaf.
      wanted: boxes in stored elements; they may overlap.
      slab_bytes_max: upper limit of a slab of more than one tile.
    """
    pieces = _plan.piece_lattice(layout)
    slabs: list[Slab] = []
    touched = sorted({p for box in wanted for p in pieces.touching(box)})
    for piece in touched:
        box = pieces.box(piece)
        hits = [i for i, w in enumerate(wanted) if w.intersect(box)]
        if len(hits) == 1 and wanted[hits[0]].contains(box):
            only = hits[0]
            cuts = blocks(layout, box, slab_bytes_max)
            slabs += [Slab(cut, piece, only, (only,)) for cut in cuts]
        else:
            slabs += _tile_by_tile(layout, piece, box, wanted, hits, slab_bytes_max)
    return slabs


def _tile_by_tile(
    layout: Layout, piece: int, box: Box, wanted: Sequence[Box], hits: list[int], bytes_max: int
) -> list[Slab]:
    """A piece that several boxes share, or that is wanted in part."""
    tiles = _plan.tile_lattice(layout)
    slabs = []
    runs: dict[int, list[int]] = {}
    for tile in sorted({t for i in hits for t in tiles.touching(_common(wanted[i], box))}):
        tile_box = tiles.box(tile)
        targets = tuple(i for i in hits if wanted[i].intersect(tile_box))
        if len(targets) == 1 and wanted[targets[0]].contains(tile_box):
            runs.setdefault(targets[0], []).append(tile)
        else:
            slabs.append(Slab(tile_box, piece, None, targets))
    for target, members in runs.items():
        # The tiles wholly inside one box, and in no other, form a rectangle.
        hull = _hull([tiles.box(t) for t in members])
        if hull.size == sum(tiles.box(t).size for t in members):
            direct = list(blocks(layout, hull, bytes_max))
        else:
            direct = [tiles.box(t) for t in members]
        slabs += [Slab(b, piece, target, (target,)) for b in direct]
    return slabs


def _common(a: Box, b: Box) -> Box:
    common = a.intersect(b)
    assert common is not None
    return common


def _hull(boxes: list[Box]) -> Box:
    start = tuple(map(min, *(b.offset for b in boxes), boxes[0].offset))
    end = tuple(map(max, *(b.end for b in boxes), boxes[0].end))
    return Box(start, tuple(map(int.__sub__, end, start)))


def blocks(layout: Layout, box: Box, bytes_max: int) -> list[Box]:
    """Cut a box of whole tiles into slabs of whole tiles, first axes first."""
    step = list(box.shape)
    for d in range(len(step)):
        nbytes = math.prod(step) * layout.itemsize
        if nbytes <= bytes_max:
            break
        tile = layout.tile[d]
        rows = max(1, step[d] * bytes_max // nbytes // tile)
        step[d] = min(step[d], rows * tile)
    starts = itertools.product(
        *(range(o, e, max(1, s)) for o, e, s in zip(box.offset, box.end, step, strict=True))
    )
    return [Box(start, tuple(map(min, step, map(int.__sub__, box.end, start)))) for start in starts]
