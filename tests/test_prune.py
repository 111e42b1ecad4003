"""`prune` frees what dead writers left and what `Keep` releases; all else survives, bit for bit."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import jaxshard
from jaxshard import CorruptionError, Keep, NotFoundError, ResumeManager, SaveOptions

OLD = time.time() - 7200
DEAD = "a-00000000deadbeef"
FILES = SaveOptions(pack_below=0)


def run_of(root, *steps: int) -> Path:
    with ResumeManager(root, keep=Keep(), options=FILES) as run:
        for step in steps:
            run.save(step, {"w": np.full(100, step)}, wait=True)
    return Path(root)


def leftover(path: Path, *, when: float = OLD, nbytes: int = 10) -> Path:
    """A file of a dead writer, and its directories, last changed at `when`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * nbytes)
    age(path.parent, when)
    return path


def age(path: Path, when: float = OLD) -> None:
    for inside in [*path.rglob("*"), path]:
        os.utime(inside, (when, when))


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def sound(root: Path) -> list[int]:
    """Steps that are there; each loads as it was saved."""
    run = jaxshard.open(root)
    for step in run.all_steps():
        assert (run.load(step=step)["w"] == step).all()
    return run.all_steps()


# Leftovers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    [
        f"step_00000002/{DEAD}/data/w/c/0",  # beside a committed manifest
        f"step_00000002/{DEAD}/tables/0/p00000.bin",
        "step_00000002/.tmp-0123abcd",
        ".tmp-0123abcd",
    ],
)
def test_what_a_dead_writer_left_goes_and_the_rest_is_untouched(tmp_path, where):
    root = run_of(tmp_path / "run", 1, 2)
    before = snapshot(root)
    leftover(root / where, nbytes=123)
    if DEAD in where:
        age(root / "step_00000002" / DEAD)
    report = jaxshard.prune(root)
    assert snapshot(root) == before
    assert report.nbytes == 123
    assert report.deleted == report.leftovers
    assert len(report.leftovers) == 1
    assert where.startswith(report.leftovers[0])


@pytest.mark.parametrize("entry", [f"{DEAD}/c/0", ".tmp-01"])
def test_a_step_that_was_never_committed_goes_with_its_directory(tmp_path, entry):
    root = run_of(tmp_path / "run", 1)
    leftover(root / "step_00000002" / entry)
    age(root / "step_00000002")
    (root / "step_00000003").mkdir()
    age(root / "step_00000003")
    report = jaxshard.prune(root)
    gone = [f"step_00000002/{entry.split('/')[0]}", "step_00000002", "step_00000003"]
    assert list(report.leftovers) == gone
    assert sorted(p.name for p in root.glob("step_*")) == ["step_00000001"]


def test_a_lock_file_inside_a_committed_attempt_goes(tmp_path):
    root = run_of(tmp_path / "run", 1)
    (piece,) = root.glob("step_00000001/a-*/data/w/c/0")
    lock = piece.with_name("0.__lock")
    lock.write_bytes(b"")
    os.utime(lock, (OLD, OLD))
    report = jaxshard.prune(root)
    assert [name.rpartition("/")[2] for name in report.leftovers] == ["0.__lock"]
    assert jaxshard.verify(root / "step_00000001").leftovers == ()
    assert sound(root) == [1]


def test_what_changed_recently_stays_and_is_named(tmp_path):
    root = run_of(tmp_path / "run", 1)
    file = leftover(root / "step_00000002" / DEAD / "data/w/c/0")
    age(root / "step_00000002")
    os.utime(file, None)  # a save that is going on: one file of it has just been written
    report = jaxshard.prune(root)
    assert (report.deleted, report.recent) == ((), (f"step_00000002/{DEAD}",))
    assert file.exists()
    assert jaxshard.prune(root, older_than_s=0).leftovers == (
        f"step_00000002/{DEAD}", "step_00000002",
    )  # fmt: skip


