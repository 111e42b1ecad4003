"""When to save, tried on simulated runs."""

import itertools
import random
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxshard._policy import Every, SavedStep, YoungDaly

quick = settings(derandomize=True, deadline=None, max_examples=60)
BEGAN = SavedStep(0, 0.0, took_s=0.0)


def saves_of(due, step_s, total, *, took_s=0.5, cost_s=0.1, began=BEGAN):
    """Clock and step of each save of a run whose saves go on for `took_s` beside training."""
    history, clock_s = [began], began.clock_s
    for step in range(began.step + 1, total + 1):
        clock_s += step_s
        last = history[-1]
        if last.took_s is None and clock_s >= last.clock_s + took_s:
            history[-1] = last._replace(took_s=took_s, cost_s=cost_s)
        if due(step, clock_s, tuple(history)):
            history.append(SavedStep(step, clock_s))
    return history[1:]


# Every --------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 50), st.integers(0, 300))
def test_every_saves_at_each_multiple_and_nowhere_else(steps, total):
    due = Every(steps=steps)
    saved = [step for step in range(1, total + 1) if due(step, 0.0, [])]
    assert saved == list(range(steps, total + 1, steps))


def test_every_step_does_not_look_at_clock_or_history():
    due = Every(steps=10)
    assert due(20, 1e9, [SavedStep(19, 1e9)])
    assert not due(21, 1e9, [])


def test_every_minute_counts_from_the_start_and_then_from_the_last_save():
    found = saves_of(Every(minutes=1), 7.0, 30)
    assert [s.clock_s for s in found] == [63.0, 126.0, 189.0]
    assert saves_of(Every(minutes=1), 7.0, 8) == []


def test_whichever_comes_first_of_steps_and_minutes():
    found = saves_of(Every(steps=10, minutes=1), 7.0, 30)
    assert [s.step for s in found] == [9, 10, 19, 20, 29, 30]


@pytest.mark.parametrize("steps", [0, -1])
def test_every_needs_a_positive_number(steps):
    with pytest.raises(ValueError, match=f"Every: steps must be at least 1: {steps}\nhint: Every"):
        Every(steps=steps)


@pytest.mark.parametrize("minutes", [0, -1.5, float("nan")])
def test_every_needs_positive_minutes(minutes):
    with pytest.raises(ValueError, match=f"minutes must be more than 0: {minutes}\nhint: Every"):
        Every(minutes=minutes)


def test_every_needs_to_know_how_often():
    with pytest.raises(ValueError, match="Every: expected steps or minutes\nhint: Every"):
        Every()


# YoungDaly ----------------------------------------------------------------------------------


def test_the_interval_is_that_of_the_papers():
    """Young's square root, and Daly's correction; beyond his range the time between failures."""
    assert YoungDaly(mtbf_hours=1).interval_s(0.0) == 0
    assert YoungDaly(mtbf_hours=100).interval_s(1.0) == pytest.approx((2 * 3600e2) ** 0.5, rel=1e-3)
    # Daly 2006, equation 37, by hand: C = 5 min, M = 6 h.
    assert YoungDaly(mtbf_hours=6).interval_s(300) == pytest.approx(3402.78, abs=0.01)
    assert YoungDaly(mtbf_hours=0.1).interval_s(1000) == 360


def test_the_first_save_comes_at_once_and_the_next_ones_as_its_cost_says():
    due = YoungDaly(mtbf_hours=24)
    found = saves_of(due, 1.0, 2000, took_s=3.0, cost_s=0.5)
    assert found[0].step == 1
    gaps = {b.clock_s - a.clock_s for a, b in itertools.pairwise(found)}
    assert gaps == {295.0}  # 293.6 s after the half second of the save, in whole steps


def test_no_save_begins_while_one_goes_on():
    found = saves_of(YoungDaly(mtbf_hours=0.01), 1.0, 200, took_s=50.0, cost_s=0.001)
    assert [s.step for s in found] == [1, 51, 101, 151]


