"""Requests run in order with bounded bytes in flight; after an error nothing goes on."""

import contextlib
import errno
import gc
import threading
import time
import weakref

import pytest

from jaxshard._errors import CorruptionError, Kind, StorageTimeoutError
from jaxshard._threads import Workers
from jaxshard._transfer import Request, run


class Later:
    """A future that is done when it is waited for; keeps book of what is in flight."""

    flying = 0
    flying_most = 0
    count_most = 0
    count = 0

    def __init__(self, nbytes, outcome):
        self.nbytes, self.outcome, self.waited = nbytes, outcome, False
        Later.flying += nbytes
        Later.count += 1
        Later.flying_most = max(Later.flying_most, Later.flying)
        Later.count_most = max(Later.count_most, Later.count)

    def result(self, timeout=None):
        if not self.waited:
            self.waited = True
            Later.flying -= self.nbytes
            Later.count -= 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture(autouse=True)
def _nothing_in_flight():
    Later.flying = Later.flying_most = Later.count = Later.count_most = 0


class Batch:
    """Requests that note what happens to them."""

    def __init__(self, *outcomes, nbytes=10):
        self.outcomes, self.nbytes = outcomes, nbytes
        self.started, self.finished = [], []

    def __iter__(self):
        for number, outcome in enumerate(self.outcomes):
            yield self.request(number, outcome)

    def request(self, number, outcome):
        def start():
            self.started.append(number)
            return Later(self.nbytes, outcome)

        return Request(
            self.nbytes,
            start,
            lambda result: self.finished.append((number, result)),
            lambda error: CorruptionError(f"request {number}: {error}"),
        )


def test_every_request_is_finished_in_order_with_its_result():
    batch = Batch(*"abcdef")
    run(batch, bytes_max=25)
    assert batch.finished == list(enumerate("abcdef"))


def test_no_requests_are_no_work():
    run([], bytes_max=1)


def test_results_arrive_in_the_thread_of_the_caller():
    threads = []
    request = Request(
        1, lambda: Later(1, None), lambda _: threads.append(threading.get_ident()), str
    )
    run([request], bytes_max=1)
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize(("bytes_max", "most"), [(10, 10), (25, 20), (30, 30), (1000, 200)])
def test_bytes_in_flight_stay_below_the_limit(bytes_max, most):
    run(Batch(*range(20)), bytes_max=bytes_max)
    assert Later.flying_most == most


def test_a_request_larger_than_the_limit_flies_alone():
    batch = Batch(*range(5))
    run(batch, bytes_max=3)
    assert Later.count_most == 1
    assert len(batch.finished) == 5


def test_small_requests_are_bounded_in_number():
    run(Batch(*range(1000), nbytes=0), bytes_max=1)
    assert 16 <= Later.count_most <= 64


def test_requests_are_made_only_when_there_is_room_for_them():
    made_while_flying = []
    batch = Batch(*range(10))

    def watched():
        for request in batch:
            made_while_flying.append(Later.count)
            yield request

    run(watched(), bytes_max=20)
    assert max(made_while_flying) <= 2


def test_while_the_next_request_is_not_there_yet_what_flies_is_finished():
    # Else a snapshot that waits for its memory, and a writer that waits for the next piece,
    # would wait for each other.
    batch, flying = Batch(1, 2, 3), []

    def requests():
        yield from batch
        for _ in range(4):
            yield None
            flying.append(Later.count)
        yield batch.request(3, 4)

    run(requests(), bytes_max=1000)
    assert flying[-1] == 0
    assert batch.finished == [(0, 1), (1, 2), (2, 3), (3, 4)]


# Errors -------------------------------------------------------------------------------------


def test_the_first_error_wins_and_keeps_its_cause():
    cause = ValueError("disk on fire")
    batch = Batch(1, cause, KeyError("later"), 4)
    with pytest.raises(CorruptionError, match="request 1: disk on fire") as e:
        run(batch, bytes_max=1000)
    assert e.value.__cause__ is cause
    assert batch.finished == [(0, 1)]


def test_after_an_error_no_further_request_begins():
    batch = Batch(*[ValueError("x")], *range(100))
    with pytest.raises(CorruptionError, match="request 0: x"):
        run(batch, bytes_max=30)
    assert batch.started == [0, 1, 2]


def test_after_an_error_all_that_was_in_flight_has_ended():
    batch = Batch(1, ValueError("x"), *range(10), ValueError("y"))
    with pytest.raises(CorruptionError, match="request 1: x"):
        run(batch, bytes_max=1000)
    assert len(batch.started) > 2
    assert Later.count == 0


