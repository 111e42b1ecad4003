"""Where the time of a run went: simulated runs whose answer is known, and parts that add up."""

import datetime
import random

import pytest

from jaxshard._goodput import JobStart, goodput, job_starts

ZERO = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def at(seconds):
    return (ZERO + datetime.timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def event(seconds, name, **fields):
    return {"at": at(seconds), "event": name, **fields}


def test_a_run_without_events():
    found = goodput([])
    assert (found.wall_s, found.goodput, found.starts, found.saves) == (0, 0, 0, 0)
    assert found.best_interval_s is None


def test_a_run_without_failures():
    found = goodput(
        [
            event(0, "start"),
            event(2, "fresh"),
            event(52, "save", step=50, cost_s=1.0, nbytes=100),
            event(102, "save", step=100, cost_s=3.0, nbytes=100),
            event(103, "end", step=100),
        ]
    )
    assert found.wall_s == 103
    assert found.restoring_s == 2
    assert found.saving_s == 4
    assert found.useful_s == 97
    assert (found.lost_s, found.down_s, found.failures, found.lost_steps) == (0, 0, 0, 0)
    assert (found.saves, found.nbytes, found.save_cost_s) == (2, 200, 2.0)
    assert found.mtbf_s is None


def test_a_crash_costs_the_steps_since_the_last_save_and_the_way_back():
    found = goodput(
        [
            event(0, "start"),
            event(10, "fresh"),
            event(110, "save", step=100, cost_s=0.5),
            # killed at 150 s, in step 140
            event(200, "start", last_step=140, last_seen=at(150)),
            event(220, "resume", step=100),
            event(320, "save", step=200, cost_s=0.5),
            event(321, "end", step=200),
        ]
    )
    assert found.wall_s == 321
    assert (found.failures, found.lost_steps, found.starts) == (1, 40, 2)
    assert found.lost_s == 40
    assert found.down_s == 50
    assert found.restoring_s == 30
    assert found.saving_s == 1
    assert found.useful_s == 200
    assert found.mtbf_s == 271
    assert found.best_interval_s == pytest.approx((2 * 0.5 * 271) ** 0.5, rel=0.05)


def test_a_crash_before_the_first_save_loses_all_steps():
    found = goodput(
        [
            event(0, "start"),
            event(1, "fresh"),
            event(60, "start", last_step=30, last_seen=at(31)),
            event(61, "fresh"),
            event(71, "save", step=10, cost_s=0),
        ]
    )
    assert (found.lost_s, found.lost_steps, found.useful_s) == (30, 30, 10)


def test_a_crash_while_restoring():
    found = goodput(
        [
            event(0, "start"),
            event(1, "fresh"),
            event(11, "save", step=10, cost_s=0),
            event(20, "start", last_step=10, last_seen=at(11)),
            event(30, "start"),
            event(31, "resume", step=10),
        ]
    )
    assert (found.failures, found.lost_s, found.lost_steps) == (2, 0, 0)
    assert found.useful_s == 10


def test_a_stop_that_was_asked_for_is_no_failure_and_loses_nothing():
    found = goodput(
        [
            event(0, "start"),
            event(1, "fresh"),
            event(9, "stop", step=8, reason="SIGTERM"),
            event(10, "save", step=8, cost_s=1),
            event(10, "end", step=8),
            event(15, "start", last_step=8, last_seen=at(9)),
            event(16, "resume", step=8),
        ]
    )
    assert (found.failures, found.lost_s, found.down_s) == (0, 0, 5)


def test_a_job_that_runs_is_known_by_its_beat():
    found = goodput([event(0, "start"), event(1, "fresh")], step=50, seen=at(51))
    assert (found.wall_s, found.useful_s) == (51, 50)


def test_failed_saves_are_counted_apart():
    found = goodput(
        [event(0, "start"), event(1, "fresh"), event(5, "save-failed", step=4, error="x")]
    )
    assert (found.saves, found.failed_saves, found.save_cost_s) == (0, 1, None)


@pytest.mark.parametrize("seed", range(20))
def test_a_long_run_with_random_failures_adds_up(seed):
    """Each second of a simulated run is booked once, and the ledger says the same."""
    rng = random.Random(seed)
    clock = 0.0
    booked = dict.fromkeys(["useful", "lost", "restoring", "down"], 0.0)
    events, saved, failures, last = [], 0, 0, (None, None)
    since_save = 0.0
    for start in range(30):
        step = saved
        events.append(event(clock, "start", last_step=last[0], last_seen=last[1]))
        restoring = rng.randint(1, 10)
        clock += restoring
        booked["restoring"] += restoring
        events.append(event(clock, "resume" if saved else "fresh", step=step))
        since_save = 0.0
        for _ in range(rng.randint(1, 500)):
            clock += 1
            step += 1
            since_save += 1
            if step % 100 == 0:
                events.append(event(clock, "save", step=step, cost_s=0.0))
                saved = step
                booked["useful"] += since_save
                since_save = 0.0
        last = (step, at(clock))
        if start == 29:
            break
        failures += 1
        booked["lost"] += since_save
        down = rng.randint(0, 50)
        clock += down
        booked["down"] += down
    booked["useful"] += since_save
    found = goodput(events, *last)
    assert found.wall_s == pytest.approx(clock)
    for name, seconds in booked.items():
        assert getattr(found, f"{name}_s") == pytest.approx(seconds), name
    assert found.useful_s + found.saving_s + found.lost_s + found.restoring_s + found.down_s == (
        pytest.approx(found.wall_s)
    )
    assert found.failures == failures


def test_starts_as_a_picture_needs_them():
    found = job_starts(
        [
            event(100, "start"),
            event(110, "fresh"),
            event(120, "save", step=10),
            event(130, "save", step=20),
            event(150, "start", last_step=27, last_seen=at(140)),
            event(151, "start"),
            event(155, "resume", step=10),
            event(165, "save", step=20),
        ],
        step=25,
        seen=at(170),
    )
    assert found == (
        JobStart(0, 10, 0, ((20, 10), (30, 20)), 40, 27, ended=False, kept=27),
        JobStart(50, None, 0, (), 50, 0, ended=False, kept=0),
        JobStart(51, 55, 10, ((65, 20),), 70, 25, ended=False, kept=25),
    )
    assert job_starts([]) == ()


def test_what_was_done_again_is_told_by_the_next_start():
    found = job_starts(
        [
            event(0, "start"),
            event(1, "fresh"),
            event(11, "save", step=10),
            event(20, "start", last_step=17, last_seen=at(18)),
            event(21, "resume", step=10),
            event(40, "end", step=30),
        ]
    )
    assert [start.kept for start in found] == [10, 30]
    assert [start.ended for start in found] == [False, True]


def test_a_start_that_ends_with_an_error_before_it_has_begun_is_no_failure():
    """A wrong argument, tried again and again, says nothing about the machine."""
    events = [event(0, "start"), event(1, "end", error="ValueError: mapping"), event(10, "start"),
              event(11, "fresh"), event(111, "end", step=100)]  # fmt: skip
    found = goodput(events)
    assert (found.starts, found.failures, found.mtbf_s) == (2, 0, None)
    killed = goodput([event(0, "start"), event(10, "start"), event(11, "fresh"), event(20, "end")])
    assert killed.failures == 1


def test_the_time_between_the_end_of_training_and_more_of_it_is_nobodys():
    events = [
        event(0, "start"),
        event(1, "fresh"),
        event(101, "save", step=100),
        event(101, "end", step=100, done=True),
        event(7 * 86400, "start"),
        event(7 * 86400 + 1, "resume", step=100),
        event(7 * 86400 + 101, "save", step=200),
        event(7 * 86400 + 101, "end", step=200, done=True),
    ]
    found = goodput(events)
    assert found.wall_s == pytest.approx(202)
    assert found.down_s == 0
    assert found.useful_s == pytest.approx(200)
    first, second = job_starts(events)
    assert first.last_s == second.began_s == 101
    assert second.saves == ((202, 200),)
    asked = goodput([*events[:3], event(101, "end", step=100, done=False), *events[4:]])
    assert asked.down_s == pytest.approx(7 * 86400 - 101)
