"""Every tile that is needed is read once, straight into place wherever that is possible."""

import time

import hypothesis.strategies as st
from hypothesis import given
from test_unit_plan import MIB, leaf, quick

from jaxshard import _plan
from jaxshard._boxes import Box, Lattice, covers_exactly_once
from jaxshard._plan import element_box, stored_box
from jaxshard._slabs import blocks, plan_load
from jaxshard._spec import Layout


@st.composite
def loads(draw):
    """(layout, wanted boxes, slab_bytes_max); the boxes are of a mesh, or anything."""
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
    return layout, list(dict.fromkeys(wanted)), draw(st.sampled_from([1, 16, 64, 10_000]))


def slabs_of(case):
    layout, wanted, limit = case
    return plan_load(layout, wanted, slab_bytes_max=limit)


@quick
@given(loads())
def test_every_tile_that_is_needed_is_read_exactly_once(case):
    layout, wanted, _ = case
    tiles = _plan.tile_lattice(layout)
    read = [t for slab in slabs_of(case) for t in tiles.touching(slab.box)]
    assert sorted(read) == sorted({t for box in wanted for t in tiles.touching(box)})


@quick
@given(loads())
def test_a_slab_is_whole_tiles_of_one_piece(case):
    layout = case[0]
    tiles, pieces = _plan.tile_lattice(layout), _plan.piece_lattice(layout)
    for slab in slabs_of(case):
        assert pieces.box(slab.piece).contains(slab.box)
        inside = [tiles.box(t) for t in tiles.touching(slab.box)]
        assert covers_exactly_once(inside, slab.box)


@quick
@given(loads())
def test_a_slab_goes_straight_to_a_box_only_if_that_holds_all_of_it_and_no_other_needs_it(case):
    wanted = case[1]
    for slab in slabs_of(case):
        touching = tuple(i for i, box in enumerate(wanted) if box.intersect(slab.box))
        alone = len(touching) == 1 and wanted[touching[0]].contains(slab.box)
        assert slab.targets == touching
        assert slab.target == (touching[0] if alone else None)


@quick
@given(loads())
def test_a_slab_keeps_the_limit_unless_it_is_one_tile(case):
    layout, _, limit = case
    for slab in slabs_of(case):
        one_tile = len(list(_plan.tile_lattice(layout).touching(slab.box))) == 1
        assert one_tile or slab.box.size * layout.itemsize <= limit


@quick
@given(loads())
def test_slabs_come_piece_by_piece(case):
    pieces = [slab.piece for slab in slabs_of(case)]
    assert pieces == sorted(pieces)


def test_a_tile_that_two_boxes_need_is_read_once_and_goes_to_both():
    layout = Layout("a", "float32", 1, (8,), (4,), (2,), packed=False)
    wanted = [Box((0,), (8,)), Box((3,), (2,))]
    slabs = plan_load(layout, wanted, slab_bytes_max=MIB)
    assert [(s.box.offset[0], s.target, s.targets) for s in slabs] == [
        (2, None, (0, 1)),
        (0, 0, (0,)),
        (4, None, (0, 1)),
        (6, 0, (0,)),
    ]


def test_nothing_is_read_for_boxes_without_elements():
    layout = leaf("a", (4, 4)).layout
    assert plan_load(layout, [Box((0, 2), (4, 0))], slab_bytes_max=MIB) == []
    assert plan_load(layout, [], slab_bytes_max=MIB) == []


def test_20_000_pieces_are_planned_for_loading_quickly():
    layout = Layout("a", "float32", 1, (20_000, 1024), (1, 1024), (1, 256), packed=False)
    wanted = [Box((i * 2500, 0), (2500, 1024)) for i in range(8)]
    began = time.perf_counter()
    slabs = plan_load(layout, wanted, slab_bytes_max=MIB)
    assert len(slabs) == 20_000
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
