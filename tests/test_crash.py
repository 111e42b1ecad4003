"""Killed, stopped, interrupted and failing at any moment: real signals, real processes."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import REPOSITORY, assert_same_tree, mesh, on

import jaxshard
from jaxshard import (
    Every,
    JaxshardError,
    Keep,
    NotCommittedError,
    NotFoundError,
    ResumeManager,
    SaveOptions,
)

OPTIONS = SaveOptions(pack_below=2000, piece_bytes_max=40_000)
SEED = 20261129
HOST = socket.gethostname()


class Moments(NamedTuple):
    """A container of a training state."""

    count: Any
    mu: Any


def state_of(step: int) -> dict[str, Any]:
    """A state with every kind of leaf, a pure function of the step; nothing is compiled."""
    grid = mesh((2, 2))
    numbers = np.random.default_rng(step).standard_normal((64, 512), np.float32)
    words = np.arange(12, dtype=np.uint32).reshape(3, 4) + np.uint32(step)
    w = jax.device_put(numbers, on(grid, "a", "b"))  # 8 files
    return {
        "params": {"w": w, "tied": w, "b": jax.device_put(np.full(7, step, jnp.bfloat16))},
        "opt": Moments(jax.device_put(np.int32(step)), jax.device_put(numbers[0], on(grid))),
        "keys": {
            "key": jax.random.wrap_key_data(words[0, :2], impl="threefry2x32"),
            "rbg": jax.random.wrap_key_data(words, impl="rbg"),
        },
        "numpy": [np.arange(2000) * step, np.float32(step + 0.5), np.zeros((0, 3))],
        "nibbles": jax.device_put(((np.arange(15) + step) % 16 - 8).astype(jnp.int4)),
        "python": [step, step / 3, float("nan"), -0.0, str(step), None, step % 2 == 0],
        "long": f"{step:08d}" * 1000,
    }


# What the processes do; started by `python -c "import test_crash; test_crash.child()"` -----------


def child() -> None:
    """Import everything, then wait to be told, so that kills find work and not imports."""
    work, root = globals()[sys.argv[1]], Path(sys.argv[2])
    state_of(0)
    print("ready", flush=True)
    sys.stdin.readline()
    work(root, *map(int, sys.argv[3:]))


def train(root: Path, steps: int, takeover: int = 0) -> None:
    """Resume, check what was resumed, and save every step."""
    with ResumeManager(
        root,
        when=Every(steps=1),
        keep=Keep(last=2),
        when_busy="wait",
        takeover=bool(takeover),
        options=OPTIONS,
    ) as run:
        state, begin = run.resume(state_of(0))
        assert_same_tree(state, state_of(begin))
        print("resumed", begin, flush=True)
        for step in run.steps(begin + steps):
            run.maybe_save(step, state_of(step))
    print("finished", begin + steps, flush=True)


def overwrite(path: Path, first: int) -> None:
    """Write one checkpoint again and again."""
    for value in range(first, first + 10**6):
        jaxshard.save(path, state_of(value), overwrite=True, options=OPTIONS)


def save_often(root: Path, rounds: int) -> None:
    """Save new checkpoints and over an old one while calls fail; say how each ended."""
    ended: dict[str, str] = {}
    done = 0
    while done < rounds:
        try:
            for value in range(done, rounds):
                done = value
                ended[f"new{value}"] = how_it_ends(root / f"new{value}", value, overwrite=False)
                ended[f"over{value}"] = how_it_ends(root / "over", value, overwrite=True)
                done = value + 1
        except KeyboardInterrupt:  # between two saves
            done += 1
    print(json.dumps(ended), flush=True)


def how_it_ends(path: Path, value: int, *, overwrite: bool) -> str:
    """`saved`, or what is at the path after an error: `nothing`, `old`, `new` or `broken: …`."""
    try:
        jaxshard.save(path, small_tree(value), overwrite=overwrite, options=OPTIONS)
    except (JaxshardError, KeyboardInterrupt) as e:
        error = f"{type(e).__name__}: "
    else:
        error = ""
    try:
        got = jaxshard.load(path)
        report = jaxshard.verify(path)
    except (NotFoundError, NotCommittedError):
        return error + "nothing"
    except JaxshardError as e:
        return f"{error}broken: {e}"
    assert_same_tree(got, small_tree(got["n"]))
    if not report.ok:
        return f"{error}broken: {report}"
    return error + ("saved" if got["n"] == value else "old")


def small_tree(value: int) -> dict[str, Any]:
    return {"w": np.full(1000, value), "b": np.full(3, value, np.int8), "n": value}


# Processes ----------------------------------------------------------------------------------


class Process:
    """A process that has imported everything and waits for `go`."""

    def __init__(self, log: Path, *arguments: Any, prefix: tuple[Any, ...] = ()) -> None:
        self._errors = log.open("w+")
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-c", "import test_crash; test_crash.child()",
             *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
        )  # fmt: skip

    def go(self) -> None:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "ready\n", self.errors()
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def kill(self) -> list[str]:
        """SIGKILL; what it had said."""
        self.popen.kill()
        return self.end(-signal.SIGKILL)

    def end(self, *expected: int) -> list[str]:
        out, _ = self.popen.communicate(timeout=120)
        assert self.popen.returncode in expected, (self.popen.returncode, out, self.errors())
        self._errors.close()
        return out.splitlines()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()
        self._errors.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts processes; none of them outlives the test."""
    started: list[Process] = []

    def begin(*arguments: Any, prefix: tuple[Any, ...] = ()) -> Process:
        started.append(Process(tmp_path / f"log{len(started)}", *arguments, prefix=prefix))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def committed(root: Path) -> list[Path]:
    return sorted(file.parent for file in root.glob("step_*/manifest.json"))