def test_an_empty_directory_of_a_step_that_has_just_begun_stays(tmp_path):
    root = run_of(tmp_path / "run", 1)
    (root / "step_00000002").mkdir()
    assert jaxshard.prune(root).deleted == ()
    assert (root / "step_00000002").is_dir()


def test_a_save_that_is_going_on_is_not_disturbed(tmp_path):
    with ResumeManager(tmp_path / "run", keep=Keep(), options=FILES) as run:
        pending = run.save(1, {"w": np.full(200_000, 1)})
        while not pending.done():
            jaxshard.prune(tmp_path / "run", keep=Keep(last=1))
        pending.wait()
    assert sound(tmp_path / "run") == [1]


@pytest.mark.parametrize("where", ["notes.txt", "step_00000001/notes.txt", "plots/loss.png"])
def test_files_of_somebody_else_are_never_touched(tmp_path, where):
    root = run_of(tmp_path / "run", 1, 2)
    mine = leftover(root / where, nbytes=5)
    leftover(root / "step_00000003" / "notes.txt")
    leftover(root / "step_00000003" / DEAD / "x")
    age(root)
    report = jaxshard.prune(root, keep=Keep(last=1))
    assert mine.exists()
    assert report.leftovers == (f"step_00000003/{DEAD}",)
    assert [p.name for p in (root / "step_00000003").iterdir()] == ["notes.txt"]
    assert sound(root) == [2]


def test_a_dry_run_says_the_same_and_deletes_nothing(tmp_path):
    root = run_of(tmp_path / "run", 1, 2)
    leftover(root / "step_00000003" / DEAD / "x")
    age(root / "step_00000003")
    before = snapshot(root)
    said = jaxshard.prune(root, keep=Keep(last=1), dry_run=True)
    assert snapshot(root) == before
    done = jaxshard.prune(root, keep=Keep(last=1))
    assert (said.steps, said.leftovers, said.nbytes) == (done.steps, done.leftovers, done.nbytes)
    assert said.nbytes == sum(map(len, before.values())) - sum(map(len, snapshot(root).values()))
    assert str(said).startswith(f"{root}: would delete 1 step and 2 leftovers")
    assert "\n  - step: step_00000001" in str(done)


# Steps --------------------------------------------------------------------------------------


def test_without_keep_every_committed_step_stays(tmp_path):
    root = run_of(tmp_path / "run", 1, 2, 3)
    age(root)
    before = snapshot(root)
    assert jaxshard.prune(root).deleted == ()
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(last=2), [40, 50]),
        (Keep(every_steps=20), [20, 40, 50]),
        (Keep(last=1, every_steps=30), [30, 50]),
        (Keep(), [10, 20, 30, 40, 50]),
    ],
)
def test_keep_decides_which_steps_go(tmp_path, keep, left):
    root = run_of(tmp_path / "run", 10, 20, 30, 40, 50)
    report = jaxshard.prune(root, keep=keep)
    assert sound(root) == left
    assert report.steps == tuple(f"step_{s:08d}" for s in (10, 20, 30, 40, 50) if s not in left)


def test_an_older_version_of_a_step_goes_where_keep_is_given(tmp_path):
    root = run_of(tmp_path / "run", 1, 2)
    (root / "step_00000002").rename(root / "step_00000002.2")
    other = run_of(tmp_path / "other", 2)
    (other / "step_00000002").rename(root / "step_00000002")
    assert jaxshard.prune(root, keep=Keep()).steps == ("step_00000002",)
    assert sound(root) == [1, 2]


