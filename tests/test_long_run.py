"""A long run with random failures: it comes back each time, adds up, and leaves nothing behind."""

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxshard
from jaxshard import Every, Keep, ResumeManager, _epochs

KEEP = Keep(last=2, every_steps=1000, best=1, metric="loss")


def state_of(step: int) -> dict[str, Any]:
    return {"n": np.full(500, step), "rng": np.arange(step, step + 2)}


def loss(step: int) -> float:
    return abs(step - 1777) / 10


def crash(run: ResumeManager) -> None:
    """As a kill leaves it: nothing is said, no thread goes on."""
    if run._saves.running is not None:
        run._saves.running._thread.join()
    run._release.detach()
    run._stop.close()
    epoch = run._writer.epoch
    epoch._stop.set()
    epoch._thread.join()


def damage(root: Path, step: int) -> None:
    (file,) = (root / f"step_{step:08d}").glob("a-*/packs/00000/c/0")
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)


def live(root: Path, total: int, crashes: float, seed: int) -> dict[str, int]:
    """Train to `total`; each step ends the process with this probability."""
    rng = random.Random(seed)
    seen = {"crashes": 0, "damaged": 0, "stops": 0, "rollbacks": 0, "again": 0}
    reached = 0
    while True:
        run = ResumeManager(root, when=Every(steps=50), when_busy="wait", keep=KEEP)
        state, begin = run.resume(state_of(0))
        np.testing.assert_array_equal(state["n"], begin)
        np.testing.assert_array_equal(state["rng"], [begin, begin + 1])
        seen["again"] += reached - begin
        for step in run.steps(total):
            reached = step
            run.maybe_save(step, state_of(step), metrics={"loss": loss(step)})
            if rng.random() < crashes:
                break
        run._saves.wait()
        assert_disk_use(root)  # while old steps may still be on their way out
        run.wait_until_finished()
        assert_disk_use(root)
        assert len(list(root.glob("step_*/a-*"))) <= len(list(root.glob("step_*")))
        if reached == total:
            run.close()
            return seen
        if rng.random() < 0.1 and len(run.all_steps()) > 2:
            newest = jaxshard.open(root).open().path
            if newest.endswith(f"{run.latest_step():08d}"):
                damage(root, run.latest_step() or 0)
                seen["damaged"] += 1
        elif rng.random() < 0.1 and len(run.all_steps()) > 2:
            run.rollback(run.all_steps()[-2], "a spike")
            seen["rollbacks"] += 1
        if rng.random() < 0.3:
            seen["stops"] += 1
            run.close()
        else:
            seen["crashes"] += 1
            crash(run)


def assert_disk_use(root: Path) -> None:
    """No more steps than `KEEP` allows, and two."""
    steps = jaxshard.open(root).all_steps()
    multiples = [s for s in steps if s % 1000 == 0]
    set_aside = 2  # by one rollback, which the next steps have not passed yet
    directories = [entry for entry in root.iterdir() if entry.name.startswith("step_")]
    assert len(directories) <= 2 + len(multiples) + 1 + 2 + set_aside, directories


def run_of(root: Path, total: int, crashes: float, seed: int) -> None:
    fds, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    seen = live(root, total, crashes, seed)
    assert seen["crashes"] > 3
    assert seen["stops"] > 0
    found = jaxshard.report(root).goodput
    assert found.starts == seen["crashes"] + seen["stops"] + 1
    assert found.failures == seen["crashes"]
    assert found.lost_steps >= 0
    parts = [found.useful_s, found.saving_s, found.lost_s, found.restoring_s, found.down_s]
    assert sum(parts) == pytest.approx(found.wall_s, rel=1e-6)
    assert all(part >= 0 for part in parts)
    assert 0 < found.goodput <= 1
    assert len(list(Path("/proc/self/fd").iterdir())) <= fds
    assert threading.active_count() <= threads
    run = jaxshard.open(root)
    assert run.latest_step() == total
    np.testing.assert_array_equal(run.load()["n"], total)
    best = min(run.all_steps(), key=loss)
    assert abs(best - 1777) <= 50 or total < 1700  # the best of all that were ever saved
    epoch = _epochs.newest(run._store)
    assert epoch is not None
    assert epoch.number == found.starts


def test_a_run_of_4000_steps_with_random_failures(tmp_path):
    run_of(tmp_path / "run", 4_000, 1 / 150, seed=1)


@pytest.mark.soak
def test_a_run_of_100000_steps_with_random_failures(tmp_path):
    run_of(tmp_path / "run", 100_000, 1 / 1500, seed=2)
