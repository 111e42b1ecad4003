"""Deletion behind saves: in nobody's way, at most one behind, and done when somebody waits."""

import signal
import threading
import time

import numpy as np
import pytest

import jaxshard
from jaxshard import Every, Keep, ResumeManager, _commit


@pytest.fixture
def gate(monkeypatch):
    """Deletions wait until it is opened."""
    opened, begun = threading.Event(), threading.Event()
    delete = _commit.delete

    def slow(store):
        begun.set()
        assert opened.wait(30)
        delete(store)

    monkeypatch.setattr(_commit, "delete", slow)
    opened.begun = begun
    return opened


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(step: int) -> dict:
    return {"w": np.full(10, step)}


def test_a_save_waits_for_no_deletion(tmp_path, gate, caplog):
    with ResumeManager(tmp_path, when=Every(steps=1), keep=Keep(last=1)) as run:
        run.resume(state(0))
        steps = iter(run.steps(9))
        for step in (1, 2):
            next(steps)
            pending = run.maybe_save(step, state(step))
            until(pending.done)
        assert gate.begun.wait(30)  # step 1 is being deleted
        next(steps)
        third = run.maybe_save(3, state(3))
        assert third is not None  # not skipped
        report = third.wait(30)  # committed, whatever is still being deleted
        assert report.step == 3
        assert run.latest_step() == 3
        assert run.all_steps() == [1, 2, 3]
        assert "is not saved" not in caplog.text
        gate.set()
    assert jaxshard.open(tmp_path).all_steps() == [3]


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
def test_never_more_than_two_steps_beyond_what_is_kept(tmp_path, gate, caplog, when_busy):
    """One is being deleted, one was saved meanwhile; the save after that waits, or is skipped."""
    options = {"when": Every(steps=1), "keep": Keep(last=1), "when_busy": when_busy}
    with ResumeManager(tmp_path, **options) as run:
        run.resume(state(0))
        for step in (1, 2, 3):
            until(run.maybe_save(step, state(step)).done)
        fourth = threading.Thread(target=lambda: run.maybe_save(4, state(4)))
        fourth.start()
        time.sleep(0.3)
        assert run.all_steps() == [1, 2, 3]
        assert fourth.is_alive() == (when_busy == "wait")
        gate.set()
        fourth.join()
        run.wait_until_finished()
        assert run.all_steps() == [4 if when_busy == "wait" else 3]
    said = "step 4 is not saved: old steps are still being deleted" in caplog.text
    assert said == (when_busy == "skip")


@pytest.mark.parametrize("how", ["wait=True", "wait_until_finished", "rollback", "close"])
def test_whoever_waits_finds_it_done(tmp_path, monkeypatch, how):
    delete = _commit.delete
    monkeypatch.setattr(_commit, "delete", lambda store: (time.sleep(0.2), delete(store)))
    with ResumeManager(tmp_path, keep=Keep(last=1)) as run:
        run.resume(state(0))
        run.save(1, state(1))
        run.save(2, state(2), wait=how == "wait=True")
        if how == "wait_until_finished":
            run.wait_until_finished()
        elif how == "rollback":
            run.rollback(2, "why not")
        elif how == "close":
            run.close()
        assert not (tmp_path / "step_00000001").exists()
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxshard-tidy")]


def test_what_failed_is_tried_again_and_told(tmp_path, monkeypatch, caplog):
    delete = _commit.delete
    with ResumeManager(tmp_path, keep=Keep(last=1)) as run:
        run.resume(state(0))
        run.save(1, state(1), wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(_commit, "delete", _fail)
            run.save(2, state(2), wait=True)
        assert f"deleting old steps of {tmp_path} failed, will be tried again" in caplog.text
        assert run.all_steps() == [1, 2]
        assert _commit.delete is delete
        run.save(3, state(3), wait=True)
        assert run.all_steps() == [3]


def _fail(store: object) -> None:
    raise OSError(5, "Input/output error")


def test_an_error_that_nobody_expects_keeps_nobody_waiting(tmp_path, monkeypatch, caplog):
    def broken(store):
        raise ZeroDivisionError

    monkeypatch.setattr(_commit, "delete", broken)
    with ResumeManager(tmp_path, keep=Keep(last=1)) as run:
        run.resume(state(0))
        for step in (1, 2, 3):
            run.save(step, state(step), wait=True)
    assert "ZeroDivisionError" in caplog.text
    assert jaxshard.open(tmp_path).all_steps() == [1, 2, 3]


def test_a_job_that_was_asked_to_stop_deletes_no_more_than_it_has_begun(tmp_path, gate, caplog):
    """With a thousand old steps behind it, the last save and the end wait for one of them."""
    caplog.set_level("WARNING")
    with ResumeManager(tmp_path, keep=Keep()) as run:
        run.resume(state(0))
        for step in range(1, 9):
            run.save(step, state(step), wait=True)
    threading.Timer(1.0, gate.set).start()
    with ResumeManager(tmp_path, when=Every(steps=1), keep=Keep(last=1)) as run:
        run.resume(state(0))
        steps = run.steps(20)
        for step in steps:
            run.maybe_save(step, state(step))
            if step == 9:
                assert gate.begun.wait(30)
                signal.raise_signal(signal.SIGTERM)
        assert run.exit_code == 75
    left = jaxshard.open(tmp_path).all_steps()
    assert left == [*range(2, 9), 9, 10]


def test_ctrl_c_in_a_save_that_is_waited_for_forgets_nothing(tmp_path, monkeypatch):
    opened = threading.Event()
    commit = _commit.commit

    def slow(*args, **kwargs):
        assert opened.wait(30)
        return commit(*args, **kwargs)

    monkeypatch.setattr(_commit, "commit", slow)
    with ResumeManager(tmp_path, keep=Keep(last=1)) as run:
        run.resume(state(0))
        main = threading.get_ident()
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run.save(1, state(1), wait=True)
        assert run._saves.running is not None
        with pytest.raises(jaxshard.ConflictError, match="expected a step larger than 1"):
            run.save(1, state(1))
        opened.set()
    assert jaxshard.open(tmp_path).all_steps() == [1]


def test_a_hook_may_wait_on_any_thread(tmp_path):
    """Also on the one that deletes: it does not wait for itself."""
    seen = []

    def hook(event):
        if event["event"] == "prune":
            run.wait_until_finished()
            seen.append(event["names"])

    with ResumeManager(tmp_path, keep=Keep(last=1), on_event=hook) as run:
        run.resume(state(0))
        for step in (1, 2):
            run.save(step, state(step), wait=True)
    assert seen == [["step_00000001"]]


def test_a_skip_is_told_once_for_what_it_waits_for(tmp_path, gate, caplog):
    with ResumeManager(tmp_path, when=Every(steps=1), keep=Keep(last=1)) as run:
        run.resume(state(0))
        for step in (1, 2, 3):
            until(run.maybe_save(step, state(step)).done)
        for step in (4, 5, 6):
            assert run.maybe_save(step, state(step)) is None
        gate.set()
    assert caplog.text.count("is not saved: old steps are still being deleted") == 1
