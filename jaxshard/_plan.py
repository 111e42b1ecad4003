"""Who writes what, and what has to be read: pure functions of specs, the same on every process.

A save plan gives each process its pieces (files of its own) and the entries of its pack (small
pieces, back to back). A load plan gives, for the boxes that are wanted of one leaf, the slabs to
read so that each tile is read once. Nothing here looks at values, devices or disks.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxshard._boxes import Box, Lattice
from jaxshard._spec import Layout, LeafSpec

PACK_ALIGN = 64
CHECKSUM_BYTES = 4
PACK_SEGMENT_BYTES = 64 << 20


class Holders(NamedTuple):
    """Which processes hold each shard of a leaf; shards in C order of the partition grid."""

    partitions: tuple[int, ...]
    processes: tuple[tuple[int, ...], ...]

    def of(self, box: Box, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Processes that hold the shard in which a piece lies."""
        position = tuple(
            o * p // n for o, p, n in zip(box.offset, self.partitions, shape, strict=True)
        )
        return self.processes[Lattice(self.partitions, (1,) * len(position)).number(position)]


class Piece(NamedTuple):
    """A box that one process writes as one file; `number` counts pieces of the leaf in C order."""

    leaf: int
    number: int
    box: Box
    nbytes: int


class Entry(NamedTuple):
    """A tile that lies in a pack; `offset` counts bytes from the start of the pack."""

    leaf: int
    tile: int
    box: Box
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What one process writes. `pieces` by falling size, `entries` by rising offset."""

    pieces: list[Piece]
    entries: list[Entry]
    segment_bytes: int
    segments: int

    @property
    def nbytes(self) -> int:
        """Bytes of data, padding of the pack included."""
        return sum(p.nbytes for p in self.pieces) + self.segment_bytes * self.segments


def plan_save(
    leaves: Sequence[LeafSpec],
    holders: Sequence["Holders | None"],
    *,
    processes: int = 1,
    segment_bytes_max: int = PACK_SEGMENT_BYTES,
) -> list[ProcessPlan]:
    """Assign every piece of every leaf to one process that holds it, balanced by bytes.

    Args:
      leaves: with their layouts.
      holders: per leaf, which processes hold which shard; None if process 0 holds all of it.
      processes: how many there are.
      segment_bytes_max: upper limit of one file of a pack.

    Returns:
      One plan for each process.
    """
    load = [0] * processes
    mine: list[tuple[list[Piece], list[Piece]]] = [([], []) for _ in range(processes)]
    for number, leaf in enumerate(leaves):
        layout = leaf.layout
        if layout is None or leaf.same_as is not None:
            continue
        held = holders[number]
        lattice = Lattice(layout.shape, layout.piece)
        for index in range(lattice.size):
            box = lattice.box(index)
            piece = Piece(number, index, box, box.size * layout.itemsize)
            candidates = (0,) if held is None else held.of(box, layout.shape)
            writer = min(candidates, key=load.__getitem__)
            load[writer] += piece.nbytes
            mine[writer][layout.packed].append(piece)
    return [_process_plan(leaves, *m, segment_bytes_max) for m in mine]


def _process_plan(
    leaves: Sequence[LeafSpec], filed: list[Piece], packed: list[Piece], segment_bytes_max: int
) -> ProcessPlan:
    filed.sort(key=lambda p: (-p.nbytes, p.leaf, p.number))
    boxes = [
        (piece.leaf, tile, tiles.box(tile))
        for piece in packed
        for tiles in [tile_lattice(_layout(leaves[piece.leaf]))]
        for tile in tiles.touching(piece.box)
    ]
    sizes = [box.size * _layout(leaves[leaf]).itemsize for leaf, _, box in boxes]
    total = sum(map(_aligned, sizes))
    largest = max(map(_aligned, sizes), default=0)
    # One segment if it fits, else about equal ones with room for what is skipped at their ends:
    # an entry never crosses from one segment to the next.
    limit = max(largest, segment_bytes_max // PACK_ALIGN * PACK_ALIGN)
    count = -(-total // limit) if limit else 0
    segment = total if count <= 1 else min(limit, _aligned(-(-total // count)) + largest)
    entries, offset = [], 0
    for (leaf, tile, box), size in zip(boxes, sizes, strict=True):
        room = segment - offset % segment if segment else 0
        if size > room:
            offset += room
        entries.append(Entry(leaf, tile, box, offset, size))
        offset += _aligned(size)
    return ProcessPlan(filed, entries, segment, -(-offset // segment) if segment else 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PACK_ALIGN) * PACK_ALIGN


def _layout(leaf: LeafSpec) -> Layout:
    assert leaf.layout is not None, leaf.name
    return leaf.layout


def piece_lattice(layout: Layout) -> Lattice:
    """The pieces of a leaf."""
    return Lattice(layout.shape, layout.piece)


def tile_lattice(layout: Layout) -> Lattice:
    """The tiles of a leaf."""
    return Lattice(layout.shape, layout.tile)


def stored_box(box: Box, layout: Layout) -> Box:
    """A box of elements as the box of stored elements that covers it."""
    k = layout.per_byte
    if k == 1 or not box.shape:
        return box
    start, end = box.offset[-1] // k, -(-box.end[-1] // k)
    return Box((*box.offset[:-1], start), (*box.shape[:-1], end - start if box.shape[-1] else 0))


def element_box(box: Box, layout: Layout, shape: tuple[int, ...]) -> Box:
    """A box of stored elements as the box of elements of the leaf that it holds."""
    k = layout.per_byte
    if k == 1:
        return box
    start = box.offset[-1] * k
    stop = min(box.end[-1] * k, shape[-1])
    return Box((*box.offset[:-1], start), (*box.shape[:-1], stop - start))


def file_bytes(layout: Layout, box: Box) -> int:
    """Length of the file of a piece that is not compressed; `box` is the piece, clipped.

    Tiles are stored whole, each with a checksum; a piece of several tiles has an index.
    """
    tile_bytes = math.prod(layout.tile) * layout.itemsize + CHECKSUM_BYTES
    if layout.tile == layout.piece:
        return tile_bytes
    stored = math.prod(-(-n // t) for n, t in zip(box.shape, layout.tile, strict=True))
    return stored * tile_bytes + index_bytes(layout)


def index_bytes(layout: Layout) -> int:
    """Length of the index at the end of the file of a piece of several tiles."""
    if layout.tile == layout.piece:
        return 0
    cells = math.prod(p // t for p, t in zip(layout.piece, layout.tile, strict=True))
    return 16 * cells + CHECKSUM_BYTES


# Loading ------------------------------------------------------------------------------------


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
    pieces = piece_lattice(layout)
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
    tiles = tile_lattice(layout)
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
        *(range(o, e, s) for o, e, s in zip(box.offset, box.end, step, strict=True))
    )
    return [Box(start, tuple(map(min, step, map(int.__sub__, box.end, start)))) for start in starts]
