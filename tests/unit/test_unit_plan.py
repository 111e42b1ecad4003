"""Plans: every byte has one writer and one place; every tile that is needed is read once."""

import math
import time
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from covering import covers_exactly_once
from hypothesis import given, settings

from jaxshard import _dtypes, _grid, _plan
from jaxshard._boxes import Box, Lattice
from jaxshard._plan import Holders, plan_save
from jaxshard._spec import Layout, LeafSpec, stored_shape

MIB = 1 << 20
quick = settings(derandomize=True, deadline=None, max_examples=40)


def leaf(name, shape, partitions=None, *, dtype="float32", packed=False, limit=64 * MIB, writers=1):
    per_byte = _dtypes.elements_per_byte(dtype) if shape else 1
    stored, kind = stored_shape(shape, per_byte), _dtypes.stored_dtype(dtype)
    itemsize = _dtypes.numpy_dtype(kind).itemsize
    parts = partitions or (1,) * len(shape)
    grid = _grid.choose(stored, parts, itemsize, piece_bytes_max=limit, writers=writers)
    layout = Layout(name, kind, per_byte, stored, *grid, packed)
    return LeafSpec(
        name=name, kind="array", dtype=dtype, shape=shape, array_shape=shape, layout=layout
    )


class Entry(NamedTuple):
    leaf: int
    tile: int
    box: Box
    offset: int
    nbytes: int


class Told(NamedTuple):
    """A plan of one process with boxes, as objects."""

    pieces: list
    entries: list
    segment_bytes: int
    segments: int
    nbytes: int


def told(plan, leaves):
    entries = [
        Entry(leaf, tile, _plan.tile_lattice(leaves[leaf].layout).box(tile), offset, nbytes)
        for leaf, tile, offset, nbytes in plan.entries.tolist()
    ]
    pieces = list(plan.each_piece(leaves))
    return Told(pieces, entries, plan.segment_bytes, plan.segments, plan.nbytes)


def alone(leaves, **options):
    """The plan of the only process."""
    return told(plan_save(leaves, [None] * len(leaves), **options).of(0), leaves)


@st.composite
def states(draw):
    """(leaves, holders, processes, segment_bytes_max)."""
    processes = draw(st.integers(1, 5))
    leaves, holders = [], []
    for number in range(draw(st.integers(0, 6))):
        rank = draw(st.integers(0, 3))
        parts = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(rank))
        shape = tuple(draw(st.integers(0 if p == 1 else 1, 6)) * p for p in parts)
        leaves.append(
            leaf(
                f"leaf{number}",
                shape,
                parts,
                dtype=draw(st.sampled_from(["float32", "uint8", "complex128"])),
                packed=draw(st.booleans()),
                limit=draw(st.sampled_from([4, 64, 300, MIB])),
                writers=draw(st.integers(1, 3)),
            )
        )
        some = st.sets(st.integers(0, processes - 1), min_size=1).map(lambda s: tuple(sorted(s)))
        held = Holders(parts, tuple(draw(some) for _ in range(math.prod(parts))))
        holders.append(draw(st.sampled_from([held, None])))
    return leaves, holders, processes, draw(st.sampled_from([1, 64, 200, 1000, MIB]))


def plans_of(state):
    leaves, holders, processes, segment = state
    plan = plan_save(leaves, holders, processes=processes, segment_bytes_max=segment)
    return [told(plan.of(process), leaves) for process in range(processes)]


# Saving -------------------------------------------------------------------------------------


@quick
@given(states())
def test_the_plans_of_all_processes_cover_every_leaf_exactly_once(state):
    plans = plans_of(state)
    for number, spec in enumerate(state[0]):
        tasks = [t for plan in plans for t in (*plan.pieces, *plan.entries) if t.leaf == number]
        assert covers_exactly_once([t.box for t in tasks], Box.whole(spec.layout.shape))


@quick
@given(states())
def test_a_leaf_lies_in_files_or_in_packs_as_its_layout_says(state):
    leaves = state[0]
    for plan in plans_of(state):
        assert not any(leaves[p.leaf].layout.packed for p in plan.pieces)
        assert all(leaves[e.leaf].layout.packed for e in plan.entries)


@quick
@given(states())
def test_pieces_and_entries_are_cells_of_the_grid_with_their_bytes(state):
    leaves = state[0]
    for plan in plans_of(state):
        for piece in plan.pieces:
            layout = leaves[piece.leaf].layout
            assert _plan.piece_lattice(layout).box(piece.number) == piece.box
            assert piece.nbytes == piece.box.size * layout.itemsize
        for entry in plan.entries:
            layout = leaves[entry.leaf].layout
            assert _plan.tile_lattice(layout).box(entry.tile) == entry.box
            assert entry.nbytes == entry.box.size * layout.itemsize


