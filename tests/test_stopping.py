"""Asked to stop: signals, deadlines, a save that must be quick; in real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY

import jaxshard
from jaxshard import Every, ResumeManager, _ledger, _stopping
from jaxshard._store import open_store

# Trains until it is asked to stop; says each step.
TRAIN = """
import signal, sys, time
import jaxshard
if "before" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("handler of before", flush=True))
with jaxshard.ResumeManager(sys.argv[1], when=jaxshard.Every(steps=1000)) as run:
    state, begin = run.resume({"n": 0})
    print("resumed", begin, flush=True)
    for step in run.steps(int(sys.argv[2])):
        time.sleep(0.02)
        state = {"n": step}
        run.maybe_save(step, state)
        print("step", step, flush=True)
print("stopped" if run.should_stop else "done", flush=True)
sys.exit(run.exit_code)
"""


class Job:
    def __init__(self, root: Path, total: int, *words: str, **env: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(root), str(total), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        )  # fmt: skip

    def wait_for(self, line: str) -> None:
        assert self.popen.stdout is not None
        for said in self.popen.stdout:
            if said.strip() == line:
                return
        raise AssertionError(self.popen.communicate()[1])

    def end(self) -> tuple[int, list[str]]:
        out, _ = self.popen.communicate(timeout=60)
        return self.popen.returncode, out.splitlines()


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def begin(*arguments: Any, **env: str) -> Job:
        started.append(Job(*arguments, **env))
        return started[-1]

    yield begin
    for job in started:
        job.popen.kill()
        job.popen.communicate()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_saves_the_step_that_goes_on_and_the_next_start_goes_on_from_it(
    tmp_path, start, name
):
    job = start(tmp_path / "run", 10**6)
    job.wait_for("step 3")
    job.popen.send_signal(signal.Signals[name])
    code, said = job.end()
    assert code == 75
    assert said[-1] == "stopped"
    newest = int(said[-2].split()[1])
    assert jaxshard.open(tmp_path / "run").load() == {"n": newest}
    again = start(tmp_path / "run", newest + 2)
    code, said = again.end()
    assert (code, said[0], said[-1]) == (0, f"resumed {newest}", "done")
    stops = [e for e in _ledger.read(open_store(tmp_path / "run")) if e["event"] == "stop"]
    assert [(e["step"], e["reason"]) for e in stops] == [(newest, name)]


def test_a_second_signal_does_not_break_it_and_the_handler_of_before_is_called(tmp_path, start):
    job = start(tmp_path / "run", 10**6, "before")
    job.wait_for("step 2")
    for _ in range(5):
        job.popen.send_signal(signal.SIGTERM)
    code, said = job.end()
    assert code == 75
    assert "handler of before" in said
    newest = max(int(line.split()[1]) for line in said if line.startswith("step "))
    assert jaxshard.open(tmp_path / "run").all_steps() == [newest]


def test_slurm_says_when_a_job_ends(tmp_path, start):
    job = start(tmp_path / "run", 10**6, SLURM_JOB_END_TIME=str(int(time.time()) + 12))
    code, said = job.end()
    assert (code, said[-1]) == (75, "stopped")
    assert time.time() < time.time() + 12


# In this process ----------------------------------------------------------------------------


def steps_of(
    run: ResumeManager, total: int, at: int | None = None, name: str = "SIGUSR1"
) -> list[int]:
    """Train; ask to stop in the middle of step `at`."""
    seen = []
    for step in run.steps(total):
        if step == at:
            signal.raise_signal(signal.Signals[name])
        run.maybe_save(step, {"n": step})
        seen.append(step)
    return seen


def test_the_loop_ends_once_the_step_is_saved(tmp_path, caplog):
    with ResumeManager(tmp_path / "run", when=Every(steps=100)) as run:
        run.resume({"n": 0})
        assert not run.should_stop
        assert run.exit_code == 0
        assert steps_of(run, 1000, at=7) == list(range(1, 8))
        assert run.should_stop
        assert run.exit_code == 75
        assert run.all_steps() == [7]
    assert "asked to stop by SIGUSR1: saving step 7 and ending" in caplog.text


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    with ResumeManager(tmp_path / "run", when=Every(steps=100)) as run:
        run.resume({"n": 0})
        assert steps_of(run, 5, at=5) == [1, 2, 3, 4, 5]
        assert (run.should_stop, run.exit_code) == (False, 0)
        assert run.all_steps() == [5]


def test_only_the_signals_that_were_asked_for(tmp_path):
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    try:
        with ResumeManager(tmp_path / "run", signals=("SIGUSR1",)) as run:
            run.resume({"n": 0})
            assert steps_of(run, 3, at=2, name="SIGUSR2") == [1, 2, 3]
        assert seen == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_handlers_are_given_back(tmp_path):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    run = ResumeManager(tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) != before[0]
    run.close()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)] == before
    run = ResumeManager(tmp_path / "run")
    del run
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)] == before
    run = ResumeManager(tmp_path / "run")
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # somebody else came later
    run.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert mine is not None
    signal.signal(signal.SIGTERM, before[0])


def test_a_run_that_cannot_begin_leaves_handlers_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    jaxshard.save(tmp_path / "ckpt", {"n": 1})
    with pytest.raises(jaxshard.ConflictError):
        ResumeManager(tmp_path / "ckpt")
    assert signal.getsignal(signal.SIGTERM) == before


def test_off_the_main_thread_it_works_without_signals(tmp_path, caplog):
    caplog.set_level("INFO", "jaxshard")
    before = signal.getsignal(signal.SIGTERM)
    seen: list[list[int]] = []

    def work() -> None:
        with ResumeManager(tmp_path / "run", when=Every(steps=2)) as run:
            run.resume({"n": 0})
            seen.append(steps_of(run, 4))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[1, 2, 3, 4]]
    assert "not the main thread: signals do not stop this run" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before


def test_poll_is_for_loops_that_save_nothing(tmp_path):
    with ResumeManager(tmp_path / "run", when=Every(steps=100)) as run:
        run.resume({"n": 0})
        assert not run.poll()
        signal.raise_signal(signal.SIGUSR1)
        assert run.poll()
        assert not run.should_stop  # nothing was saved yet
        run.maybe_save(1, {"n": 1})
        assert run.should_stop
        assert run.latest_step() == 1


# Deadlines ----------------------------------------------------------------------------------


def test_a_deadline_leaves_time_for_a_step_and_a_save(tmp_path, caplog):
    began = time.monotonic()
    with ResumeManager(tmp_path / "run", when=Every(steps=10), deadline_s=4) as run:
        run.resume({"n": 0})
        run.save(1, {"n": 1}, wait=True)  # so that it is known what a save takes
        step = 1
        while not run.should_stop:
            step += 1
            time.sleep(0.05)
            run.maybe_save(step, {"n": step})
        assert 1.5 < time.monotonic() - began < 4
        assert run.latest_step() == step
        assert run.exit_code == 75
    assert "asked to stop by the deadline in" in caplog.text


@pytest.mark.parametrize("wrong", [0, -1, float("nan")])
def test_a_deadline_is_in_the_future(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"deadline_s: expected seconds from now, more than 0"):
        ResumeManager(tmp_path / "run", deadline_s=wrong)


def test_signals_have_names(tmp_path):
    with pytest.raises(
        ValueError, match="signals: expected names of signals, found 'TERM'\nhint: "
    ):
        ResumeManager(tmp_path / "run", signals=("TERM",))


def test_slurms_end_of_the_job_counts_unless_another_deadline_is_given(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    assert _stopping._deadline(None) == pytest.approx(time.monotonic() + 100, abs=2)
    assert _stopping._deadline(5) == pytest.approx(time.monotonic() + 5, abs=1)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    assert _stopping._deadline(None) is None


# Grace --------------------------------------------------------------------------------------


def test_a_save_that_takes_longer_than_the_grace_gives_up_cleanly(tmp_path, caplog, monkeypatch):
    from jaxshard import _durable

    sync_file, slow = _durable.sync_file, threading.Event()

    def sync(fd: int) -> None:
        if slow.is_set():
            time.sleep(0.5)
        sync_file(fd)

    root = tmp_path / "run"
    with ResumeManager(root, when=Every(steps=100), grace_s=0.2) as run:
        run.resume({"n": 0})
        run.save(1, {"n": 1}, wait=True)
        monkeypatch.setattr(_durable, "sync_file", sync)
        slow.set()
        signal.raise_signal(signal.SIGUSR1)
        began = time.monotonic()
        assert run.maybe_save(2, {"n": list(range(50)), "text": "x" * 10_000}) is None
        assert time.monotonic() - began < 8
        slow.clear()
        assert (run.should_stop, run.exit_code) == (True, 75)
        assert run.all_steps() == [1]
    assert "step 2 could not be saved before the end" in caplog.text
    assert not list(root.glob("step_00000002/a-*"))


# Handlers that outlive their run ---------------------------------------------------------------


def test_managers_that_close_out_of_order_leave_sigterm_as_it_was(tmp_path):
    code = """
