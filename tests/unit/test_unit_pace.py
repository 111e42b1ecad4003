import pytest

from jaxshard._pace import Pace


def loop(pace, seconds, *, beside=()):
    """Steps of so many seconds each; those whose numbers are in `beside` beside a save."""
    clock = 0.0
    pace.step_begins(clock)
    for number, step_s in enumerate(seconds):
        clock += step_s
        pace.step_ended(clock, beside_save=number in beside)
        pace.step_begins(clock)


def test_a_save_costs_what_it_blocks_and_what_steps_beside_it_are_slower():
    pace = Pace()
    loop(pace, [1.0] * 5)
    pace.save_began(0.25)
    loop(pace, [1.5, 2.0, 1.0], beside={0, 1, 2})
    assert pace.save_cost_s() == pytest.approx(0.25 + 1.5)


def test_the_usual_step_is_the_median_so_that_compiling_does_not_count():
    pace = Pace()
    loop(pace, [60.0, 1.0, 1.0, 1.0])
    pace.save_began(0.0)
    loop(pace, [1.25], beside={0})
    assert pace.save_cost_s() == pytest.approx(0.25)


def test_faster_steps_beside_a_save_give_nothing_back():
    pace = Pace()
    loop(pace, [2.0] * 3)
    pace.save_began(0.5)
    loop(pace, [1.0], beside={0})
    assert pace.save_cost_s() == 0.5


def test_without_steps_to_compare_only_blocking_counts():
    pace = Pace()
    pace.save_began(0.5)
    loop(pace, [9.0], beside={0})
    assert pace.save_cost_s() == 0.5


def test_each_save_counts_its_own_steps():
    pace = Pace()
    loop(pace, [1.0] * 3)
    pace.save_began(0.0)
    loop(pace, [5.0], beside={0})
    pace.save_began(0.0)
    loop(pace, [1.5], beside={0})
    assert pace.save_cost_s() == pytest.approx(0.5)


def test_the_longest_of_the_last_steps():
    pace = Pace()
    assert pace.step_s == 0
    loop(pace, [1.0, 3.0, 2.0])
    assert pace.step_s == 3.0
    loop(pace, [1.0] * 200)
    assert pace.step_s == 1.0


def test_time_between_steps_is_nobodys():
    pace = Pace()
    pace.step_begins(0.0)
    pace.step_ended(1.0, beside_save=False)
    pace.step_ended(50.0, beside_save=False)  # an evaluation, say
    assert pace.step_s == 1.0
