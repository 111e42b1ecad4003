"""A keyed permutation is one to one, has no visible structure, and never changes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.data._permutation import Permutation, derive_key


def whole(n: int, key: int) -> np.ndarray:
    return Permutation(n, key)(np.arange(n))


@pytest.mark.parametrize("n", [*range(1, 70), 4095, 4096, 4097, 8191, 8192, 8193, 100_003])
def test_every_length_is_permuted_one_to_one(n):
    assert np.array_equal(np.sort(whole(n, key=n)), np.arange(n))


@settings(max_examples=40, deadline=None)
@given(st.integers(4097, 60_000), st.integers(-(2**70), 2**70))
def test_any_length_and_any_key_are_one_to_one(n, key):
    assert np.array_equal(np.sort(whole(n, key)), np.arange(n))


def test_positions_are_answered_one_by_one_or_together():
    permutation = Permutation(10_007, 5)
    positions = np.array([9_999, 0, 17, 17, 10_006])
    alone = [int(permutation(np.array([p]))[0]) for p in positions]
    assert permutation(positions).tolist() == alone
    assert permutation(np.array([], np.int64)).tolist() == []


# The order is part of the format: a run that comes back with a newer jaxshard must see the same.
FROZEN = {
    (7, 0): [4, 6, 0, 3, 2, 1, 5],
    (10_007, 1): [838, 1069, 1287, 3430, 415, 3258, 7118],
    (10**9, 2): [999057944, 323258296, 578041709, 60743289, 906523131, 74551740, 762797004],
    (2**61, 3): [
        681360852195880921,
        1909496178887853752,
        778253077371239793,
        1071617443076635666,
        1966195940576150018,
        1798931862113818973,
        1862245552026565634,
    ],
}


def test_the_order_never_changes():
    found = {(n, key): Permutation(n, key)(np.arange(min(n, 7))).tolist() for n, key in FROZEN}
    assert found == FROZEN


def test_a_billion_rows_take_no_memory():
    tracemalloc.start()
    Permutation(10**9, 1)(np.arange(1024))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


# No visible structure -----------------------------------------------------------------------


def chi_square(counts: np.ndarray) -> float:
    """How far counts are from equal, in standard deviations."""
    expected = counts.sum() / counts.size
    value = ((counts - expected) ** 2 / expected).sum()
    degrees = counts.size - 1
    return float((value - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("n", [5, 100, 4_097, 65_536, 70_001])
def test_where_a_row_goes_is_even_over_keys(n):
    """Each of the first positions gets each tenth of the rows as often, over many keys."""
    bins = min(n, 10)
    keys = 2_000
    at = np.array([0, 1, n // 2, n - 1])
    rows = np.array([Permutation(n, key)(at) for key in range(keys)])
    for column in rows.T:
        assert abs(chi_square(np.bincount(column * bins // n, minlength=bins))) < 5


def test_each_order_of_four_rows_is_as_likely():
    orders = [tuple(whole(4, key).tolist()) for key in range(24_000)]
    counts = np.array([orders.count(order) for order in sorted(set(orders))])
    assert counts.size == 24
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("n", [1_000, 50_000, 65_536])
def test_neighbours_are_not_neighbours_afterwards(n):
    rows = whole(n, key=11)
    steps = np.diff(rows)
    far = 5 / np.sqrt(n)  # standard deviations of a correlation
    assert np.mean(np.abs(steps)) == pytest.approx(n / 3, rel=far)
    assert np.mean(steps > 0) == pytest.approx(0.5, abs=far / 2)
    assert abs(np.corrcoef(np.arange(n), rows)[0, 1]) < far
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < far
    odd = rows % 2
    assert np.mean(odd[:-1] == odd[1:]) == pytest.approx(0.5, abs=far / 2)


@pytest.mark.parametrize("n", [1_000, 50_000])
def test_other_keys_give_other_orders(n):
    a, b = whole(n, derive_key(0, 0, 0)), whole(n, derive_key(0, 0, 1))
    assert np.sum(a == b) < 12  # one on the average
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(n)


def test_keys_of_several_numbers_do_not_collide():
    keys = {derive_key(s, i, e) for s in range(-20, 20) for i in range(20) for e in range(20)}
    assert len(keys) == 40 * 20 * 20
    assert derive_key(1, 2) != derive_key(2, 1)
    assert derive_key(2**64) != derive_key(0)
