"""Boxes meet, cut and cover as counting every single element says."""

import itertools
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from covering import covers_exactly_once
from hypothesis import given, settings

from jaxshard._boxes import Box, Lattice

quick = settings(derandomize=True, deadline=None, max_examples=80)


def elements(box):
    return set(itertools.product(*map(range, box.offset, box.end)))


def covered_by_counting(boxes, outer):
    counted = [e for b in boxes for e in elements(b)]
    return sorted(counted) == sorted(elements(outer))


ranks = st.integers(0, 3)
shapes = ranks.flatmap(lambda d: st.tuples(*[st.integers(0, 5)] * d))


@st.composite
def boxes_in(draw, shape, *, beyond=0):
    offset = tuple(draw(st.integers(0, n + beyond)) for n in shape)
    sides = tuple(
        draw(st.integers(0, max(0, n + beyond - o))) for n, o in zip(shape, offset, strict=True)
    )
    return Box(offset, sides)


@st.composite
def two_boxes(draw):
    shape = draw(shapes)
    return draw(boxes_in(shape)), draw(boxes_in(shape))


@st.composite
def cuttings(draw):
    """Boxes that come from cutting a box again and again."""
    outer = Box.whole(draw(ranks.flatmap(lambda d: st.tuples(*[st.integers(1, 6)] * d))))
    boxes = [outer]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [d for d, n in enumerate(box.shape) if n > 1]
        if not wide:
            boxes.append(box)
            continue
        d = draw(st.sampled_from(wide))
        at = draw(st.integers(1, box.shape[d] - 1))
        left = tuple(at if i == d else n for i, n in enumerate(box.shape))
        right = tuple(n - at if i == d else n for i, n in enumerate(box.shape))
        moved = tuple(o + at if i == d else o for i, o in enumerate(box.offset))
        boxes += [Box(box.offset, left), Box(moved, right)]
    return outer, draw(st.permutations(boxes))


# Box ----------------------------------------------------------------------------------------


@quick
@given(two_boxes())
def test_the_intersection_holds_the_common_elements(pair):
    a, b = pair
    common = a.intersect(b)
    assert (elements(common) if common is not None else set()) == elements(a) & elements(b)


@quick
@given(two_boxes())
def test_contains_says_whether_all_elements_lie_inside(pair):
    a, b = pair
    if b.size:
        assert a.contains(b) == (elements(b) <= elements(a))


@quick
@given(shapes.flatmap(lambda s: st.tuples(st.just(s), boxes_in(s))))
def test_slices_select_the_elements_of_a_box_and_back(case):
    shape, box = case
    picture = np.zeros(shape, bool)
    picture[box.slices] = True
    assert {tuple(map(int, i)) for i in np.argwhere(picture)} == elements(box)
    assert Box.from_slices(box.slices[:-1], shape) == box


def test_slices_of_a_0d_box_give_a_view_and_not_a_scalar():
    array = np.zeros(())
    assert np.shares_memory(array[Box.whole(()).slices], array)


def test_open_slices_are_the_whole_axis():
    assert Box.from_slices((slice(None), slice(2, None)), (3, 5)) == Box((0, 2), (3, 3))


@quick
@given(two_boxes())
def test_a_relative_box_selects_the_same_elements_inside_the_outer_one(pair):
    outer, other = pair
    inner = outer.intersect(other)
    if inner is None:
        return
    shape = tuple(map(max, outer.end, other.end))
    array = np.arange(int(np.prod(shape))).reshape(shape)
    found = array[outer.slices][inner.relative_to(outer).slices]
    assert np.array_equal(found, array[inner.slices])


@pytest.mark.parametrize(("shape", "size"), [((), 1), ((3, 4), 12), ((3, 0), 0)])
def test_the_size_counts_elements(shape, size):
    assert Box.whole(shape).size == size


# Lattice ------------------------------------------------------------------------------------


@st.composite
def lattices(draw):
    shape = draw(shapes)
    return Lattice(shape, tuple(draw(st.integers(1, n + 2)) for n in shape))


@quick
@given(lattices())
def test_the_cells_of_a_lattice_cover_its_array_once(lattice):
    boxes = [lattice.box(i) for i in range(lattice.size)]
    assert covered_by_counting(boxes, Box.whole(lattice.shape))
    assert all(b.size for b in boxes)


@quick
@given(lattices())
def test_number_and_position_of_a_cell_are_inverse_and_in_c_order(lattice):
    positions = [lattice.position(i) for i in range(lattice.size)]
    assert positions == list(np.ndindex(lattice.counts))
    assert [lattice.number(p) for p in positions] == list(range(lattice.size))


@quick
@given(lattices())
def test_the_box_at_a_position_is_the_box_of_its_number(lattice):
    for i in range(lattice.size):
        assert lattice.box_at(lattice.position(i)) == lattice.box(i)


@quick
@given(lattices().flatmap(lambda g: st.tuples(st.just(g), boxes_in(g.shape))))
def test_touching_names_the_cells_that_share_an_element(case):
    lattice, box = case
    wanted = [i for i in range(lattice.size) if lattice.box(i).intersect(box) is not None]
    assert list(lattice.touching(box)) == wanted


def test_a_0d_array_has_one_cell_and_an_empty_one_none():
    assert Lattice((), ()).size == 1
    assert list(Lattice((), ()).touching(Box.whole(()))) == [0]
    assert Lattice((0, 4), (1, 2)).size == 0
    assert list(Lattice((0, 4), (1, 2)).touching(Box.whole((0, 4)))) == []


# Covering -----------------------------------------------------------------------------------


@quick
@given(cuttings())
def test_what_a_box_was_cut_into_covers_it(case):
    outer, boxes = case
    assert covers_exactly_once(boxes, outer)


@quick
@given(cuttings(), st.data())
def test_a_lost_a_doubled_or_a_moved_box_is_noticed(case, data):
    outer, boxes = case
    i = data.draw(st.integers(0, len(boxes) - 1))
    box = boxes[i]
    d = data.draw(st.integers(0, max(0, len(box.shape) - 1)))
    step = data.draw(st.sampled_from([-1, 1]))
    moved = Box(tuple(o + step * (j == d) for j, o in enumerate(box.offset)), box.shape)
    for changed in ([], [box, box], [moved]):
        spoilt = [*boxes[:i], *changed, *boxes[i + 1 :]]
        assert covers_exactly_once(spoilt, outer) == covered_by_counting(spoilt, outer)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(shapes.flatmap(lambda s: st.tuples(st.just(s), st.lists(boxes_in(s, beyond=1), max_size=4))))
def test_covering_is_what_counting_says(case):
    shape, boxes = case
    outer = Box.whole(shape)
    assert covers_exactly_once(boxes, outer) == covered_by_counting(boxes, outer)


def test_boxes_of_the_right_total_size_that_overlap_do_not_cover():
    overlapping = [Box((0, 0), (2, 1)), Box((0, 0), (1, 2))]
    assert not covers_exactly_once(overlapping, Box.whole((2, 2)))


def test_a_0d_array_is_covered_by_one_box_only():
    assert covers_exactly_once([Box.whole(())], Box.whole(()))
    assert not covers_exactly_once([Box.whole(())] * 2, Box.whole(()))
    assert not covers_exactly_once([], Box.whole(()))


def test_a_large_grid_is_proved_quickly():
    lattice = Lattice((1 << 40, 1 << 20, 64), (1 << 33, 1 << 13, 64))
    began = time.perf_counter()
    assert covers_exactly_once(map(lattice.box, range(lattice.size)), Box.whole(lattice.shape))
    assert lattice.size == 16_384
    assert time.perf_counter() - began < 10
