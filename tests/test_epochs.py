"""One writer at a time: a second job, a dead one, one that sleeps and wakes up."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support import REPOSITORY

import jaxshard
from jaxshard import ConflictError, Every, Keep, ResumeManager, _epochs, _steps
from jaxshard._errors import Kind
from jaxshard._identity import Identity, Life
from jaxshard._manifest import canonical
from jaxshard._store import LocalStore, open_store

HOST = socket.gethostname()
WRITER = """
import sys, time
import jaxshard
run = jaxshard.ResumeManager(sys.argv[1], lease_s=float(sys.argv[2]))
state, step = run.resume({"n": 0})
run.save(step + 1, {"n": step + 1}, wait=True)
print("writing", flush=True)
sys.stdin.readline()
if sys.argv[3] == "close":
    run.close()
"""


def state_of(step: int) -> dict[str, Any]:
    return {"n": step}


def epoch_files(root: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_bytes()) for file in sorted((root / "epochs").iterdir())]


def forge(root: Path, **changes: Any) -> Path:
    """Let the newest epoch have been begun by another process."""
    file = max((root / "epochs").iterdir())
    body = json.loads(file.read_bytes())
    body["ended"] = False
    body["lease_s"] = changes.pop("lease_s", 0.1)
    body["identity"].update(changes)
    file.write_text(json.dumps(body))
    return file


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts writers of a run; none of them outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(root: Path, lease_s: float = 60, end: str = "close") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), str(lease_s), end],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


# A second job -------------------------------------------------------------------------------


def test_a_second_job_is_refused_with_host_process_and_start_of_the_first(tmp_path, start):
    first = start(tmp_path / "run")
    began = time.monotonic()
    with pytest.raises(ConflictError) as caught:
        ResumeManager(tmp_path / "run")
    assert time.monotonic() - began < 5  # it is known to be alive: no need to wait
    assert re.fullmatch(
        re.escape(
            f"{tmp_path}/run: expected no other writer, found a job that is running: {HOST}, "
        )
        + rf"pid {first.pid}, since 20\d\d-\d\d-\d\dT[0-9:.]+\+00:00\n"
        r"hint: stop it first, give this job a run of its own, or pass takeover=True if it is gone",
        str(caught.value),
    )
    assert caught.value.kind is Kind.SECOND_WRITER
    assert len(epoch_files(tmp_path / "run")) == 1


def test_a_job_that_was_killed_is_taken_over_within_a_second(tmp_path, start):
    first = start(tmp_path / "run", lease_s=1000)
    first.kill()
    first.wait()
    began = time.monotonic()
    with ResumeManager(tmp_path / "run", lease_s=1000) as run:
        assert time.monotonic() - began < 1
        assert run.resume(state_of(0)) == (state_of(1), 1)
    assert [e["epoch"] for e in epoch_files(tmp_path / "run")] == [1, 2]


def test_a_job_that_was_killed_and_is_still_a_zombie_of_the_system_is_dead(tmp_path, start):
    first = start(tmp_path / "run", lease_s=1000)
    first.kill()
    time.sleep(0.3)  # nobody has waited for it
    began = time.monotonic()
    ResumeManager(tmp_path / "run", lease_s=1000).close()
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_job_that_has_ended_need_not_be_dead_to_be_followed(tmp_path, start, end):
    first = start(tmp_path / "run", end=end)
    first.communicate("end\n")
    assert epoch_files(tmp_path / "run")[-1]["ended"] is True
    forged = forge(tmp_path / "run", boot_id="another")  # so that only the file can tell
    forged.write_text(forged.read_text().replace('"ended": false', '"ended": true'))
    began = time.monotonic()
    ResumeManager(tmp_path / "run", lease_s=1000).close()
    assert time.monotonic() - began < 1


def test_a_pid_that_somebody_else_has_now_is_not_the_job(tmp_path):
    with ResumeManager(tmp_path / "run"):
        pass
    forge(tmp_path / "run", pid=os.getppid(), process_start=1)
    began = time.monotonic()
    ResumeManager(tmp_path / "run", lease_s=1000).close()
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}])
def test_a_job_elsewhere_that_gives_no_sign_of_life_is_taken_over_after_its_lease(
    tmp_path, change, caplog
):
    with ResumeManager(tmp_path / "run"):
        pass
    forge(tmp_path / "run", **change)
    began = time.monotonic()
    ResumeManager(tmp_path / "run", lease_s=0.5).close()
    assert 0.5 <= time.monotonic() - began < 3
    assert "waiting up to 0 s for a sign of life of the job before" in caplog.text


def test_the_lease_of_the_job_that_is_waited_for_counts(tmp_path):
    with ResumeManager(tmp_path / "run"):
        pass
    forge(tmp_path / "run", boot_id="another", lease_s=1.5)
    began = time.monotonic()
    ResumeManager(tmp_path / "run", lease_s=0.1).close()
    assert time.monotonic() - began >= 1.5


def test_what_the_job_before_commits_while_it_is_waited_for_counts(tmp_path):
    root = tmp_path / "run"
    with ResumeManager(root) as run:
        run.save(1, state_of(1), wait=True)
    forge(root, boot_id="another", lease_s=2)
    other = jaxshard.open(root)

    def commit() -> None:
        time.sleep(0.5)
        jaxshard.save(tmp_path / "late", state_of(2))
        manifest = tmp_path / "late/manifest.json"
        manifest.write_bytes(with_epoch(manifest.read_bytes(), 1))
        (tmp_path / "late").rename(root / "step_00000002")

    thread = threading.Thread(target=commit)
    thread.start()
    with ResumeManager(root, lease_s=0.1) as run:
        thread.join()
        assert run.resume(state_of(0)) == (state_of(2), 2)
    assert other.all_steps() == [1, 2]


def with_epoch(manifest: bytes, epoch: int) -> bytes:
    body = json.loads(manifest)
    del body["xxh3_128"]
    text = canonical({**body, "epoch": epoch})
    return text[:-1] + f',"xxh3_128":"{xxhash.xxh3_128_hexdigest(text)}"}}\n'.encode()


def test_a_run_that_was_deleted_and_begun_again_is_not_the_one_of_before(tmp_path):
    """Both are epoch 1."""
    root = tmp_path / "run"
    with ResumeManager(root, when=Every(steps=1)) as orphan:
        orphan.resume(state_of(0))
        shutil.rmtree(root)
        with pytest.raises(ConflictError, match=f"{root}: it was deleted"):
            orphan.save(1, state_of(1), wait=True)
        shutil.rmtree(root, ignore_errors=True)
        store = open_store(root)
        store.make_dirs(["epochs"])
        again = _epochs.Epoch(store, 1, [], 60)
        assert again.create()
        before = (root / "epochs/00000001.json").read_bytes()
        with pytest.raises(ConflictError, match="another job has taken over this run"):
            orphan.save(2, state_of(2), wait=True)
    assert (root / "epochs/00000001.json").read_bytes() == before  # its end was not written there
    again.end()


def test_a_job_elsewhere_that_beats_is_alive(tmp_path):
    with ResumeManager(tmp_path / "run"):
        pass
    file = forge(tmp_path / "run", boot_id="another", host="node7", lease_s=5)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.2):
            body = json.loads(file.read_bytes())
            file.with_suffix(".new").write_text(json.dumps({**body, "beat": body["beat"] + 1}))
            file.with_suffix(".new").replace(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConflictError, match="found a job that is running: node7, pid"):
            ResumeManager(tmp_path / "run", lease_s=5)
    finally:
        stop.set()
        thread.join()


def test_takeover_asks_nobody(tmp_path, start):
    first = start(tmp_path / "run")
    with ResumeManager(tmp_path / "run", takeover=True) as run:
        assert run.resume(state_of(0)) == (state_of(1), 1)
        run.save(2, state_of(2), wait=True)
    assert first.poll() is None


def test_slurm_ends_a_job_before_it_starts_it_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with ResumeManager(tmp_path / "run"):
        pass
    forge(tmp_path / "run", boot_id="another")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    began = time.monotonic()
    ResumeManager(tmp_path / "run", lease_s=1000).close()
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"identity": 3, "steps": 4}', '{"identity": {}}']
)
def test_an_epoch_that_cannot_be_read_is_an_error_and_no_step_is_forgotten(tmp_path, text):
    root = tmp_path / "run"
    for step in (1, 2):
        with ResumeManager(root) as run:
            run.save(step, state_of(step), wait=True)
    (root / "epochs/00000002.json").write_text(text)
    for look in (lambda: ResumeManager(root), lambda: jaxshard.open(root).latest_step()):
        with pytest.raises(
            jaxshard.CorruptionError, match="expected an epoch of the run"
        ) as caught:
            look()
        assert caught.value.kind is Kind.EPOCH_DAMAGED
        assert f"hint: if no job is running: without {root}/epochs all committed" in str(
            caught.value
        )
    shutil.rmtree(root / "epochs")
    with ResumeManager(root) as run:
        assert run.resume(state_of(0)) == (state_of(2), 2)


@pytest.mark.parametrize("name", ["5", "5.json", "00000005", "00000005.json.bak", "x.json"])
def test_files_that_are_no_epochs_are_left_alone(tmp_path, name):
    with ResumeManager(tmp_path / "run"):
        pass
    (tmp_path / "run/epochs" / name).write_text("{}")
    with ResumeManager(tmp_path / "run"):
        pass
    assert (tmp_path / "run/epochs/00000002.json").exists()


@pytest.mark.parametrize("wrong", [{"lease_s": 0}, {"lease_s": float("nan")}, {"grace_s": -1}])
def test_times_are_more_than_0(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"expected more than 0\nhint: lease_s=60"):
        ResumeManager(tmp_path / "run", **wrong)


def test_of_many_starts_at_once_one_goes_on(tmp_path):
    """In one process they all are the same job, so each is told that it is another one."""
    root = tmp_path / "run"
    code = (
        "import sys, jaxshard, time\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "try:\n"
        "    run = jaxshard.ResumeManager(sys.argv[1])\n"
        "except jaxshard.ConflictError as e:\n"
        "    print('refused', flush=True)\n"
        "else:\n"
        "    print('writing', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        for _ in range(4)
    ]  # fmt: skip
    try:
        for tell in ("ready\n", None):
            said = []
            for process in processes:
                assert process.stdout is not None
                said.append(process.stdout.readline())
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            if tell is not None:
                assert said == [tell] * 4
        assert sorted(said) == ["refused\n"] * 3 + ["writing\n"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# The same process ---------------------------------------------------------------------------


def test_a_cell_that_is_run_again_closes_the_manager_of_before(tmp_path, caplog):
    first = ResumeManager(tmp_path / "run")
    first.save(1, state_of(1))
    with ResumeManager(tmp_path / "run") as second:
        assert second.resume(state_of(0)) == (state_of(1), 1)
        with pytest.raises(ValueError, match="this ResumeManager is closed"):
            first.save(2, state_of(2))
    assert "the ResumeManager that was open in this process is closed" in caplog.text


def test_a_manager_that_was_dropped_ends_its_epoch(tmp_path, caplog):
    run = ResumeManager(tmp_path / "run")
    run.save(1, state_of(1), wait=True)
    del run
    assert epoch_files(tmp_path / "run")[-1]["ended"] is True
    assert not [t for t in threading.enumerate() if t.name == "jaxshard-beat"]
    with caplog.at_level(logging.WARNING), ResumeManager(tmp_path / "run") as run:
        run.resume(state_of(0))
    assert caplog.text == ""


def test_an_epoch_beats_and_tells_how_far_training_is(tmp_path):
    with ResumeManager(tmp_path / "run", lease_s=0.2, when=Every(steps=100)) as run:
        run.resume(state_of(0))
        for step in run.steps(1000):
            run.maybe_save(step, state_of(step))
            if step == 7:
                break
        deadline = time.monotonic() + 10
        while (body := epoch_files(tmp_path / "run")[0])["step"] != 7:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert body["beat"] >= 1
        assert body["identity"]["pid"] == os.getpid()
        assert body["ended"] is False
    assert epoch_files(tmp_path / "run")[0]["ended"] is True


# A writer that was taken over ---------------------------------------------------------------


def test_who_was_taken_over_commits_nothing_and_is_told_by_whom(tmp_path, start):
    with ResumeManager(tmp_path / "run", when=Every(steps=1)) as sleeper:
        sleeper.resume(state_of(0))
        sleeper.save(1, state_of(1), wait=True)
        number = sleeper._writer.epoch.number
        other = _epochs.Epoch(open_store(tmp_path / "run"), number + 1, ["step_00000001"], 60)
        assert other.create()
        sleeper.maybe_save(2, state_of(2))
        with pytest.raises(ConflictError, match="another job has taken over this run") as caught:
            sleeper.wait_until_finished()
        assert caught.value.kind is Kind.SECOND_WRITER
        assert f"{HOST}, pid {os.getpid()}, since " in str(caught.value)
        with pytest.raises(ConflictError, match="taken over"):
            sleeper.save(3, state_of(3), wait=True)
    assert [p.name for p in (tmp_path / "run").glob("step_*/manifest.json")] == ["manifest.json"]
    other.end()


def late_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a writer sleep between its last look and its commit, while another one takes over."""
    sleeper = ResumeManager(root, when=Every(steps=1))
    sleeper.resume(state_of(0))
    sleeper.save(1, state_of(1), wait=True)
    require_newest = _epochs.Epoch.require_newest

    def sleep(epoch: _epochs.Epoch) -> None:
        require_newest(epoch)
        if epoch is sleeper._writer.epoch:
            other = _epochs.Epoch(open_store(root), epoch.number + 1, ["step_00000001"], 60)
            assert other.create()
            other.end()

    with monkeypatch.context() as slow:
        slow.setattr(_epochs.Epoch, "require_newest", sleep)
        sleeper.save(2, state_of(-2), wait=True)
    sleeper.close()