@pytest.mark.parametrize("damage", ["manifest", "piece cut", "piece gone"])
def test_a_damaged_step_is_neither_counted_nor_deleted(tmp_path, damage):
    root = run_of(tmp_path / "run", 1, 2, 3)
    (piece,) = root.glob("step_00000003/a-*/data/w/c/0")
    if damage == "manifest":
        (root / "step_00000003/manifest.json").write_bytes(b"{}")
    elif damage == "piece cut":
        piece.write_bytes(piece.read_bytes()[:-1])
    else:
        piece.unlink()
    report = jaxshard.prune(root, keep=Keep(last=1))
    assert (report.steps, report.damaged) == (("step_00000001",), ("step_00000003",))
    assert (root / "step_00000002/manifest.json").exists()
    assert (root / "step_00000003/manifest.json").exists()


def test_beside_a_manifest_that_cannot_be_read_nothing_goes(tmp_path):
    root = run_of(tmp_path / "run", 1)
    (root / "step_00000001/manifest.json").write_bytes(b"cut")
    age(root)
    before = snapshot(root)
    report = jaxshard.prune(root, older_than_s=0)
    assert (report.deleted, report.damaged) == ((), ("step_00000001",))
    assert snapshot(root) == before


@pytest.mark.parametrize("every_steps", [0, -1])
def test_keep_refuses_what_is_no_interval(every_steps):
    with pytest.raises(ValueError, match=f"every_steps must be at least 1: {every_steps}\nhint: "):
        Keep(every_steps=every_steps)


# One checkpoint, and what is none -----------------------------------------------------------


def test_leftovers_beside_one_checkpoint_go(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones(3)})
    leftover(tmp_path / "ckpt" / DEAD / "x")
    assert jaxshard.prune(tmp_path / "ckpt").leftovers == (DEAD,)
    assert jaxshard.verify(tmp_path / "ckpt").leftovers == ()
    assert (jaxshard.load(tmp_path / "ckpt")["w"] == 1).all()


def test_attempts_of_a_checkpoint_that_was_never_committed_go(tmp_path):
    leftover(tmp_path / "ckpt" / DEAD / "x")
    assert jaxshard.prune(tmp_path / "ckpt").leftovers == (DEAD,)
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_one_damaged_checkpoint_is_an_error(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones(3)})
    leftover(tmp_path / "ckpt" / DEAD / "x")
    (tmp_path / "ckpt/manifest.json").write_bytes(b"cut")
    with pytest.raises(CorruptionError, match="the manifest is damaged"):
        jaxshard.prune(tmp_path / "ckpt")
    assert (tmp_path / "ckpt" / DEAD / "x").exists()


def test_memory_has_no_times_and_prunes_only_when_told_that_all_is_old():
    url = "memory://prune/times"
    jaxshard.save(url, {"w": np.ones(3)})
    from jaxshard._store import open_store

    store = open_store(url)
    store.write(f"{DEAD}/x", b"123")
    assert jaxshard.prune(url).recent == (DEAD,)
    assert jaxshard.prune(url, older_than_s=0).leftovers == (DEAD,)
    assert jaxshard.verify(url).leftovers == ()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="expected a checkpoint, found nothing"):
        jaxshard.prune(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NotFoundError, match="found other files"):
        jaxshard.prune(tmp_path)
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones(3)})
    with pytest.raises(ValueError, match="expected a run for keep=, found one checkpoint\nhint: "):
        jaxshard.prune(tmp_path / "ckpt", keep=Keep(last=1))


@pytest.mark.parametrize("older_than_s", [-1.0, float("nan")])
def test_an_age_that_is_none_is_refused(tmp_path, older_than_s):
    with pytest.raises(ValueError, match="older_than_s must be 0 or more"):
        jaxshard.prune(tmp_path, older_than_s=older_than_s)


def test_pruning_imports_no_jax(tmp_path):
    from support import run_python

    root = run_of(tmp_path / "run", 1, 2)
    code = f"""
import sys, jaxshard
print(jaxshard.prune({str(root)!r}, keep=jaxshard.Keep(last=1)).steps, "jax" in sys.modules)
"""
    assert run_python(code).strip() == "('step_00000001',) False"
