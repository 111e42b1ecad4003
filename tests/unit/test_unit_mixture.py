"""Mixtures keep their proportions at every prefix, and know any position at once."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.data import Mixture
from jaxshard.data._mixture import PERIOD_MAX, Pattern
from jaxshard.data._order import Order

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 60), st.floats(0.01, 1).map(lambda w: round(w, 3))),
    min_size=1,
    max_size=8,
)


def mixture(weights: list[float], **kwargs: object) -> Mixture:
    return Mixture([(range(10), weight) for weight in weights], **kwargs)


@settings(max_examples=80, deadline=None)
@given(WEIGHTS)
def test_each_prefix_is_within_one_row_of_its_share(weights):
    mixed = mixture(weights)
    pattern = Pattern(mixed.weights)
    n = min(2 * pattern.period + 3, 20_000)
    sources, _ = pattern.at(np.arange(n))
    total = sum(map(Fraction, map(str, weights)))
    for source, weight in enumerate(weights):
        share = float(Fraction(str(weight)) / total)
        given_so_far = np.cumsum(sources == source)
        assert np.abs(given_so_far - np.arange(1, n + 1) * share).max() < 1 + n / PERIOD_MAX


@settings(max_examples=40, deadline=None)
@given(WEIGHTS)
def test_each_source_gives_its_rows_in_order_and_any_can_be_found(weights):
    pattern = Pattern(mixture(weights).weights)
    sources, numbers = pattern.at(np.arange(3_000))
    for source in range(len(weights)):
        places = np.flatnonzero(sources == source)
        assert numbers[places].tolist() == list(range(len(places)))
        for number in {0, len(places) // 2, len(places) - 1} & {*range(len(places))}:
            assert pattern.position_of(source, number) == places[number]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([1], (1,)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([0.1, 0.2, 1 / 3], (3, 6, 10)),
        ([2, 4], (1, 2)),
        ([Fraction(1, 3), Fraction(2, 3)], (1, 2)),
        ([np.float32(0.5), np.int64(1)], (1, 2)),
        ([1e-9, 1], (1, 99_999)),
    ],
)
def test_weights_become_whole_numbers(weights, whole):
    assert mixture(weights).weights == whole


def test_weights_with_no_simple_ratio_are_rounded_to_five_decimals():
    weights = mixture([1_234_567, 98_765, 3_333]).weights
    assert sum(weights) <= PERIOD_MAX
    assert np.allclose(
        np.array(weights) / sum(weights), np.array([1_234_567, 98_765, 3_333]) / 1_336_665,
        atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True, "x", None])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ValueError, match=r"part 1: expected a positive weight, found .*\nhint: "):
        Mixture([(range(3), 1), (range(3), weight)])


def test_what_is_no_mixture_is_refused():
    with pytest.raises(ValueError, match=r"expected \(source, weight\) pairs, found none"):
        Mixture([])
    with pytest.raises(ValueError, match=r"part 0: expected a pair .*found range"):
        Mixture([range(3)])
    with pytest.raises(ValueError, match=r'"first_exhausted" or "all_exhausted"'):
        mixture([1], stopping_strategy="sometime")


def order(lengths: list[int], weights: list[int], **kwargs: object) -> Order:
    options = {"seed": 0, "shuffle": True, "epochs": 1, **kwargs}
    return Order(lengths, weights, **options)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_it_ends_before_the_first_source_would_be_read_again(parts, epochs):
    lengths, weights = map(list, zip(*parts, strict=True))
    found = order(lengths, weights, epochs=epochs)
    sources, rows = found.at(np.arange(found.total + 1))
    counts = [int(np.sum(sources[:-1] == s)) for s in range(len(lengths))]
    assert all(c <= epochs * n for c, n in zip(counts, lengths, strict=True))
    last = int(sources[-1])
    assert counts[last] == epochs * lengths[last]  # the next row would be one too many
    assert all(rows[i] < lengths[s] for i, s in enumerate(sources.tolist()))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_or_when_every_source_was_read_so_often(parts, epochs):
    lengths, weights = map(list, zip(*parts, strict=True))
    found = order(lengths, weights, epochs=epochs, until="all_exhausted")
    sources, rows = found.at(np.arange(found.total))
    for source, length in enumerate(lengths):
        mine = rows[sources == source]
        assert len(mine) >= epochs * length
        for epoch in range(epochs):  # each row once in each pass
            once = mine[epoch * length : (epoch + 1) * length]
            assert sorted(once.tolist()) == list(range(length))
    assert (
        found.epochs_at(found.total)
        == [int(np.sum(sources == s)) // n for s, n in enumerate(lengths)]
        or len(lengths) == 1
    )
    last = int(sources[-1])
    assert int(np.sum(sources == last)) == epochs * lengths[last]  # and not one row more