def test_an_error_of_finish_is_raised_as_it_is_after_the_rest_has_ended():
    def wrong(_):
        raise CorruptionError("digest")

    bad = Request(1, lambda: Later(1, None), wrong, str)
    with pytest.raises(CorruptionError, match=r"^digest$"):
        run([bad, *Batch(1, 2, 3)], bytes_max=1000)
    assert Later.count == 0


def test_an_error_while_requests_are_made_is_raised_after_the_rest_has_ended():
    def requests():
        yield from Batch(1, 2, 3)
        raise CorruptionError("no such piece")

    with pytest.raises(CorruptionError, match="no such piece"):
        run(requests(), bytes_max=1000)
    assert Later.count == 0


def test_an_error_of_start_is_raised_after_the_rest_has_ended():
    def start():
        raise CorruptionError("cannot begin")

    bad = Request(1, start, print, str)
    with pytest.raises(CorruptionError, match="cannot begin"):
        run([*Batch(1, 2, 3), bad], bytes_max=1000)
    assert Later.count == 0


def test_an_interrupt_ends_what_was_in_flight():
    def requests():
        yield from Batch(1, 2, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run(requests(), bytes_max=1000)
    assert Later.count == 0


# Time ---------------------------------------------------------------------------------------


class Never:
    """A future of TensorStore's kind that is not done in time."""

    def __init__(self):
        self.timeouts = []

    def result(self, timeout=None):
        self.timeouts.append(timeout)
        time.sleep(min(timeout, 0.05))
        raise TimeoutError


def test_what_does_not_end_in_time_is_a_storage_time_out():
    future = Never()
    began = time.monotonic()
    with pytest.raises(
        StorageTimeoutError, match=r"within timeout_s: 0\.02\nhint: raise timeout_s"
    ) as e:
        run([Request(1, lambda: future, print, str)], bytes_max=1, timeout_s=0.02)
    assert e.value.kind is Kind.TIMEOUT
    assert time.monotonic() - began < 5
    assert future.timeouts[0] <= 0.02


def test_the_time_is_for_all_requests_together():
    seen = []

    class Slow:
        def result(self, timeout=None):
            seen.append(timeout)
            time.sleep(0.02)

    run([Request(1, Slow, lambda _: None, str)] * 3, bytes_max=1, timeout_s=10)
    assert seen == sorted(seen, reverse=True)
    assert seen[2] <= 10 - 0.04


def test_without_a_limit_it_waits_as_long_as_it_takes():
    seen = []

    class Asked:
        def result(self, timeout="unset"):
            seen.append(timeout)

    run([Request(1, Asked, lambda _: None, str)], bytes_max=1)
    assert seen[0] is None


# Errors of threads --------------------------------------------------------------------------


def failing(error, failed=lambda e: e):
    """A request whose call on a thread fails."""
    workers = Workers("test-transfer", 1, 1)

    def call():
        raise error

    yield Request(1, lambda: workers.start(call), pytest.fail, failed)
    workers.end(10)


def test_an_error_that_is_ours_already_is_not_its_own_cause():
    with pytest.raises(CorruptionError) as caught:
        run(failing(CorruptionError("x", kind=Kind.DATA_DAMAGED)), bytes_max=10)
    assert caught.value.__cause__ is None


def test_a_time_out_of_the_file_system_is_its_own():
    error = OSError(errno.ETIMEDOUT, "Connection timed out")
    with pytest.raises(TimeoutError, match="Connection timed out") as caught:
        run(failing(error), bytes_max=10, timeout_s=60)
    assert caught.value is error


class Values:
    """Something large that a caller of `run` holds."""


@pytest.mark.parametrize("error", [CorruptionError("x", kind=Kind.DATA_DAMAGED), ValueError("x")])
def test_an_error_does_not_keep_what_its_callers_hold(error):
    def load():
        values = Values()
        alive.append(weakref.ref(values))
        run(failing(error, lambda e: RuntimeError(str(e))), bytes_max=10)

    alive = []
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            load()
        error.__traceback__ = None  # of the one that the parameter list keeps
        assert alive[0]() is None
    finally:
        gc.enable()


def test_after_an_error_calls_that_wait_for_a_thread_are_not_begun():
    workers, begun = Workers("test-transfer", 1, 1), []

    def call(number):
        begun.append(number)
        time.sleep(0.05)
        if number == 0:
            raise ValueError

    requests = (
        Request(1, lambda i=i: workers.start(lambda: call(i)), lambda _: None, lambda e: e)
        for i in range(20)
    )
    with pytest.raises(ValueError):
        run(requests, bytes_max=100)
    assert workers.end(10)
    assert len(begun) < 5
