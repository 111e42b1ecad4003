"""Calls run on a few threads; more where they wait, none that stays."""

import threading
import time

import pytest

from jaxshard._threads import Workers


def names():
    return [thread.name for thread in threading.enumerate()]


def test_results_and_errors_come_back():
    workers = Workers("test-workers", 2, 2)
    futures = [workers.start(lambda i=i: 10 // i) for i in (1, 2, 0, 5)]
    assert futures[0].result(10) == 10
    assert futures[1].result(10) == 5
    with pytest.raises(ZeroDivisionError):
        futures[2].result(10)
    assert futures[3].result(10) == 2
    assert workers.end(10)
    assert "test-workers" not in names()


def test_without_calls_there_is_no_thread():
    workers = Workers("test-workers", 2, 2)
    assert "test-workers" not in names()
    assert workers.end(0)


def test_calls_that_keep_the_cores_busy_get_the_first_number_of_threads():
    workers = Workers("test-workers", 1, 8)

    def busy():
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return names().count("test-workers")

    counts = [future.result(30) for future in [workers.start(busy) for _ in range(10)]]
    assert workers.end(10)
    assert counts[0] == 1
    assert min(counts) == 1


def test_calls_that_wait_get_more_threads_and_wait_together():
    workers = Workers("test-workers", 2, 8)
    began = time.monotonic()
    futures = [workers.start(lambda: time.sleep(0.2)) for _ in range(18)]
    for future in futures:
        future.result(30)
    assert time.monotonic() - began < 1.5  # of two threads 1.8
    assert len(workers._threads) == 8
    assert workers.end(10)
    assert "test-workers" not in names()


def test_a_call_that_hangs_does_not_keep_its_owner():
    workers = Workers("test-workers", 1, 1)
    hangs = threading.Event()
    future = workers.start(hangs.wait)
    with pytest.raises(TimeoutError):
        future.result(0.01)
    assert not workers.end(0.01)
    hangs.set()
    assert future.result(10)
    assert workers.end(10)


@pytest.mark.parametrize("started", [0, 1])
def test_where_no_thread_can_be_started_the_caller_does_it(monkeypatch, started):
    start, left = threading.Thread.start, iter(range(started))

    def may_start(thread):  # as Python 3.12 when the interpreter is ending
        if next(left, None) is None:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_start)
    workers = Workers("test-workers", 4, 4)
    futures = [workers.start(threading.get_ident) for _ in range(6)]
    idents = {future.result(10) for future in futures}
    assert (idents == {threading.get_ident()}) == (started == 0)
    assert len(idents) == 1
    assert workers.end(10)


def test_no_thread_is_started_while_they_end():
    for _ in range(100):  # the first call is over, and has waited, about when they end
        workers = Workers("test-workers", 1, 16)
        for _ in range(4):
            workers.start(lambda: time.sleep(0.006))
        assert workers.end(10)
        assert "test-workers" not in names()