def test_limits_of_the_interval():
    often = saves_of(YoungDaly(mtbf_hours=24, min_steps=400), 1.0, 2000, cost_s=0.5)
    assert [s.step for s in often] == [400, 800, 1200, 1600, 2000]
    rare = saves_of(YoungDaly(mtbf_hours=1e6, max_minutes=10), 1.0, 2000, cost_s=0.5)
    assert [s.step for s in rare] == [1, 601, 1201, 1801]


def test_a_failed_save_is_tried_again_after_the_interval_of_what_it_took():
    due = YoungDaly(mtbf_hours=1)
    failed = [BEGAN, SavedStep(1, 1.0, took_s=2.0)]
    assert not due(50, 50.0, failed)
    assert due(150, 150.0, failed)


def test_one_slow_save_does_not_change_the_interval():
    due = YoungDaly(mtbf_hours=24)
    saves = [SavedStep(i, float(i), took_s=1.0, cost_s=0.5) for i in range(1, 6)]
    slow = saves[2]._replace(cost_s=500.0)
    for history in ([BEGAN, *saves], [BEGAN, *saves[:2], slow, *saves[3:]]):
        assert not due(200, 298.0, history)
        assert due(200, 300.0, history)


@pytest.mark.parametrize(
    "wrong",
    [{"mtbf_hours": 0}, {"mtbf_hours": 1, "min_steps": 0}, {"mtbf_hours": 1, "max_minutes": 0}],
)
def test_young_daly_needs_positive_numbers(wrong):
    with pytest.raises(ValueError, match=r"all must be more than 0\nhint: YoungDaly\(mtbf_hours"):
        YoungDaly(**wrong)


def time_to_finish(due, failures, *, steps, step_s, cost_s, restart_s):
    """Seconds until a run has done its steps, with failures after so much time each."""
    failures = iter(failures)
    clock_s, done, saved = 0.0, 0, 0
    fails_s = next(failures)
    history = [BEGAN]
    while done < steps:
        clock_s += step_s
        done += 1
        if due(done, clock_s, history):
            clock_s += cost_s
            if clock_s < fails_s:
                saved = done
                history.append(SavedStep(done, clock_s - cost_s, took_s=cost_s, cost_s=cost_s))
                del history[:-20]
        if clock_s >= fails_s:
            clock_s = fails_s + restart_s
            fails_s = clock_s + next(failures)
            done = saved
            history = [SavedStep(done, clock_s, took_s=0.0)]
    return clock_s


@pytest.mark.parametrize(("mtbf_s", "cost_s"), [(3600, 4.0), (1200, 20.0)])
def test_a_run_with_failures_is_within_a_tenth_of_the_best_fixed_interval(mtbf_s, cost_s):
    """The policy is not told the cost, and begins anew after each failure."""

    def lost(due):
        """Share of the time that was not useful; over several runs with the same failures."""
        useful_s = 40_000
        times = []
        for seed in range(6):
            rng = random.Random(seed)
            failures = (rng.expovariate(1 / mtbf_s) for _ in range(100_000))
            times.append(
                time_to_finish(
                    due, failures, steps=useful_s // 4, step_s=4.0, cost_s=cost_s, restart_s=60
                )
            )
        return statistics.mean(times)

    fixed = {
        n: lost(lambda step, clock, history, n=n: step % n == 0)
        for n in (5, 10, 20, 30, 45, 60, 90, 130, 180, 260, 400)
    }
    best = min(fixed.values())
    assert fixed[5] > 1.1 * best, fixed  # it matters
    assert fixed[400] > 1.1 * best, fixed
    assert lost(YoungDaly(mtbf_hours=mtbf_s / 3600)) <= 1.1 * best


@pytest.mark.parametrize("make", [lambda: Every(steps=3), lambda: YoungDaly(mtbf_hours=1)])
def test_policies_are_values(make):
    assert make() == make()
    assert len({make(), make()}) == 1
    with pytest.raises(AttributeError, match="cannot assign to field"):
        setattr(make(), next(iter(make().__dataclass_fields__)), 1)