def test_what_appears_from_an_earlier_epoch_afterwards_is_no_step(tmp_path, monkeypatch, caplog):
    root = tmp_path / "run"
    late_commit(root, monkeypatch)
    assert (root / "step_00000002/manifest.json").exists()
    assert jaxshard.open(root).all_steps() == [1]
    assert [d.name for d in _steps.committed(open_store(root))[1]] == ["step_00000002"]
    with ResumeManager(root, when=Every(steps=1), keep=Keep()) as run:
        assert run.resume(state_of(0)) == (state_of(1), 1)
        run.save(2, state_of(2), wait=True)
        assert run.all_steps() == [1, 2]
        assert run.load(2) == state_of(2)
    assert "step_00000002 committed by a job that had been taken over; ignored" in caplog.text
    assert jaxshard.open(root).load() == state_of(2)


def test_a_step_that_was_put_back_counts_once_the_epochs_are_gone(tmp_path, monkeypatch):
    root = tmp_path / "run"
    late_commit(root, monkeypatch)
    for file in (root / "epochs").iterdir():
        file.unlink()
    assert jaxshard.open(root).all_steps() == [1, 2]


def test_a_checkpoint_of_no_run_that_was_put_there_counts(tmp_path):
    with ResumeManager(tmp_path / "run") as run:
        run.save(1, state_of(1), wait=True)
    with ResumeManager(tmp_path / "run") as run:
        jaxshard.save(tmp_path / "one", state_of(5))
        (tmp_path / "one").rename(tmp_path / "run/step_00000005")
        assert run.all_steps() == [1, 5]


