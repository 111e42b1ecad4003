"""What has to be read for the boxes that are wanted of one leaf, so that each tile is read once.

Pure: boxes in, tiles out.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxshard import _plan
from jaxshard._boxes import Box
from jaxshard._spec import Layout

Column = np.ndarray[Any, Any]


class Part(NamedTuple):
    """What one wanted box needs of a tile: number of the box, where in it, which of the tile."""

    target: int
    where: tuple[slice, ...]
    inside: tuple[slice, ...]


class Place(NamedTuple):
    """Where one tile goes.

    Attributes:
      tile: its number.
      box: its elements.
      only: number of the wanted box that it is all of, if no other box needs it.
      parts: what goes where.
    """

    tile: int
    box: Box
    only: int | None
    parts: tuple[Part, ...]


class TileRun(NamedTuple):
    """Tiles that lie side by side in the file of a piece, behind `position` others."""

    piece: int
    position: int
    places: list[Place]


@functools.lru_cache(maxsize=1024)
def places(layout: Layout, boxes: tuple[Box, ...]) -> tuple[Column, tuple[Place, ...]]:
    """Numbers of the tiles that the boxes need, rising, and where each goes.

    Pure geometry, made once for all leaves whose layouts have the same `path` (give them none).
    """
    tiles = _plan.tile_lattice(layout)
    needing: dict[int, list[int]] = {}
    for number, wanted in enumerate(boxes):
        for tile in tiles.touching(wanted):
            needing.setdefault(tile, []).append(number)
    found = []
    for tile in sorted(needing):
        box, targets = tiles.box(tile), needing[tile]
        only = targets[0] if len(targets) == 1 and boxes[targets[0]] == box else None
        parts = tuple(_part(box, target, boxes[target]) for target in targets)
        found.append(Place(tile, box, only, parts))
    return np.array([place.tile for place in found], np.int64), tuple(found)


def _part(tile: Box, target: int, wanted: Box) -> Part:
    common = tile.intersect(wanted)
    assert common is not None
    return Part(target, common.relative_to(wanted).slices, common.relative_to(tile).slices)


@functools.lru_cache(maxsize=256)
def tile_runs(layout: Layout, boxes: tuple[Box, ...], bytes_max: int) -> tuple[TileRun, ...]:
    """The tiles that the boxes need of pieces in files of their own, piece by piece.

    Args:
      layout: of the leaf; its `path` does not matter, as in `places`.
      boxes: that are wanted, in stored elements.
      bytes_max: upper limit of a run of more than one tile.
    """
    pieces, tiles = _plan.piece_lattice(layout), _plan.tile_lattice(layout)
    groups: dict[int, dict[int, Place]] = {}
    for place in places(layout, boxes)[1]:
        cell = tuple(map(int.__floordiv__, place.box.offset, layout.piece))
        groups.setdefault(pieces.number(cell), {})[place.tile] = place
    most = max(1, bytes_max // (_plan.stored_tile_bytes(layout) - _plan.CHECKSUM_BYTES))
    found = []
    for piece, wanted in sorted(groups.items()):
        run: TileRun | None = None
        for position, tile in enumerate(tiles.touching(pieces.box(piece))):  # as in the file
            if tile not in wanted:
                run = None
                continue
            if run is None or len(run.places) == most:
                run = TileRun(piece, position, [])
                found.append(run)
            run.places.append(wanted[tile])
    return tuple(found)


def blocks(layout: Layout, box: Box, bytes_max: int) -> list[Box]:
    """Cut a box of whole tiles into smaller ones, first axes first."""
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
