"""Who writes what: a pure function of specs, the same on every process.

A save plan gives each process its pieces (files of its own) and the entries of its pack (small
pieces, back to back). Nothing here looks at values, devices or disks.

Millions of pieces are planned in seconds because nothing is done in Python for each of them:
columns of NumPy, whose parts that depend on grids alone are made once for all leaves of a shape.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxshard._boxes import Box, Lattice
from jaxshard._spec import Layout, LeafSpec, layout_of

PACK_ALIGN = 64
CHECKSUM_BYTES = 4
# One file of a pack. While one is written the next is assembled; from 64 to 16 MiB took a fifth
# off the save of 98 MB in 1,500 leaves. (benchmarks/save.py, state small)
PACK_SEGMENT_BYTES = 16 << 20

Column = np.ndarray[Any, Any]
_PIECES = np.dtype([("leaf", "<u4"), ("number", "<u8"), ("nbytes", "<u8")])
_ENTRIES = np.dtype([("leaf", "<u4"), ("tile", "<u8"), ("offset", "<u8"), ("nbytes", "<u8")])


class Holders(NamedTuple):
    """Which processes hold each shard of a leaf; shards in C order of the partition grid."""

    partitions: tuple[int, ...]
    processes: tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """A box that one process writes as one file; `number` counts pieces of the leaf in C order."""

    leaf: int
    number: int
    box: Box
    nbytes: int


class Stretch(NamedTuple):
    """Entries of one leaf that follow each other in one file of a pack: rows of `entries`."""

    leaf: int
    first: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What one process writes.

    Attributes:
      pieces: `[n]` of (leaf, number, nbytes), by falling size.
      entries: `[m]` of (leaf, tile, offset, nbytes), by rising offset from the start of the pack.
      segment_bytes: bytes of each file of the pack.
      segments: number of files of the pack.
    """

    pieces: Column
    entries: Column
    segment_bytes: int
    segments: int

    @property
    def nbytes(self) -> int:
        """Bytes of data, padding of the pack included."""
        return int(self.pieces["nbytes"].sum()) + self.segment_bytes * self.segments

    def each_piece(self, leaves: Sequence[LeafSpec]) -> Iterator[Piece]:
        """The pieces with their boxes."""
        for leaf, number, nbytes in self.pieces.tolist():
            box = piece_lattice(layout_of(leaves[leaf])).box(number)
            yield Piece(leaf, number, box, nbytes)

    def stretches(self) -> list[list[Stretch]]:
        """For each file of the pack, what is in it."""
        if not self.segments:
            return []
        leaf, segment = (
            self.entries["leaf"],
            self.entries["offset"] // np.uint64(self.segment_bytes),
        )
        changes = (np.diff(leaf) != 0) | (np.diff(segment) != 0)
        starts = np.concatenate(([0], np.flatnonzero(changes) + 1))
        stops = [*starts[1:].tolist(), len(leaf)]
        out: list[list[Stretch]] = [[] for _ in range(self.segments)]
        columns = (segment[starts].tolist(), leaf[starts].tolist(), starts.tolist(), stops)
        for at, *rows in zip(*columns, strict=True):
            out[at].append(Stretch(*rows))
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class SavePlan:
    """Who writes each piece of each leaf: `[pieces]` of leaf, number, bytes, writer."""

    leaves: Sequence[LeafSpec]
    pieces: Column
    writers: Column
    segment_bytes_max: int

    def of(self, process: int) -> ProcessPlan:
        """What one process writes."""
        mine = self.pieces[self.writers == process]
        packed = np.array([x.layout is not None and x.layout.packed for x in self.leaves], bool)
        is_packed = packed[mine["leaf"]]
        filed = mine[~is_packed]
        order = np.lexsort((filed["number"], filed["leaf"], -filed["nbytes"].astype(np.int64)))
        return ProcessPlan(filed[order], *self._pack(mine[is_packed]))

    def _pack(self, pieces: Column) -> tuple[Column, int, int]:
        """Entries of the pack, the size of its files, and their number.

        An entry never crosses from one file to the next: one file if all fits, else about equal
        ones with room for what is skipped at their ends.
        """
        entries = self._tiles_of(pieces)
        if not len(entries):
            return entries, 0, 0
        aligned = _aligned(entries["nbytes"].astype(np.int64))
        ends = np.cumsum(aligned)
        total, largest = int(ends[-1]), int(aligned.max())
        limit = max(largest, self.segment_bytes_max // PACK_ALIGN * PACK_ALIGN)
        count = -(-total // limit)
        segment = total if count <= 1 else min(limit, _aligned(-(-total // count)) + largest)
        row = segments = 0
        while row < len(entries):
            before = int(ends[row] - aligned[row])
            stop = int(np.searchsorted(ends, before + segment, "right"))
            start = segments * segment - before
            entries["offset"][row:stop] = ends[row:stop] - aligned[row:stop] + start
            row, segments = stop, segments + 1
        return entries, segment, segments

    def _tiles_of(self, pieces: Column) -> Column:
        """The tiles of packed pieces as entries without offsets; mostly a piece is one tile."""
        leaves: list[int] = []
        numbers, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for leaf, rows in _by_leaf(pieces):
            layout = layout_of(self.leaves[leaf])
            tiles = pieces["number"][rows]
            nbytes = pieces["nbytes"][rows]
            if layout.tile != layout.piece:
                piece_of, elements = _tile_columns(layout.shape, layout.piece, layout.tile)
                tiles = np.flatnonzero(np.isin(piece_of, tiles))
                tiles = tiles[np.argsort(piece_of[tiles], kind="stable")]
                nbytes = elements[tiles] * layout.itemsize
            leaves.append(leaf)
            numbers.append(tiles)
            sizes.append(nbytes)
        counts = list(map(len, numbers[1:]))
        entries = np.zeros(sum(counts), _ENTRIES)
        entries["leaf"] = np.repeat(np.array(leaves, np.uint32), counts)
        entries["tile"] = np.concatenate(numbers)
        entries["nbytes"] = np.concatenate(sizes)
        return entries


def _by_leaf(pieces: Column) -> Iterator[tuple[int, slice]]:
    """Leaf numbers and the rows of each; rows are sorted by leaf."""
    starts = np.flatnonzero(np.diff(pieces["leaf"], prepend=-1)).tolist()
    for start, stop in itertools.pairwise([*starts, len(pieces)]):
        yield int(pieces["leaf"][start]), slice(start, stop)


def plan_save(
    leaves: Sequence[LeafSpec],
    holders: Sequence["Holders | None"],
    *,
    processes: int = 1,
    segment_bytes_max: int = PACK_SEGMENT_BYTES,
) -> SavePlan:
    """Assign every piece of every leaf to one process that holds it, balanced by bytes.

    Pieces that the same processes hold are dealt out to them in turn, to the one with the least
    bytes so far first.

    Args:
      leaves: with their layouts.
      holders: per leaf, which processes hold which shard; None if process 0 holds all of it.
      processes: how many there are.
      segment_bytes_max: upper limit of one file of a pack.
    """
    load = np.zeros(processes, np.int64)
    numbers: list[int] = []
    sizes, writers = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for number, leaf in enumerate(leaves):
        layout = leaf.layout
        if layout is None or leaf.same_as is not None:
            continue
        nbytes = cell_sizes(layout.shape, layout.piece) * layout.itemsize
        numbers.append(number)
        sizes.append(nbytes)
        held = holders[number]
        if held is None:
            writer = np.zeros(len(nbytes), np.int32)
        else:
            candidates, dealt = _dealt(held, layout.shape, layout.piece)
            order = np.argsort(load[candidates], axis=1, kind="stable")
            group, turn = dealt
            writer = candidates[group, order[group, turn]]
        writers.append(writer)
        if processes > 1:
            load += np.bincount(writer, nbytes, processes).astype(np.int64)
    counts = [len(nbytes) for nbytes in sizes[1:]]
    pieces = np.zeros(sum(counts), _PIECES)
    pieces["leaf"] = np.repeat(np.array(numbers, np.uint32), counts)
    pieces["number"] = _counting(counts)
    pieces["nbytes"] = np.concatenate(sizes)
    return SavePlan(leaves, pieces, np.concatenate(writers), segment_bytes_max)


def _counting(counts: Sequence[int]) -> Column:
    """From 0 to the first count, from 0 to the second one, and so on."""
    ends = np.cumsum(np.array(counts, np.int64))
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _per_cell(lattice: Lattice, axis_values: Sequence[Column], combine: np.ufunc) -> Column:
    """`[cells]` values of a lattice from those along each axis."""
    out = np.ones((), np.int64) if combine is np.multiply else np.zeros((), np.int64)
    for values in axis_values:
        out = combine.outer(out, values)
    return out.reshape(lattice.size)


@functools.lru_cache(maxsize=1024)
def cell_sizes(shape: tuple[int, ...], cell: tuple[int, ...]) -> Column:
    """`[cells]` number of elements of each cell, clipped to the array."""
    lattice = Lattice(shape, cell)
    lengths = [
        np.minimum(c, n - np.arange(count) * c)
        for n, c, count in zip(shape, cell, lattice.counts, strict=True)
    ]
    return _per_cell(lattice, lengths, np.multiply)


def _outer(lattice: Lattice, inside: Sequence[Column], counts: tuple[int, ...]) -> Column:
    """`[cells]` number of the outer cell that each cell lies in, given that along each axis."""
    strides = [math.prod(counts[d + 1 :]) for d in range(len(counts))]
    return _per_cell(lattice, [i * s for i, s in zip(inside, strides, strict=True)], np.add)


@functools.lru_cache(maxsize=1024)
def _tile_columns(
    shape: tuple[int, ...], piece: tuple[int, ...], tile: tuple[int, ...]
) -> tuple[Column, Column]:
    """`[tiles]` piece that each tile lies in, and its number of elements."""
    tiles, pieces = Lattice(shape, tile), Lattice(shape, piece)
    inside = [
        np.arange(count) * t // p for count, t, p in zip(tiles.counts, tile, piece, strict=True)
    ]
    return _outer(tiles, inside, pieces.counts), cell_sizes(shape, tile)


@functools.lru_cache(maxsize=1024)
def _dealt(
    held: Holders, shape: tuple[int, ...], piece: tuple[int, ...]
) -> tuple[Column, tuple[Column, Column]]:
    """`[groups, r]` processes that hold the same shards, and the group and turn of each piece."""
    most = max(map(len, held.processes), default=1)
    padded = [tuple(itertools.islice(itertools.cycle(p), most)) for p in held.processes]
    table = np.array(padded, np.int32).reshape(len(padded), most)
    candidates, group_of_shard = np.unique(table, axis=0, return_inverse=True)
    pieces = Lattice(shape, piece)
    shard = [
        np.arange(count) * p * parts // n
        for count, p, parts, n in zip(pieces.counts, piece, held.partitions, shape, strict=True)
    ]
    group = group_of_shard.reshape(-1)[_outer(pieces, shard, held.partitions)]
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], group[order], "left")
    turn = np.empty(len(group), np.int64)
    turn[order] = (np.arange(len(group)) - first) % most
    return candidates, (group, turn)


def _aligned(nbytes: Any) -> Any:
    """Rounded up to where an entry may begin; of one number or of a column."""
    return -(-nbytes // PACK_ALIGN) * PACK_ALIGN


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
    if layout.tile == layout.piece:
        return stored_tile_bytes(layout)
    return tiles_in(layout, box) * stored_tile_bytes(layout) + index_bytes(layout)


def tiles_in(layout: Layout, box: Box) -> int:
    """Number of tiles in a box that begins with a tile."""
    return math.prod(-(-n // t) for n, t in zip(box.shape, layout.tile, strict=True))


def stored_tile_bytes(layout: Layout) -> int:
    """What a tile that is not compressed takes in a file, with its checksum."""
    return math.prod(layout.tile) * layout.itemsize + CHECKSUM_BYTES


def index_bytes(layout: Layout) -> int:
    """Length of the index at the end of the file of a piece of several tiles."""
    if layout.tile == layout.piece:
        return 0
    cells = math.prod(p // t for p, t in zip(layout.piece, layout.tile, strict=True))
    return 16 * cells + CHECKSUM_BYTES