# Readers ------------------------------------------------------------------------------------


def test_a_reader_takes_no_epoch_and_reads_while_a_writer_writes_and_prunes(tmp_path):
    root = tmp_path / "run"
    like = {"n": np.zeros(1000, np.int64)}
    with ResumeManager(root, when=Every(steps=1), keep=Keep(last=1)) as run:
        run.resume(like)
        run.save(1, {"n": np.full(1000, 1)}, wait=True)
        reader = jaxshard.open(root)
        ended: list[str] = []
        told: list[str] = []
        newest: list[list[int]] = []

        def read() -> None:
            while not ended:
                newest.append(reader.load()["n"].tolist())
                try:
                    step = reader.all_steps()[0]
                    assert set(reader.load(step=step)["n"].tolist()) == {step}
                except (jaxshard.NotFoundError, jaxshard.CheckpointReplacedError) as e:
                    told.append(str(e))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for step in range(2, 40):
            run.save(step, {"n": np.full(1000, step)}, wait=True)
        ended.append("now")
        for thread in threads:
            thread.join()
    assert all(
        re.search(r"step \d+(, found: \d+| was deleted while it was read)\nhint: ", t) for t in told
    )
    assert all(len(set(n)) == 1 for n in newest)  # never of two steps
    assert len(epoch_files(root)) == 1
    assert reader.all_steps() == [39]


