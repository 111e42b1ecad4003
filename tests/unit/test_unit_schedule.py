"""Sizes of batches: one, or a schedule of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxshard.data._schedule import Schedule

PARTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=4)


def schedule(parts: list[tuple[int, int]]) -> Schedule:
    """Of (how many batches, their size) parts."""
    step, pairs = 0, []
    for batches, size in parts:
        pairs.append((step, size))
        step += batches
    return Schedule(pairs)


@given(PARTS, st.integers(0, 80))
def test_offsets_are_the_sums_of_sizes(parts, step):
    found = schedule(parts)
    assert found.offset(step) == sum(found.size(k) for k in range(step))


@given(PARTS, st.integers(0, 300), st.booleans())
def test_how_many_batches_rows_make(parts, total, keep_last):
    found = schedule(parts)
    batches = found.batches(total, keep_last=keep_last)
    assert found.offset(batches) <= total or (keep_last and found.offset(batches - 1) < total)
    assert found.offset(batches + 1) > total or (keep_last and found.offset(batches) >= total)


def test_only_the_past_counts():
    assert Schedule(8).before(5) == Schedule([(0, 8), (5, 16)]).before(5) == [[0, 8]]
    assert Schedule(8).before(6) != Schedule([(0, 8), (5, 16)]).before(6)
    assert Schedule([(0, 8), (3, 8)]).before(9) == [[0, 8]]
    assert Schedule(8).before(0) == Schedule(16).before(0)


@pytest.mark.parametrize("sizes", ["32", 1.5, None, [], [(0, 1.5)], [8, 16], True])
def test_what_is_no_size_is_refused(sizes):
    with pytest.raises(TypeError, match=r"expected global_batch to be .*\nhint: global_batch=256"):
        Schedule(sizes)


@pytest.mark.parametrize("sizes", [0, -4, [(1, 8)], [(0, 8), (0, 16)], [(0, 8), (5, 0)]])
def test_sizes_that_do_not_go_together_are_refused(sizes):
    with pytest.raises(ValueError, match=r"expected sizes of 1 or more, from steps that rise"):
        Schedule(sizes)