import os, signal, sys, jaxshard
first = jaxshard.ResumeManager(sys.argv[1] + "/a")
second = jaxshard.ResumeManager(sys.argv[1] + "/b")
first.close()
second.close()
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_a_child_that_was_forked_can_be_terminated(tmp_path):
    code = """
import os, signal, sys, time, jaxshard
run = jaxshard.ResumeManager(sys.argv[1])
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
time.sleep(0.2)
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
run.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True, text=True, check=True, timeout=30,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.stdout == f"{-signal.SIGTERM}\n"


def test_who_leaves_by_poll_still_tells_that_there_is_more_to_do(tmp_path):
    with ResumeManager(tmp_path / "run", when=Every(steps=100)) as run:
        run.resume({"n": 0})
        assert steps_of(run, 3) == [1, 2, 3]
        signal.raise_signal(signal.SIGUSR1)
        assert run.exit_code == 0  # all is done
    with ResumeManager(tmp_path / "run", when=Every(steps=100)) as run:
        run.resume({"n": 0})
        next(run.steps(10))
        signal.raise_signal(signal.SIGUSR1)
        assert run.poll()
        assert run.exit_code == 75


def test_a_failed_save_before_is_no_reason_not_to_save_at_the_end(tmp_path, monkeypatch, caplog):
    from jaxshard import _commit

    commit = _commit.commit

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, "Input/output error")

    with ResumeManager(tmp_path / "run", when=Every(steps=1)) as run:
        run.resume({"n": 0})
        monkeypatch.setattr(_commit, "commit", fail)
        for step in (1, 2, 3):
            run._saves.running or run.maybe_save(step, {"n": step})
            if step < 3:
                run._saves.end()
        run._saves.running._thread.join()  # type: ignore[union-attr]
        monkeypatch.setattr(_commit, "commit", commit)
        signal.raise_signal(signal.SIGUSR1)
        run._saves.collect = lambda: None  # type: ignore[method-assign]  # it comes just now
        assert run.maybe_save(4, {"n": 4}) is not None
        assert run.all_steps() == [4]
    assert "step 3 was not saved" in caplog.text