# Who am I -----------------------------------------------------------------------------------


def test_a_process_knows_itself_and_its_children():
    mine = Identity.of_this_process()
    assert mine.life() is Life.OWN
    assert Identity.from_json(json.loads(json.dumps(mine._asdict()))) == mine
    child = subprocess.Popen(["sleep", "60"])
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    theirs = mine._replace(pid=child.pid, process_start=int(stat[19]))
    assert theirs.life() is Life.ALIVE
    child.send_signal(signal.SIGSTOP)
    assert theirs.life() is Life.ALIVE
    child.kill()
    child.wait()
    assert theirs.life() is Life.DEAD


@pytest.mark.parametrize(
    "wrong", [None, 3, [], {}, {"host": "a"}, {**Identity.of_this_process()._asdict(), "pid": "1"}]
)
def test_what_is_no_identity_is_none(wrong):
    assert Identity.from_json(wrong) is None


def test_a_process_that_proc_hides_is_not_taken_for_dead(monkeypatch):
    mine = Identity.of_this_process()
    monkeypatch.setattr("jaxshard._identity._stat", lambda _: (None, None))
    assert mine._replace(pid=1).life() is Life.UNKNOWN
    assert mine._replace(pid=2**22 + 1).life() is Life.DEAD


def test_without_proc_nothing_is_known_of_others(monkeypatch, tmp_path):
    mine = Identity.of_this_process()
    monkeypatch.setattr("jaxshard._identity._PROC", tmp_path)
    assert mine._replace(pid=1).life() is Life.UNKNOWN
    assert Identity.of_this_process().life() is Life.OWN