def holding(held, box, shape):
    """Processes that hold the shard in which a box lies."""
    position = tuple(o * p // n for o, p, n in zip(box.offset, held.partitions, shape, strict=True))
    return held.processes[Lattice(held.partitions, (1,) * len(position)).number(position)]


@quick
@given(states())
def test_only_a_process_that_holds_a_piece_writes_it(state):
    leaves, holders, *_ = state
    for process, plan in enumerate(plans_of(state)):
        for task in (*plan.pieces, *plan.entries):
            held = holders[task.leaf]
            shape = leaves[task.leaf].layout.shape
            assert process in ((0,) if held is None else holding(held, task.box, shape))


@quick
@given(states())
def test_entries_are_aligned_and_never_overlap_or_cross_from_file_to_file(state):
    for plan in plans_of(state):
        end = 0
        for entry in plan.entries:
            assert entry.offset % _plan.PACK_ALIGN == 0
            assert entry.offset >= end
            end = entry.offset + entry.nbytes
            assert entry.offset // plan.segment_bytes == (end - 1) // plan.segment_bytes
        assert end <= plan.segment_bytes * plan.segments
        assert bool(plan.entries) == bool(plan.segments)


@pytest.mark.parametrize("segment", [256, 320, 512, 1000])
def test_entries_of_all_sizes_keep_within_their_file(segment):
    leaves = [leaf(f"l{i}", (1 + i * 37 % 250,), dtype="uint8", packed=True) for i in range(60)]
    plan = alone(leaves, segment_bytes_max=segment)
    for entry in plan.entries:
        last = entry.offset + entry.nbytes - 1
        assert entry.offset // plan.segment_bytes == last // plan.segment_bytes
    ends = [e.offset + e.nbytes for e in plan.entries]
    assert all(a <= e.offset for a, e in zip(ends, plan.entries[1:], strict=False))
    assert plan.segments > 5


@quick
@given(states())
def test_the_files_of_a_pack_are_no_larger_than_asked_unless_one_entry_is(state):
    for plan in plans_of(state):
        largest = max((e.nbytes for e in plan.entries), default=0)
        limit = max(state[3], largest)
        assert plan.segment_bytes <= -(-limit // _plan.PACK_ALIGN) * _plan.PACK_ALIGN


@quick
@given(states())
def test_no_file_of_a_pack_is_empty(state):
    for plan in plans_of(state):
        used = {e.offset // plan.segment_bytes for e in plan.entries}
        assert used == set(range(plan.segments))


@quick
@given(states())
def test_large_pieces_come_first(state):
    for plan in plans_of(state):
        sizes = [p.nbytes for p in plan.pieces]
        assert sizes == sorted(sizes, reverse=True)


@quick
@given(states())
def test_every_process_finds_the_same_plans(state):
    assert plans_of(state) == plans_of(state)


def test_a_leaf_that_is_another_one_or_no_array_is_not_written():
    first = leaf("a", (4,))
    same = LeafSpec(name="b", kind="array", dtype="float32", array_shape=(4,), same_as=0)
    number = LeafSpec(name="c", kind="int", value="0x1")
    plan = alone([first, same, number])
    assert [p.leaf for p in plan.pieces] == [0]
    assert plan.nbytes == 16


def test_bytes_of_a_plan_count_the_padding_of_the_pack():
    plan = alone([leaf("a", (3,), packed=True), leaf("b", (5,))])
    assert (plan.segment_bytes, plan.segments, plan.nbytes) == (64, 1, 64 + 20)


def test_a_packed_leaf_of_many_tiles_may_lie_in_several_files():
    spec = leaf("a", (1000,), packed=True, limit=400)
    plan = alone([spec], segment_bytes_max=1024)
    assert plan.segments >= 4
    assert len(plan.entries) == _plan.tile_lattice(spec.layout).size


def transformer(writers):
    """Shapes of a decoder with weights, two moments and norms; none divides by eleven."""
    shapes = [(32000, 768), (32000, 768)]
    for _ in range(12):
        shapes += [(768, 2304), (768, 768), (768, 3072), (3072, 768), (768,), (768,)]
    return [
        leaf(f"{which}/{i}", shape, writers=writers, packed=math.prod(shape) * 4 < MIB)
        for which in ("w", "mu", "nu")
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("processes", [2, 3, 8, 11, 13])
def test_replicas_share_the_bytes_evenly_also_where_nothing_divides_by_their_number(processes):
    # CASE 49: eleven replicas, no dimension divides by eleven.
    leaves = transformer(processes)
    holders = [Holders((1,) * len(x.shape), (tuple(range(processes)),)) for x in leaves]
    plan = plan_save(leaves, holders, processes=processes)
    plans = [plan.of(p) for p in range(processes)]
    shares = [plan.nbytes for plan in plans]
    assert max(shares) <= 1.1 * sum(shares) / processes


@pytest.mark.parametrize("processes", [8, 11])
def test_sharded_and_replicated_leaves_together_are_shared_evenly(processes):
    everyone = tuple(range(processes))
    sharded = [leaf(f"s{i}", (1024 * processes, 512), (processes, 1)) for i in range(4)]
    copied = [leaf(f"r{i}", (4096, 768), writers=processes) for i in range(8)]
    small = [leaf(f"n{i}", (768,), packed=True) for i in range(200)]
    holders = (
        [Holders((processes, 1), tuple((p,) for p in everyone))] * 4
        + [Holders((1, 1), (everyone,))] * 8
        + [Holders((1,), (everyone,))] * 200
    )
    plan = plan_save([*sharded, *copied, *small], holders, processes=processes)
    plans = [plan.of(p) for p in range(processes)]
    shares = [plan.nbytes for plan in plans]
    assert max(shares) <= 1.1 * sum(shares) / processes


def test_20_000_pieces_on_64_processes_are_planned_quickly():
    leaves = [leaf(f"l{i}", (4096, 1024), (64, 1)) for i in range(313)]
    holders = [Holders((64, 1), tuple((p,) for p in range(64)))] * len(leaves)
    began = time.perf_counter()
    plan = plan_save(leaves, holders, processes=64)
    plans = [plan.of(p) for p in range(64)]
    assert sum(len(p.pieces) for p in plans) >= 20_000
    assert time.perf_counter() - began < 10


def test_20_000_small_leaves_are_packed_quickly():
    leaves = [leaf(f"l{i}", (16,), packed=True) for i in range(20_000)]
    began = time.perf_counter()
    plan = alone(leaves)
    assert len(plan.entries) == 20_000
    assert time.perf_counter() - began < 10
