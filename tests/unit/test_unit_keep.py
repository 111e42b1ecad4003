"""What to keep, against a brute-force model over random histories."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxshard._keep import Keep, KeptStep

quick = settings(derandomize=True, deadline=None, max_examples=200)
HOUR_S = 3600.0
values = st.none() | st.floats(-2, 2, width=16) | st.just(math.nan)


@st.composite
def histories(draw):
    """Committed steps as a run makes them: both numbers and times rise."""
    steps = sorted(draw(st.sets(st.integers(0, 200), max_size=15)))
    gaps = draw(st.lists(st.integers(1, 7200), min_size=len(steps), max_size=len(steps)))
    found, clock_s = [], 1e9
    for step, gap_s in zip(steps, gaps, strict=True):
        clock_s += gap_s
        value = draw(values)
        metrics = {} if value is None else {"loss": value, "other": -value}
        found.append(KeptStep(step, clock_s, metrics, draw(st.integers(0, 9)) == 0))
    return found


rules = st.builds(
    Keep,
    last=st.none() | st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 60),
    every_hours=st.none() | st.floats(0.1, 5),
).flatmap(
    lambda keep: (
        st.just(keep)
        | st.builds(
            lambda best, mode: Keep(
                last=keep.last,
                every_steps=keep.every_steps,
                every_hours=keep.every_hours,
                best=best,
                metric="loss",
                mode=mode,
            ),
            st.integers(1, 4),
            st.sampled_from(["min", "max"]),
        )
    )
)


def is_kept(keep: Keep, one: KeptStep, steps: list[KeptStep]) -> bool:
    """The rules, one after the other, as their documentation says them."""
    if keep == Keep() or one.protected:
        return True
    newer = [s for s in steps if s.step > one.step]
    if len(newer) < (keep.last or 1):
        return True
    if keep.every_steps and one.step % keep.every_steps == 0:
        return True
    if keep.every_hours and one.step in chain(keep.every_hours * HOUR_S, steps):
        return True
    loss = one.metrics.get("loss", math.nan)
    if keep.best and not math.isnan(loss):
        return sum(is_better(keep.mode, s, one) for s in steps) < keep.best
    return False


def is_better(mode: str, a: KeptStep, b: KeptStep) -> bool:
    first, second = a.metrics.get("loss", math.nan), b.metrics["loss"]
    if first == second:
        return a.step > b.step
    return first < second if mode == "min" else first > second


def chain(gap_s: float, steps: list[KeptStep]) -> list[int]:
    if not steps:
        return []
    first = steps[0]
    return [first.step, *chain(gap_s, [s for s in steps if s.saved_s >= first.saved_s + gap_s])]


@quick
@given(rules, histories())
def test_kept_is_what_the_rules_say_of_each_step(keep, steps):
    expected = {s.step for s in steps if is_kept(keep, s, steps)}
    assert keep.kept(reversed(steps)) == expected


@quick
@given(rules, histories())
def test_what_was_kept_is_kept_when_asked_again_without_the_rest(keep, steps):
    kept = keep.kept(steps)
    assert keep.kept([s for s in steps if s.step in kept]) == kept


@quick
@given(rules, histories())
def test_a_run_that_deletes_as_it_goes_never_loses_its_newest_its_protected_and_its_best(
    keep, steps
):
    there: list[KeptStep] = []
    for one in steps:
        there.append(one)
        kept = keep.kept(there)
        there = [s for s in there if s.step in kept]
        assert there[-1] == one
    assert {s.step for s in steps if s.protected} <= {s.step for s in there}
    ranked = keep.ranked(steps) if keep.best else []
    assert {s.step for s in ranked[:1]} <= {s.step for s in there}


def test_without_a_rule_all_are_kept():
    steps = [KeptStep(n) for n in range(5)]
    assert Keep().kept(steps) == set(range(5))


def test_rules_add_up():
    steps = [KeptStep(n, n * HOUR_S, {"loss": abs(n - 3)}) for n in range(1, 11)]
    keep = Keep(last=1, every_steps=7, every_hours=4, best=1, metric="loss")
    assert sorted(keep.kept(steps)) == [1, 3, 5, 7, 9, 10]


def test_of_equal_steps_the_newest_is_best_and_nan_never():
    steps = [KeptStep(n, metrics={"loss": v}) for n, v in enumerate([1.0, 1.0, math.nan, 2.0])]
    assert [s.step for s in Keep(best=1, metric="loss").ranked(steps)] == [1, 0, 3]
    assert [s.step for s in Keep(best=1, metric="loss", mode="max").ranked(steps)] == [3, 1, 0]


@pytest.mark.parametrize("name", ["last", "every_steps"])
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_are_at_least_1(name, value):
    with pytest.raises(ValueError, match=f"Keep: {name} must be at least 1: {value}\nhint: Keep"):
        Keep(**{name: value})


def test_hours_are_more_than_0():
    with pytest.raises(ValueError, match="every_hours must be more than 0: 0\nhint: Keep"):
        Keep(every_hours=0)


@pytest.mark.parametrize("half", [{"best": 2}, {"metric": "loss"}])
def test_best_needs_a_metric_and_a_metric_a_number(half):
    with pytest.raises(ValueError, match="expected both or neither\nhint: Keep"):
        Keep(last=1, **half)


def test_mode_is_min_or_max():
    with pytest.raises(ValueError, match='mode must be "min" or "max": \'most\'\nhint: Keep'):
        Keep(best=1, metric="loss", mode="most")  # type: ignore[arg-type]


def test_it_is_a_value():
    assert Keep(last=3) == Keep(last=3)
    assert len({Keep(last=3), Keep(last=3)}) == 1
    with pytest.raises(AttributeError, match="cannot assign to field"):
        Keep(last=3).last = 4  # type: ignore[misc]