def test_a_child_that_was_forked_does_not_end_the_epoch_of_its_parent(tmp_path):
    code = (
        "import os, sys, jaxshard\n"
        "run = jaxshard.ResumeManager(sys.argv[1])\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    run._release()\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(open(sys.argv[1] + '/epochs/00000001.json').read())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert json.loads(done.stdout)["ended"] is False
    assert epoch_files(tmp_path / "run")[0]["ended"] is True


def test_a_reader_follows_a_run(tmp_path):
    root = tmp_path / "run"
    run = ResumeManager(root, keep=Keep(last=1))
    run.save(1, state_of(1), wait=True)
    seen = []
    for step in jaxshard.open(root).follow(timeout_s=0.3, poll_s=0.01):
        seen.append((step, jaxshard.open(root).load()["n"]))
        if step < 5:
            run.save(step + 1, state_of(step + 1), wait=True)
        if step == 5:
            run.protect(5)
    assert seen == [(n, n) for n in range(1, 6)]
    run.close()


def test_following_ends_where_nothing_comes(tmp_path):
    ResumeManager(tmp_path / "run").close()
    began = time.monotonic()
    assert list(jaxshard.open(tmp_path / "run").follow(timeout_s=0.2, poll_s=60)) == []
    assert 0.2 <= time.monotonic() - began < 5


def test_a_reader_that_follows_sees_a_rollback(tmp_path):
    with ResumeManager(tmp_path / "run", keep=Keep()) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step), wait=True)
        steps = jaxshard.open(tmp_path / "run").follow(timeout_s=5, poll_s=0.01)
        assert next(steps) == 3
        run.rollback(2, "a spike")
        assert next(steps) == 2
        run.resume(state_of(0))
        run.save(3, state_of(-3), wait=True)
        assert next(steps) == 3


def test_the_epoch_of_a_large_manifest_is_read_from_its_beginning(tmp_path, monkeypatch):
    """A run of a thousand steps is listed without reading all that their manifests say."""
    tree = {f"leaf{i}": np.zeros(1) for i in range(500)}
    with ResumeManager(tmp_path, keep=jaxshard.Keep()) as run:
        for step in (1, 2):
            run.save(step, tree, wait=True)
    store = open_store(tmp_path)
    whole = []
    read = LocalStore.read
    monkeypatch.setattr(LocalStore, "read", lambda *args: whole.append(args) or read(*args))
    assert [_epochs.epoch_of(store, f"step_0000000{n}") for n in (1, 2)] == [1, 1]
    assert whole == []
    jaxshard.save(tmp_path / "step_00000003", tree, metadata={"epoch": 7})
    assert _epochs.epoch_of(store, "step_00000003") is None
    assert _epochs.epoch_of(store, "step_00000004") is None
    manifest = tmp_path / "step_00000002/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b',"epoch":1,', b',"epoch":"1",'))
    assert _epochs.epoch_of(store, "step_00000002") is None