def assert_sound(root: Path) -> int:
    """Every committed step is whole and exact; the newest one, 0 if there is none."""
    for path in committed(root):
        report = jaxshard.verify(path)
        assert report.ok, report
        step = jaxshard.open(path).step
        assert path.name.startswith(f"step_{step:08d}")
        assert_same_tree(jaxshard.load(path, state_of(0)), state_of(step))
    if not (root / "run.json").exists():
        return 0
    return jaxshard.open(root).latest_step() or 0


def is_half_written(root: Path) -> bool:
    """Whether a save was under way: an attempt that no manifest names, or a temporary manifest."""
    attempts = len(list(root.glob("step_*/a-*")))
    return attempts > len(committed(root)) or bool(list(root.glob("step_*/.tmp-*")))


def kill_often(root: Path, start: Callable[..., Process], kills: int, seed: int) -> None:
    delays = random.Random(seed)
    waiting = start("train", root, 10**6)
    newest = halves = 0
    for number in range(kills):
        process = waiting
        process.go()
        if number + 1 < kills:
            waiting = start("train", root, 10**6)  # imports while the other one works
        time.sleep(delays.uniform(0.0, 0.5))
        said = process.kill()
        halves += is_half_written(root)
        found = assert_sound(root)
        assert found >= newest, f"kill {number}: step {newest} was there before"
        if said:
            assert said == [f"resumed {newest}"]
        newest = found
    assert newest > kills // 3  # there was progress
    assert halves > kills // 5  # and kills did fall into saves
    last = start("train", root, 3)
    last.go()
    assert last.end(0) == [f"resumed {newest}", f"finished {newest + 3}"]
    assert assert_sound(root) == newest + 3
    assert jaxshard.open(root).all_steps() == [newest + 2, newest + 3]
    assert sorted(p.name for p in root.iterdir() if not p.name.startswith(".tmp-")) == [
        "epochs", "events", "run.json", f"step_{newest + 2:08d}", f"step_{newest + 3:08d}"
    ]  # fmt: skip
    assert not jaxshard.verify(root / f"step_{newest + 3:08d}").leftovers


# SIGKILL ------------------------------------------------------------------------------------


