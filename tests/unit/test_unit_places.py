"""Every tile that is needed is read once, neighbours together, and goes to all who need it."""

import math
import time

import hypothesis.strategies as st
import numpy as np
from covering import covers_exactly_once
from hypothesis import given
from test_unit_plan import MIB, leaf, quick

from jaxshard import _plan
from jaxshard._boxes import Box, Lattice
from jaxshard._places import blocks, places, tile_runs
from jaxshard._plan import element_box, stored_box
from jaxshard._spec import Layout


@st.composite
def loads(draw):
    """(layout, wanted boxes, bytes_max); the boxes are of a mesh, or anything."""
    rank = draw(st.integers(0, 3))
    parts = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(rank))
    shape = tuple(draw(st.integers(0 if p == 1 else 1, 4)) * p for p in parts)
    limit = draw(st.sampled_from([4, 24, 100, 1000]))
    layout = leaf("a", shape, parts, limit=limit).layout
    if draw(st.booleans()):
        cells = Lattice(shape, tuple(draw(st.integers(max(1, n // 3), max(1, n))) for n in shape))
        wanted = [cells.box(i) for i in range(cells.size)]
    else:
        wanted = []
        for _ in range(draw(st.integers(0, 4))):
            offset = tuple(draw(st.integers(0, n)) for n in shape)
            room = [n - o for n, o in zip(shape, offset, strict=True)]
            wanted.append(Box(offset, tuple(draw(st.integers(0, n)) for n in room)))
    return layout, tuple(dict.fromkeys(wanted)), draw(st.sampled_from([1, 16, 64, 10_000]))


def placed(case):
    layout, wanted, limit = case
    return [place for run in tile_runs(layout, wanted, limit) for place in run.places]


@quick
@given(loads())
def test_every_tile_that_is_needed_is_read_exactly_once(case):
    layout, wanted, _ = case
    tiles = _plan.tile_lattice(layout)
    needed = sorted({t for box in wanted for t in tiles.touching(box)})
    assert sorted(place.tile for place in placed(case)) == needed
    numbers, found = places(layout, wanted)
    assert numbers.tolist() == needed == [place.tile for place in found]
    assert all(place.box == tiles.box(place.tile) for place in found)


@quick
@given(loads())
def test_what_is_copied_is_each_element_of_each_box_once_from_its_own_place(case):
    layout, wanted, _ = case
    whole = np.arange(np.prod(layout.shape, dtype=int)).reshape(layout.shape)
    buffers = [np.full(box.shape, -1) for box in wanted]
    for place in placed(case):
        values = whole[place.box.slices]
        for part in place.parts:
            target = buffers[part.target][part.where]
            assert (target == -1).all()
            target[...] = values[part.inside]
            if place.only is not None:
                assert part.target == place.only
                assert buffers[part.target].shape == values.shape == target.shape
    for box, buffer in zip(wanted, buffers, strict=True):
        assert np.array_equal(buffer, whole[box.slices])


@quick
@given(loads())
def test_a_run_is_neighbours_of_one_piece_in_the_order_of_the_file(case):
    layout, wanted, limit = case
    tiles, pieces = _plan.tile_lattice(layout), _plan.piece_lattice(layout)
    planned = tile_runs(layout, wanted, limit)
    for run in planned:
        in_file = list(tiles.touching(pieces.box(run.piece)))
        stop = run.position + len(run.places)
        assert [place.tile for place in run.places] == in_file[run.position : stop]
    order = [(run.piece, run.position) for run in planned]
    assert order == sorted(order)


@quick
@given(loads())
def test_a_run_keeps_the_limit_unless_it_is_one_tile(case):
    layout, wanted, limit = case
    for run in tile_runs(layout, wanted, limit):
        nbytes = len(run.places) * math.prod(layout.tile) * layout.itemsize
        assert len(run.places) == 1 or nbytes <= limit


def test_a_tile_that_two_boxes_need_is_read_once_and_goes_to_both():
    layout = Layout("", "float32", 1, (8,), (4,), (2,), packed=False)
    wanted = (Box((0,), (8,)), Box((3,), (2,)))
    found = [
        (
            run.piece,
            run.position,
            [[part.target for part in place.parts] for place in run.places],
        )
        for run in tile_runs(layout, wanted, MIB)
    ]
    assert found == [(0, 0, [[0], [0, 1]]), (1, 0, [[0, 1], [0]])]


def test_what_lies_between_two_tiles_that_are_wanted_is_not_read():
    layout = Layout("", "float32", 1, (10,), (10,), (2,), packed=False)
    planned = tile_runs(layout, (Box((0,), (3,)), Box((8,), (1,))), MIB)
    assert [(run.position, len(run.places)) for run in planned] == [(0, 2), (4, 1)]


def test_nothing_is_read_for_boxes_without_elements():
    layout = leaf("", (4, 4)).layout
    assert tile_runs(layout, (Box((0, 2), (4, 0)),), MIB) == ()
    assert tile_runs(layout, (), MIB) == ()


def test_20_000_pieces_are_planned_for_loading_quickly():
    layout = Layout("", "float32", 1, (20_000, 1024), (1, 1024), (1, 256), packed=False)
    wanted = tuple(Box((i * 2500, 0), (2500, 1024)) for i in range(8))
    began = time.perf_counter()
    assert len(tile_runs(layout, wanted, MIB)) == 20_000
    assert time.perf_counter() - began < 10


# Blocks and boxes of packed elements --------------------------------------------------------


@quick
@given(loads())
def test_blocks_cover_a_box_of_whole_tiles_exactly_once(case):
    layout, _, limit = case
    whole = Box.whole(layout.shape)
    cuts = blocks(layout, whole, limit) if whole.size else []
    assert covers_exactly_once(cuts, whole)
    tiles = _plan.tile_lattice(layout)
    for cut in cuts:
        inside = [tiles.box(t) for t in tiles.touching(cut)]
        assert covers_exactly_once(inside, cut)
        assert len(inside) == 1 or cut.size * layout.itemsize <= limit


@quick
@given(
    st.sampled_from(["int4", "uint2", "uint1", "float32", "float6_e2m3fn"]),
    st.lists(st.integers(0, 20), max_size=2),
    st.data(),
)
def test_a_stored_box_covers_the_elements_and_hardly_more(dtype, shape, data):
    shape = tuple(shape)
    layout = leaf("a", shape, dtype=dtype).layout
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    room = [n - o for n, o in zip(shape, offset, strict=True)]
    box = Box(offset, tuple(data.draw(st.integers(0, n)) for n in room))
    stored = stored_box(box, layout)
    assert Box.whole(layout.shape).contains(stored)
    if box.size:
        around = element_box(stored, layout, shape)
        assert around.contains(box)
        assert Box.whole(shape).contains(around)
        assert all(
            a - b < 2 * layout.per_byte for a, b in zip(around.shape, box.shape, strict=True)
        )
    else:
        assert stored.size == 0


def test_whole_and_part_of_packed_elements():
    layout = leaf("a", (3, 5), dtype="int4").layout
    assert stored_box(Box((0, 1), (3, 2)), layout) == Box((0, 0), (3, 2))
    assert element_box(Box((0, 2), (3, 1)), layout, (3, 5)) == Box((0, 4), (3, 1))
