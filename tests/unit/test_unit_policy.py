"""When to save and what to keep, tried on simulated runs."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxshard._policy import Every, Keep, SavedStep

quick = settings(derandomize=True, deadline=None, max_examples=60)
step_sets = st.sets(st.integers(0, 1000), max_size=20)


@quick
@given(st.integers(1, 50), st.integers(0, 300))
def test_every_saves_at_each_multiple_and_nowhere_else(steps, total):
    due = Every(steps=steps)
    saved = [step for step in range(1, total + 1) if due(step, 0.0, [])]
    assert saved == list(range(steps, total + 1, steps))


def test_every_does_not_look_at_clock_or_history():
    due = Every(steps=10)
    assert due(20, 1e9, [SavedStep(19, 1e9)])
    assert not due(21, 1e9, [])


@pytest.mark.parametrize("steps", [0, -1])
def test_every_needs_a_positive_number(steps):
    with pytest.raises(ValueError, match=f"Every: steps must be at least 1: {steps}\nhint: Every"):
        Every(steps=steps)


@quick
@given(step_sets, st.integers(1, 25))
def test_keep_keeps_the_newest(steps, last):
    kept = Keep(last=last).kept(steps)
    gone = steps - kept
    assert kept <= steps
    assert len(kept) == min(last, len(steps))
    assert not gone or max(gone) < min(kept)


@quick
@given(step_sets)
def test_keep_without_a_number_keeps_all(steps):
    assert Keep().kept(steps) == steps


@quick
@given(st.lists(st.integers(0, 20), min_size=1), st.integers(1, 5))
def test_the_newest_is_always_kept_in_whatever_order_steps_come(steps, last):
    assert max(steps) in Keep(last=last).kept(iter(steps))


@pytest.mark.parametrize("last", [0, -3])
def test_keep_needs_a_positive_number(last):
    with pytest.raises(ValueError, match=f"Keep: last must be at least 1: {last}\nhint: Keep"):
        Keep(last=last)


@pytest.mark.parametrize("make", [lambda: Every(steps=3), lambda: Keep(last=3)])
def test_policies_are_values(make):
    assert make() == make()
    assert len({make(), make()}) == 1
    with pytest.raises(AttributeError, match="cannot assign to field"):
        setattr(make(), next(iter(make().__dataclass_fields__)), 1)