def test_a_run_that_is_killed_at_any_moment_is_whole_and_resumes(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    kill_often(tmp_path / "run", start, 15, SEED)


@pytest.mark.soak
def test_a_run_that_is_killed_two_hundred_times_is_whole_and_resumes(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    kill_often(tmp_path / "run", start, 200, SEED + 1)


def overwrite_and_kill(path: Path, start: Callable[..., Process], kills: int) -> None:
    delays = random.Random(SEED)
    jaxshard.save(path, state_of(0), options=OPTIONS)
    newest = 0
    waiting = start("overwrite", path, 1)
    for number in range(kills):
        process = waiting
        process.go()
        if number + 1 < kills:
            waiting = start("overwrite", path, 1000 * (number + 1))
        time.sleep(delays.uniform(0.05, 0.4))
        process.kill()
        value = jaxshard.load(path)["python"][0]
        assert_same_tree(jaxshard.load(path, state_of(0)), state_of(value))
        assert jaxshard.verify(path).ok
        newest = max(newest, value)
    assert newest > 0


def test_an_overwrite_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    overwrite_and_kill(tmp_path / "c", start, 4)


@pytest.mark.soak
def test_an_overwrite_that_is_killed_a_hundred_times_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    overwrite_and_kill(tmp_path / "c", start, 100)


def injecting(
    need_tool: Callable[[str], str], log: Path, calls: str, fault: str, *paths: Path
) -> tuple[Any, ...]:
    """The start of a command line whose system calls (on these paths) fail or bring a signal."""
    strace = need_tool("strace")
    only = [part for path in paths for part in ("-P", path)]
    traced = ("-e", f"trace={calls}", "-e", f"inject={calls}:{fault}")
    # Faster, but signals do not always come through it (strace 6).
    faster = ("--seccomp-bpf",) if fault.startswith("error=") else ()
    return (strace, "-f", *faster, "-o", log, *only, *traced)


# A step is committed by `link`; then an old step goes, its manifest first.
MOMENTS = [
    ("link", "step_00000003/manifest.json"),
    ("unlink", "step_00000001/manifest.json"),
]
MORE_MOMENTS = [
    ("rmdir", "step_00000001"),
    ("link", "run.json"),
    ("mkdir", "step_00000003"),
    ("unlinkat", "step_00000001"),
    ("fsync", "."),
    ("fsync:1", "step_00000003"),  # after the directory of the attempt was made in it
    ("fsync:2", "step_00000003"),  # after the manifest got its name
    ("fsync:1", "step_00000001"),  # after it was made
]


def kill_at(
    call: str, below: str, root: Path, start: Callable[..., Process], need_tool: Any
) -> None:
    name, _, when = call.partition(":")
    fault = f"signal=SIGKILL:when={when or 1}"
    prefix = injecting(need_tool, root.with_name("strace"), name, fault, root / below)
    process, again = start("train", root, 8, prefix=prefix), start("train", root, 3)
    process.go()
    said = process.end(-signal.SIGKILL, 128 + signal.SIGKILL)
    assert "finished" not in str(said)
    newest = assert_sound(root)
    again.go()
    assert again.end(0) == [f"resumed {newest}", f"finished {newest + 3}"]
    assert assert_sound(root) == newest + 3
    assert jaxshard.open(root).all_steps() == [newest + 2, newest + 3]


@pytest.mark.parametrize(("call", "below"), MOMENTS)
def test_a_kill_at_a_chosen_call_of_commit_or_deletion_is_harmless(
    tmp_path: Path, start: Callable[..., Process], need_tool: Any, call: str, below: str
) -> None:
    kill_at(call, below, tmp_path / "run", start, need_tool)


@pytest.mark.soak
@pytest.mark.parametrize(("call", "below"), MORE_MOMENTS)
def test_a_kill_at_any_call_of_commit_or_deletion_is_harmless(
    tmp_path: Path, start: Callable[..., Process], need_tool: Any, call: str, below: str
) -> None:
    kill_at(call, below, tmp_path / "run", start, need_tool)


# Errors and Ctrl-C at any moment ------------------------------------------------------------

CHANGING = "fsync,link,rename,unlink,mkdir"


def ends_under(
    fault: str, rounds: int, tmp_path: Path, start: Callable[..., Process], need_tool: Any
) -> dict[str, str]:
    root = tmp_path / "many"
    prefix = injecting(need_tool, tmp_path / "strace", CHANGING, fault)
    process = start("save_often", root, rounds, prefix=prefix)
    process.go()
    (line,) = process.end(0)
    ended: dict[str, str] = json.loads(line)
    assert len(ended) > rounds
    return ended


# A step that shares no factor with the number of calls of a save meets each of them in turn.
@pytest.mark.parametrize("call", ["EIO:when=5+53", "ENOSPC:when=3+47"])
def test_a_call_that_fails_in_a_save_leaves_nothing_or_a_whole_checkpoint(
    tmp_path: Path, start: Callable[..., Process], need_tool: Any, call: str
) -> None:
    ended = ends_under(f"error={call}", 25, tmp_path, start, need_tool)
    assert not {path: how for path, how in ended.items() if "broken" in how}
    kinds = set(ended.values())
    assert {"StorageError: nothing", "StorageError: old"} <= kinds


def test_ctrl_c_in_a_save_leaves_nothing_or_a_whole_checkpoint(
    tmp_path: Path, start: Callable[..., Process], need_tool: Any
) -> None:
    ended = ends_under("signal=SIGINT:when=5+53", 30, tmp_path, start, need_tool)
    assert not {path: how for path, how in ended.items() if "broken" in how}
    kinds = set(ended.values())
    assert "saved" in kinds, kinds
    assert {"KeyboardInterrupt: nothing", "KeyboardInterrupt: old"} & kinds, kinds


# SIGSTOP ------------------------------------------------------------------------------------


def stop_in_mid_save(process: Process, root: Path) -> Path:
    """Stop a process while an attempt is there and its manifest is not."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        begun = [p for p in root.glob("step_*") if not (p / "manifest.json").exists()]
        begun = [p for p in begun if list(p.glob("a-*/data"))]
        if begun:
            os.kill(process.popen.pid, signal.SIGSTOP)
            if not (begun[0] / "manifest.json").exists() and begun[0].exists():
                return begun[0]
            os.kill(process.popen.pid, signal.SIGCONT)
        assert process.popen.poll() is None, process.errors()
        time.sleep(0.0005)
    raise AssertionError("no save was ever under way")


def test_a_writer_that_sleeps_through_the_saves_of_another_one_does_no_harm(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    root = tmp_path / "run"
    sleeper, refused = (start("train", root, 10**6) for _ in range(2))
    other, last = (start("train", root, steps, 1) for steps in (6, 2))
    sleeper.go()
    sleeping = stop_in_mid_save(sleeper, root)
    before = assert_sound(root)
    refused.go()
    assert refused.end(1) == []
    pid = sleeper.popen.pid
    assert (
        f"expected no other writer, found a job that is running: {HOST}, pid {pid}"
        in (tmp_path / "log1").read_text()
    )
    other.go()
    assert other.end(0) == [f"resumed {before}", f"finished {before + 6}"]
    newest = assert_sound(root)
    assert newest == before + 6
    assert not (sleeping / "manifest.json").exists() or jaxshard.verify(sleeping).ok
    os.kill(sleeper.popen.pid, signal.SIGCONT)
    sleeper.end(1)  # nothing that it does counts any more, and it is told so
    log = (tmp_path / "log0").read_text()
    assert f"another job has taken over this run: {HOST}, pid {other.popen.pid}" in log
    assert assert_sound(root) == newest
    last.go()
    assert last.end(0) == [f"resumed {newest}", f"finished {newest + 2}"]
    assert assert_sound(root) == newest + 2


def test_a_writer_that_sleeps_blocks_nobody(tmp_path: Path, start: Callable[..., Process]) -> None:
    """No lock is held while a save is under way (CASES.md: a stopped holder blocks for ever)."""
    root = tmp_path / "run"
    sleeper = start("train", root, 10**6)
    sleeper.go()
    stop_in_mid_save(sleeper, root)
    newest = assert_sound(root)
    begin = time.monotonic()
    with ResumeManager(root, takeover=True, options=OPTIONS) as run:
        _state, step = run.resume(state_of(0))
        assert step == newest
        run.save(step + 1, state_of(step + 1), wait=True)
    assert time.monotonic() - begin < 20
    assert assert_sound(root) == newest + 1
