"""A run: steps and their numbers, what is saved and kept, what is resumed, and what fails."""

import contextlib
import logging
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import assert_same_tree, bits, mesh, on

import jaxshard
from jaxshard import (
    ConflictError,
    CorruptionError,
    Every,
    FormatError,
    Keep,
    LeafMismatchError,
    NotFoundError,
    ResumeManager,
    SaveOptions,
    StorageError,
    UnsupportedLeafError,
)
from jaxshard._errors import Kind

FILES = SaveOptions(pack_below=0)


def state_of(step: int) -> dict[str, Any]:
    """A small state, a function of the step."""
    return {"a": jnp.full((20, 5), step, jnp.float32), "key": jax.random.key(step), "n": step,
            "z": np.arange(50) * step}  # fmt: skip


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.glob("step_*"))


def run_with(root: Path, *steps: int, **options: Any) -> Path:
    """A run in which these steps were saved."""
    with ResumeManager(root, **{"keep": Keep(), **options}) as run:
        for step in steps:
            run.save(step, state_of(step), wait=True)
    return root


def flip(directory: Path, name: str = "data/z/c/0") -> None:
    """Change one bit of a file of a step."""
    (file,) = directory.glob(f"a-*/{name}")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


# Numbers ------------------------------------------------------------------------------------


def test_steps_count_completed_updates_from_one_to_the_total(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=3), when_busy="wait") as run:
        state, begin = run.resume({"updates": 0})
        assert begin == 0
        seen = []
        for step in run.steps(7):
            seen.append(step)
            state = {"updates": state["updates"] + 1}
            run.maybe_save(step, state)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    found = jaxshard.open(tmp_path / "run")
    assert found.all_steps() == [3, 6, 7]
    for step in found.all_steps():
        assert found.load(step=step) == {"updates": step}
        assert found.open(step).step == step


@pytest.mark.parametrize("first", [1, 3, 4])
def test_a_resumed_run_goes_on_with_the_update_after_the_saved_one(
    tmp_path: Path, first: int
) -> None:
    def train(total: int) -> list[int]:
        seen = []
        with ResumeManager(tmp_path / "run", when=Every(steps=3), when_busy="wait") as run:
            state, _ = run.resume({"updates": 0})
            for step in run.steps(total):
                seen.append(step)
                state = {"updates": state["updates"] + 1}
                assert state["updates"] == step
                run.maybe_save(step, state)
        return seen

    assert train(first) == list(range(1, first + 1))
    assert train(8) == list(range(first + 1, 9))
    assert train(8) == []
    assert train(5) == []
    assert jaxshard.open(tmp_path / "run").load() == {"updates": 8}


def test_a_run_that_was_killed_repeats_what_was_not_saved(tmp_path: Path) -> None:
    run = ResumeManager(tmp_path / "run", when=Every(steps=3))
    run.resume({"n": 0})
    for step in run.steps(100):
        run.maybe_save(step, {"n": step})
        if step == 5:
            break  # never closed
    run.wait_until_finished()
    with ResumeManager(tmp_path / "run") as again:
        state, step = again.resume({"n": 0})
        assert (state, step) == ({"n": 3}, 3)
        assert next(again.steps(100)) == 4


def test_the_same_step_or_an_earlier_one_is_a_conflict(tmp_path: Path) -> None:
    with ResumeManager(run_with(tmp_path / "run", 5, 9), when=Every(steps=1)) as run:
        assert run.resume(state_of(0))[1] == 9
        for step in (9, 4):
            for save in (run.save, run.maybe_save):
                with pytest.raises(ConflictError, match=f"larger than 9, found {step}") as caught:
                    save(step, state_of(step))
                assert caught.value.kind is Kind.STEP_ORDER
                assert caught.value.step == step
        run.maybe_save(10, state_of(10))
        with pytest.raises(ConflictError, match="larger than 10, found 10"):
            run.save(10, state_of(10))
    assert jaxshard.open(tmp_path / "run").all_steps() == [5, 9, 10]


def test_a_step_that_is_not_due_is_still_checked(tmp_path: Path) -> None:
    with ResumeManager(run_with(tmp_path / "run", 5), when=Every(steps=100)) as run:
        run.resume(state_of(0))
        with pytest.raises(ConflictError, match="larger than 5, found 3"):
            run.maybe_save(3, state_of(3))
        assert run.maybe_save(6, state_of(6)) is None


@pytest.mark.parametrize("step", [np.int64(5), np.uint8(5), jnp.int32(5), np.array(5)], ids=repr)
def test_a_step_may_be_any_integer(tmp_path: Path, step: Any) -> None:
    """A counter in the state is an array as often as not."""
    with ResumeManager(tmp_path / "run", when=Every(steps=1)) as run:
        run.maybe_save(step, {"n": 5})
        run.wait_until_finished()
        assert run.all_steps() == [5]
    assert type(jaxshard.open(tmp_path / "run").open().step) is int


@pytest.mark.parametrize("step", [5.0, "5", None, True], ids=repr)
def test_a_step_that_is_no_integer_is_an_error_at_once(tmp_path: Path, step: Any) -> None:
    with ResumeManager(tmp_path / "run", when=lambda *_: True) as run:
        with pytest.raises((TypeError, ValueError), match="step"):
            run.maybe_save(step, {"n": 5})
        assert names(tmp_path / "run") == []


# When ---------------------------------------------------------------------------------------


def test_a_step_that_is_due_is_saved_and_no_other(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=4), keep=Keep()) as run:
        for step in range(1, 10):
            pending = run.maybe_save(step, state_of(step))
            assert (pending is not None) == (step % 4 == 0)
            if pending is not None:
                assert pending.wait().step == step
                assert pending.path == str(tmp_path / "run" / f"step_{step:08d}")
        assert run.all_steps() == [4, 8]


def test_the_last_step_is_saved_and_waited_for_whatever_the_policy_says(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", when=lambda *_: False) as run:
        for step in run.steps(3):
            pending = run.maybe_save(step, state_of(step))
            assert (pending is not None) == (step == 3)
        assert pending is not None
        assert pending.done()
        assert run.latest_step() == 3
        assert jaxshard.verify(tmp_path / "run" / "step_00000003").ok


def test_a_policy_sees_the_step_the_clock_and_the_saves_so_far(tmp_path: Path) -> None:
    seen: list[tuple[int, float, list[int]]] = []

    def policy(step: int, clock_s: float, history: Any) -> bool:
        seen.append((step, clock_s, [saved.step for saved in history]))
        assert all(saved.clock_s <= clock_s for saved in history)
        return step % 2 == 0

    with ResumeManager(tmp_path / "run", when=policy) as run:
        for step in range(1, 6):
            run.maybe_save(step, state_of(step))
            run.wait_until_finished()
    assert [(step, history) for step, _, history in seen] == [
        (1, []), (2, []), (3, [2]), (4, [2]), (5, [2, 4])
    ]  # fmt: skip
    clocks = [clock for _, clock, _ in seen]
    assert clocks == sorted(clocks)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Every(steps=0), "Every: steps must be at least 1: 0\nhint: "),
        (lambda: Keep(last=0), "Keep: last must be at least 1: 0\nhint: "),
        (lambda: ResumeManager("/nowhere", when_busy="drop"), "when_busy='drop'"),
        (lambda: ResumeManager("/nowhere", on_save_error="ignore"), "on_save_error='ignore'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
    assert not Path("/nowhere").exists()


# What to keep -------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [1, 2, None])
def test_keep_deletes_the_older_steps_behind_each_save(tmp_path: Path, last: int | None) -> None:
    with ResumeManager(tmp_path / "run", keep=Keep(last=last)) as run:
        for step in range(1, 6):
            run.save(step, state_of(step), wait=True)
            expected = list(range(1, step + 1))[-(last or 100) :]
            assert run.all_steps() == expected
            assert names(tmp_path / "run") == [f"step_{n:08d}" for n in expected]
    assert_same_tree(jaxshard.open(tmp_path / "run").load(state_of(0)), state_of(5))


def test_three_steps_are_kept_by_default(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run") as run:
        for step in range(1, 7):
            run.save(step, state_of(step))
    assert jaxshard.open(tmp_path / "run").all_steps() == [4, 5, 6]


def test_nothing_is_deleted_before_the_new_step_is_there(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1, 2)
    with ResumeManager(root, keep=Keep(last=1), options=FILES) as run:
        with files_no_larger_than(4000):
            run.save(3, {"w": np.zeros(10_000)})
            run.wait_until_finished()
        assert run.all_steps() == [1, 2]
        run.save(4, state_of(4), wait=True)
        assert run.all_steps() == [4]


def test_leftovers_of_killed_saves_go_behind_the_next_save(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1)
    for name in ("step_00000002/a-0123456789abcdef/data", "step_00000005/a-0123456789abcdef"):
        (root / name).mkdir(parents=True)
    with ResumeManager(root, keep=Keep()) as run:
        assert run.all_steps() == [1]
        assert run.resume(state_of(0))[1] == 1
        run.save(3, state_of(3), wait=True)
        assert names(root) == ["step_00000001", "step_00000003", "step_00000005"]
        run.save(5, state_of(5), wait=True)  # where one was left behind
        assert run.all_steps() == [1, 3, 5]
        assert jaxshard.verify(root / "step_00000005").leftovers == ()


def test_files_that_are_no_steps_are_left_alone(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1)
    strange = ["notes.txt", "step_best", "step_00000001.bak", "tensorboard", "step_"]
    for name in strange:
        (root / name).mkdir()
    with ResumeManager(root, keep=Keep(last=1)) as run:
        assert run.all_steps() == [1]
        run.save(2, state_of(2), wait=True)
        assert run.all_steps() == [2]
    ours = ["epochs", "events", "run.json", "step_00000002"]
    assert sorted(p.name for p in root.iterdir()) == sorted([*ours, *strange])


def test_deleting_what_cannot_be_deleted_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = run_with(tmp_path / "run", 1)
    shutil.move(root / "step_00000001", tmp_path / "elsewhere")
    (root / "step_00000001").symlink_to(tmp_path / "elsewhere")  # rmtree refuses a link
    with ResumeManager(root, keep=Keep(last=1)) as run:
        run.save(2, state_of(2), wait=True)
        assert run.latest_step() == 2
    assert f"deleting old steps of {root} failed, will be tried again: " in caplog.text
    assert_same_tree(jaxshard.open(root).load(state_of(0)), state_of(2))


# A save that is still running ---------------------------------------------------------------


def slow_state(step: int) -> dict[str, Any]:
    """Takes a while to compress."""
    return {"w": np.random.default_rng(step).standard_normal(6 << 20, np.float32), "n": step}


SLOW = SaveOptions(compression="zstd", piece_bytes_max=8 << 20)


def test_a_step_that_is_due_while_the_last_one_is_being_saved_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=1), options=SLOW) as run:
        first = run.maybe_save(1, slow_state(1))
        assert run.maybe_save(2, {"n": 2}) is None
        assert "step 2 is not saved: the save of step 1 is still running" in caplog.text
        assert first is not None
        first.wait()
        assert run.maybe_save(3, slow_state(3)) is not None
    assert jaxshard.open(tmp_path / "run").all_steps() == [1, 3]


def test_when_busy_wait_skips_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ResumeManager(
        tmp_path / "run", when=Every(steps=1), when_busy="wait", options=SLOW
    ) as run:
        for step in (1, 2, 3):
            assert run.maybe_save(step, slow_state(step)) is not None
    assert jaxshard.open(tmp_path / "run").all_steps() == [1, 2, 3]
    assert "not saved" not in caplog.text


def test_the_last_step_waits_for_the_save_before_it(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=1), options=SLOW) as run:
        for step in run.steps(2):
            run.maybe_save(step, slow_state(step))
        assert run.all_steps() == [1, 2]


# Saves that fail ----------------------------------------------------------------------------


@contextlib.contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    """Every write beyond that fails in this process with EFBIG, as on a disk with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Large enough for the logs of this process.
LIMIT = 1 << 20


def too_large(step: int) -> dict[str, Any]:
    return {"w": np.full(1 << 18, step, np.float64)}


def test_a_failed_save_is_a_warning_and_never_the_latest_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=1), when_busy="wait") as run:
        run.maybe_save(1, too_large(1))
        run.wait_until_finished()
        with files_no_larger_than(LIMIT):
            run.maybe_save(2, too_large(2))
            run.wait_until_finished()
        assert run.latest_step() == 1
        assert "step 2 was not saved, training goes on: " in caplog.text
        run.maybe_save(3, too_large(3))
    assert jaxshard.open(tmp_path / "run").all_steps() == [1, 3]


def test_a_failed_save_can_be_tried_again_with_the_same_step(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run") as run:
        with files_no_larger_than(LIMIT), pytest.raises(StorageError, match="File too large"):
            run.save(1, too_large(1), wait=True)
        assert run.latest_step() is None
        assert not list((tmp_path / "run").glob("step_*/*"))
        run.save(1, too_large(1), wait=True)
        assert run.all_steps() == [1]


def test_three_failed_saves_in_a_row_are_an_error(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=1), when_busy="wait") as run:
        with files_no_larger_than(LIMIT):
            for step in (1, 2):
                run.maybe_save(step, too_large(step))
            run.wait_until_finished()
        run.maybe_save(3, {"n": 3})  # a good one in between begins the count again
        run.wait_until_finished()
        with files_no_larger_than(LIMIT):
            for step in (4, 5, 6):
                run.maybe_save(step, too_large(step))
            with pytest.raises(
                StorageError, match="3 saves in a row failed, the last of step 6: "
            ) as e:
                run.wait_until_finished()
        assert e.value.kind is Kind.SAVES_FAIL
        assert e.value.step == 6
        assert isinstance(e.value.__cause__, StorageError)
        assert run.all_steps() == [3]


def test_on_save_error_raise_raises_at_the_next_call_and_once(tmp_path: Path) -> None:
    with ResumeManager(
        tmp_path / "run", when=Every(steps=1), when_busy="wait", on_save_error="raise"
    ) as run:
        with files_no_larger_than(LIMIT):
            run.maybe_save(1, too_large(1))
            with pytest.raises(StorageError, match="File too large"):
                run.maybe_save(2, {"n": 2})
        run.maybe_save(3, {"n": 3})
    assert jaxshard.open(tmp_path / "run").all_steps() == [3]


def test_an_error_that_wait_has_raised_is_not_raised_again_by_the_manager(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=1), on_save_error="raise") as run:
        with files_no_larger_than(LIMIT):
            pending = run.maybe_save(1, too_large(1))
            assert pending is not None
            with pytest.raises(StorageError, match="File too large"):
                pending.wait()
        run.maybe_save(2, {"n": 2})
    assert jaxshard.open(tmp_path / "run").all_steps() == [2]


def test_on_save_error_warn_raises_nowhere_else_either(tmp_path: Path) -> None:
    """A load or save beside the run must not end a training that was told to go on."""
    with ResumeManager(tmp_path / "run", when=Every(steps=1), when_busy="wait") as run:
        run.save(1, {"n": 1}, wait=True)
        with files_no_larger_than(LIMIT):
            pending = run.maybe_save(2, too_large(2))
            assert pending is not None
            while not pending.done():
                pass
        assert jaxshard.open(tmp_path / "run").load() == {"n": 1}
        assert run.load(1) == {"n": 1}
        jaxshard.save(tmp_path / "beside", {"n": 1})


def test_the_save_of_the_last_step_raises_its_error(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=100)) as run, files_no_larger_than(LIMIT):
        first, last = run.steps(2)
        assert run.maybe_save(first, too_large(first)) is None
        with pytest.raises(StorageError, match="File too large"):
            run.maybe_save(last, too_large(last))


def test_what_cannot_be_saved_is_an_error_at_once_and_the_run_goes_on(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", when=Every(steps=1)) as run:
        with pytest.raises(UnsupportedLeafError, match="'bad': "):
            run.maybe_save(1, {"bad": object()})
        run.maybe_save(1, {"good": 1})
    assert jaxshard.open(tmp_path / "run").all_steps() == [1]


# Damage -------------------------------------------------------------------------------------


def test_a_damaged_step_is_skipped_with_a_warning_and_the_older_one_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = run_with(tmp_path / "run", 1, 2, 3, options=FILES)
    flip(root / "step_00000003")  # in the last leaf: by then others of `like` were released
    with ResumeManager(root) as run:
        state, step = run.resume(state_of(0))
        assert step == 2
        assert_same_tree(state, state_of(2))
        assert run.all_steps() == [1, 2]
        assert run.latest_step() == 2
        assert next(run.steps(100)) == 3
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "step 3 is damaged and is skipped: " in warning.message
    assert "leaf 'z'" in warning.message
    assert "data/z/c/0" in warning.message


@pytest.mark.parametrize("harm", ["flip", "a file gone", "the manifest", "the table", "everything"])
def test_every_kind_of_damage_falls_back(tmp_path: Path, harm: str) -> None:
    root = run_with(tmp_path / "run", 1, 2, options=FILES)
    newest = root / "step_00000002"
    (attempt,) = newest.glob("a-*")
    if harm == "flip":
        flip(newest, "data/a/c/0/0")
    elif harm == "a file gone":
        (attempt / "data/z/c/0").unlink()
    elif harm == "the manifest":
        (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes()[:-40])
    elif harm == "the table":
        (attempt / "tables/0/p00000.bin").write_bytes(b"")
    else:
        shutil.rmtree(attempt)
    with ResumeManager(root) as run:
        state, step = run.resume(state_of(0))
        assert step == 1
        assert_same_tree(state, state_of(1))


def test_a_step_that_was_damaged_is_written_again_beside_itself_and_resumed_from_there(
    tmp_path: Path,
) -> None:
    root = run_with(tmp_path / "run", 1, 2, options=FILES)
    flip(root / "step_00000002")
    with ResumeManager(root, when=Every(steps=1), keep=Keep()) as run:
        _, step = run.resume(state_of(0))
        assert step == 1
        pending = run.maybe_save(2, {**state_of(2), "n": 222})
        assert pending is not None
        assert pending.wait().path == str(root / "step_00000002.2")
        assert run.all_steps() == [1, 2]
    found = jaxshard.open(root)
    assert found.all_steps() == [1, 2]
    assert found.load()["n"] == 222
    with ResumeManager(root, keep=Keep()) as run:
        state, step = run.resume(state_of(0))
        assert (step, state["n"]) == (2, 222)
        run.save(3, state_of(3), wait=True)
    assert names(root)[-2:] == ["step_00000002.2", "step_00000003"]
    assert jaxshard.open(root).all_steps() == [1, 2, 3]


def test_a_step_may_be_written_a_third_time(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1, 2, options=FILES)
    for version in ("", ".2"):
        flip(root / f"step_00000002{version}")
        with ResumeManager(root, keep=Keep(), options=FILES) as run:
            assert run.resume(state_of(0))[1] == 1
            run.save(2, state_of(2), wait=True)
    assert "step_00000002.3" in names(root)
    with ResumeManager(root) as run:
        assert run.resume(state_of(0))[1] == 2


def test_a_damaged_step_does_not_count_as_one_to_keep(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1, 2, 3, options=FILES)
    flip(root / "step_00000003")
    with ResumeManager(root, keep=Keep(last=2), options=FILES) as run:
        assert run.resume(state_of(0))[1] == 2
        run.save(4, state_of(4), wait=True)
        assert run.all_steps() == [2, 4]


def test_nothing_sound_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1, 2, options=FILES)
    for step in (1, 2):
        flip(root / f"step_{step:08d}")
    made: list[int] = []
    with ResumeManager(root) as run:
        with pytest.raises(CorruptionError, match="none of 2 committed steps is sound:") as caught:
            run.resume(state_of(0), init=lambda: made.append(1))
        assert caught.value.kind is Kind.NOTHING_SOUND
        assert all(f"  - step_{step:08d}: leaf 'z'" in str(caught.value) for step in (1, 2))
        with pytest.raises(CorruptionError, match="committed steps is sound"):
            run.resume(state_of(0))  # asking again is no fresh start either
    assert not made


def test_a_mismatch_is_an_error_and_no_fallback(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1)
    with ResumeManager(root) as run:
        run.resume(state_of(0))
        run.save(2, {**state_of(2), "a": jnp.zeros((20, 6))}, wait=True)
    with ResumeManager(root) as run:
        like = state_of(0)
        with pytest.raises(LeafMismatchError, match=r"step_00000002.*\n.*'a': ") as caught:
            run.resume(like)
        assert caught.value.step == 2
        assert_same_tree(like, state_of(0))  # nothing was read, nothing released
        assert run.all_steps() == [1, 2]


def test_a_passing_error_of_the_disk_is_an_error_and_no_fallback(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1, 2, options=FILES)
    for name in ("a-*/data/z/c/0", "a-*/tables/0/p00000.bin", "manifest.json"):
        (file,) = (root / "step_00000002").glob(name)
        with ResumeManager(root) as run:
            file.rename(tmp_path / "aside")
            file.symlink_to(file)  # reading it fails with ELOOP
            with pytest.raises(StorageError, match=r"(?i)symbolic links"):
                run.resume(state_of(0))
            file.unlink()
            (tmp_path / "aside").rename(file)
            assert run.resume(state_of(0))[1] == 2


# Coming back --------------------------------------------------------------------------------


def test_a_fresh_run_gives_the_state_itself_and_step_zero(tmp_path: Path) -> None:
    state = state_of(0)
    with ResumeManager(tmp_path / "run") as run:
        got, step = run.resume(state)
        assert got is state
        assert step == 0
        assert run.latest_step() is None
        assert run.all_steps() == []


def test_an_abstract_state_needs_init_on_a_fresh_run_and_does_without_later(tmp_path: Path) -> None:
    sharding = on(mesh((4,)), "a")

    def make() -> dict[str, Any]:
        made.append(1)
        return {"w": jax.device_put(jnp.arange(8.0), sharding), "key": jax.random.key(7)}

    made: list[int] = []
    like = jax.eval_shape(make)
    like["w"] = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    made.clear()
    with ResumeManager(tmp_path / "run") as run:
        with pytest.raises(ValueError, match=r"`like` is abstract\nhint: .*init="):
            run.resume(like)
        state, step = run.resume(like, init=make)
        assert (len(made), step) == (1, 0)
        run.save(1, state, wait=True)
    with ResumeManager(tmp_path / "run") as run:
        again, step = run.resume(like, init=make)
    assert (len(made), step) == (1, 1)
    assert_same_tree({"w": again["w"]}, {"w": state["w"]})
    assert bits(again["key"]) == bits(state["key"])


def test_the_memory_of_like_is_released_as_its_replacement_arrives(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1)
    like = state_of(0)
    with ResumeManager(root) as run:
        state, _ = run.resume(like)
    assert like["a"].is_deleted()
    assert_same_tree(state, state_of(1))


def test_resume_gives_arrays_that_a_step_can_take_over(tmp_path: Path) -> None:
    """CASES.md 7: after a resume the donated step must not need the memory twice."""
    with ResumeManager(tmp_path / "run", options=FILES) as run:
        run.save(1, {"w": jnp.arange(1 << 16, dtype=jnp.float32)}, wait=True)
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    with ResumeManager(tmp_path / "run") as run:
        state, _ = run.resume({"w": jnp.zeros(1 << 16)})
    before = state["w"].unsafe_buffer_pointer()
    after = step(state["w"])
    assert state["w"].is_deleted()
    assert after.unsafe_buffer_pointer() == before


def test_a_state_comes_back_on_another_mesh(tmp_path: Path) -> None:
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    with ResumeManager(tmp_path / "run") as run:
        run.save(1, {"w": jax.device_put(values, on(mesh((4, 2)), "a", "b"))}, wait=True)
    for sharding in (on(mesh((8,)), "a"), on(mesh((2,)), None, "a"), on(mesh((2, 4)), "b", "a")):
        with ResumeManager(tmp_path / "run") as run:
            state, step = run.resume({"w": jax.device_put(jnp.zeros((8, 8)), sharding)})
        assert step == 1
        assert_same_tree(state, {"w": jax.device_put(values, sharding)})


def test_resuming_again_and_again_gives_the_same(tmp_path: Path) -> None:
    """CASES.md 22: the second resume started at zero."""
    root = run_with(tmp_path / "run", 4)
    with ResumeManager(root, when=Every(steps=1)) as run:
        for _ in range(2):  # twice by one manager
            state, step = run.resume(state_of(0))
            assert step == 4
            assert_same_tree(state, state_of(4))
    for expected in (4, 5, 6):  # and with some progress in between
        with ResumeManager(root, when=Every(steps=1)) as run:
            state, step = run.resume(state_of(0))
            assert step == expected
            assert_same_tree(state, state_of(expected))
            run.maybe_save(step + 1, state_of(step + 1))
    for _ in range(3):  # and with none
        with ResumeManager(root) as run:
            assert run.resume(state_of(0))[1] == 7


class Net(nnx.Module):
    """Every kind of Variable that a resume forgets elsewhere (CASES.md 12)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


def net(seed: int) -> tuple[Net, nnx.Optimizer[Net]]:
    model = Net(nnx.Rngs(params=seed, dropout=seed + 1))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def nnx_step(model: Net, optimizer: nnx.Optimizer[Net], x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def nnx_run(root: Path, total: int, seed: int) -> tuple[list[float], Net, nnx.Optimizer[Net]]:
    model, optimizer = net(seed)
    losses = []
    with ResumeManager(root, when=Every(steps=2)) as run:
        state, _ = run.resume({"model": model, "optimizer": optimizer})
        assert state["model"] is model
        assert state["optimizer"] is optimizer
        for step in run.steps(total):
            x = jax.random.normal(jax.random.key(step), (16, 4))
            losses.append(float(nnx_step(model, optimizer, x)))
            run.maybe_save(step, state, metrics={"loss": losses[-1]})
    return losses, model, optimizer


def test_nnx_objects_are_updated_in_place_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    whole, model, optimizer = nnx_run(tmp_path / "whole", 8, seed=0)
    first, *_ = nnx_run(tmp_path / "parts", 3, seed=0)
    middle, *_ = nnx_run(tmp_path / "parts", 5, seed=1)  # another seed must not matter
    rest, model2, optimizer2 = nnx_run(tmp_path / "parts", 8, seed=2)
    assert [*first, *middle, *rest] == whole
    assert_same_tree(nnx.to_pure_dict(nnx.state(model2)), nnx.to_pure_dict(nnx.state(model)))
    assert_same_tree(
        nnx.to_pure_dict(nnx.state(optimizer2)), nnx.to_pure_dict(nnx.state(optimizer))
    )


def test_nnx_objects_are_whole_after_a_fallback(tmp_path: Path) -> None:
    model, optimizer = net(0)
    with ResumeManager(tmp_path / "run", options=FILES) as run:
        for step in (1, 2):
            nnx_step(model, optimizer, jnp.full((16, 4), step, jnp.float32))
            run.save(step, {"model": model, "optimizer": optimizer}, wait=True)
    (last,) = sorted((tmp_path / "run/step_00000002").glob("a-*/data/optimizer/opt_state/0/nu/*/kernel/c/0/0"))[-1:]  # fmt: skip  # noqa: E501
    data = last.read_bytes()
    last.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    like = dict(zip(("model", "optimizer"), net(5), strict=True))
    with ResumeManager(tmp_path / "run") as run:
        state, step = run.resume(like)
        assert step == 1
        assert state["model"] is like["model"]
        saved = run.load(1)
    assert bits(state["model"].linear.kernel[...]) == bits(saved["model"]["linear"]["kernel"])
    assert float(nnx_step(state["model"], state["optimizer"], jnp.ones((16, 4)))) > 0


# A training loop ----------------------------------------------------------------------------


OPTIMIZER = optax.adam(1e-2)


def placed(tree: Any) -> Any:
    """Matrices over both axes of the mesh, all other arrays on each device."""
    grid = mesh((4, 2))
    spec = {(16, 8): on(grid, "a", "b")}
    return jax.tree.map(lambda x: jax.device_put(x, spec.get(x.shape, on(grid))), tree)


def initial(seed: int = 0) -> dict[str, Any]:
    """Params, Adam's state, a key for dropout, and the position of the data."""
    w = jax.random.normal(jax.random.key(seed), (16, 8))
    params = placed({"w": w, "b": jnp.zeros(8)})
    opt = placed(OPTIMIZER.init(params))
    return {"params": params, "opt": opt, "key": placed(jax.random.key(seed + 1)), "position": 0}


def update(params: Any, opt: Any, key: jax.Array, x: jax.Array) -> tuple[Any, Any, jax.Array, Any]:
    key, dropout = jax.random.split(key)

    def loss_of(params: Any) -> jax.Array:
        kept = jax.random.bernoulli(dropout, 0.8, (32, 8))
        return jnp.mean(jnp.where(kept, x @ params["w"] + params["b"], 0.0) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt = OPTIMIZER.update(grads, opt)
    params, opt = placed((optax.apply_updates(params, updates), opt))
    return params, opt, key, loss


donating_update = jax.jit(update, donate_argnums=(0, 1, 2))


def batch(position: int) -> np.ndarray:
    return np.random.default_rng(position).standard_normal((32, 16), np.float32)


def one_step(state: dict[str, Any]) -> tuple[dict[str, Any], float]:
    params, opt, key, loss = donating_update(
        state["params"], state["opt"], state["key"], batch(int(state["position"]))
    )
    new = {"params": params, "opt": opt, "key": key, "position": int(state["position"]) + 1}
    return new, float(loss)


def train(root: Path, total: int, seed: int = 0) -> tuple[dict[str, Any], list[float]]:
    losses = []
    with ResumeManager(root, when=Every(steps=2), when_busy="wait", options=FILES) as run:
        state, begin = run.resume(initial(seed))
        assert int(state["position"]) == begin
        for step in run.steps(total):
            state, loss = one_step(state)
            losses.append(loss)
            run.maybe_save(step, state, metrics={"loss": loss})
    return state, losses


def test_2n_steps_are_n_steps_a_restart_and_n_steps_bit_for_bit(tmp_path: Path) -> None:
    whole, losses = train(tmp_path / "whole", 12)
    _, first = train(tmp_path / "parts", 6)
    parts, second = train(tmp_path / "parts", 12, seed=99)
    assert first + second == losses
    assert_same_tree(parts, whole)
    a = jaxshard.open(tmp_path / "whole").open()
    b = jaxshard.open(tmp_path / "parts").open()
    assert jaxshard.diff(a.path, b.path).identical


def test_what_is_saved_is_the_state_of_the_save_whatever_training_does_next(tmp_path: Path) -> None:
    """CASES.md 9 and 18: a donating step right after each save, in all the ways to snapshot."""
    for snapshot in ("auto", "view", "copy"):
        options = SaveOptions(pack_below=100, snapshot=snapshot)
        state, pending, wanted = initial(), [], []
        for step in range(6):
            wanted.append([bits(leaf) for leaf in jax.tree.leaves(state)])
            path = tmp_path / snapshot / str(step)
            pending.append(jaxshard.save_async(path, state, options=options))
            old = state["params"]["w"]
            state, _ = one_step(state)
            assert snapshot != "copy" or old.is_deleted()  # JAX keeps what a view still shows
        for step, (save, want) in enumerate(zip(pending, wanted, strict=True)):
            save.wait()
            got = jaxshard.load(tmp_path / snapshot / str(step), state)
            assert [bits(leaf) for leaf in jax.tree.leaves(got)] == want


def test_numpy_leaves_may_change_right_after_save_async(tmp_path: Path) -> None:
    big = np.arange(3 << 20, dtype=np.float32)
    small, strided = np.arange(10), np.asfortranarray(np.arange(600.0).reshape(20, 30))[::2, ::3]
    nested = {"list": [1, 2], "big": big, "small": small, "strided": strided}
    want = {"list": [1, 2], "big": big.copy(), "small": small.copy(), "strided": strided.copy()}
    for budget in (None, 1 << 20):  # also one that makes the call wait
        options = SaveOptions(host_bytes_max=budget, piece_bytes_max=1 << 19)
        pending = jaxshard.save_async(tmp_path / str(budget), nested, options=options)
        big += 1
        small[:] = -1
        strided[...] = np.nan
        nested["list"].append(3)
        pending.wait()
        assert_same_tree(jaxshard.load(tmp_path / str(budget)), want)
        big[...], small[...], strided[...] = want["big"], want["small"], want["strided"]
        nested["list"].pop()


def test_nnx_variables_may_change_right_after_save_async(tmp_path: Path) -> None:
    model, optimizer = net(0)
    want = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    pending = jaxshard.save_async(tmp_path / "c", model)
    nnx_step(model, optimizer, jnp.ones((16, 4)))
    model.linear.bias[...] = jnp.full(4, 7.0)
    pending.wait()
    got = jaxshard.load(tmp_path / "c")
    assert bits(got["linear"]["kernel"]) == bits(want["linear"]["kernel"])
    assert bits(got["linear"]["bias"]) == bits(want["linear"]["bias"])


def test_deleting_the_arrays_right_after_save_async_does_no_harm(tmp_path: Path) -> None:
    state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    pending = jaxshard.save_async(tmp_path / "c", state, options=FILES)
    state["w"].delete()
    pending.wait()
    assert_same_tree(jaxshard.load(tmp_path / "c"), {"w": np.arange(1 << 20, dtype=np.float32)})


# Looking, and the end -----------------------------------------------------------------------


def test_metrics_are_kept_with_the_step(tmp_path: Path) -> None:
    metrics = {"loss": jnp.float32(0.25), "accuracy": np.float64(0.5), "epoch": 3,
               "bad": float("nan"), "worse": -jnp.inf}  # fmt: skip
    with ResumeManager(tmp_path / "run") as run:
        run.save(1, state_of(1), metrics=metrics, wait=True)
        run.save(2, state_of(2), wait=True)
    found = jaxshard.open(tmp_path / "run")
    assert found.open(1).metadata == {
        "metrics": {"loss": 0.25, "accuracy": 0.5, "epoch": 3.0, "bad": "nan", "worse": "-inf"}
    }
    assert found.open(2).metadata == {}


def test_one_step_can_be_loaded_by_its_number(tmp_path: Path) -> None:
    with ResumeManager(run_with(tmp_path / "run", 2, 4, 6)) as run:
        assert_same_tree(run.load(4, state_of(0)), state_of(4))
        assert run.load(2)["n"] == 2
        assert run.load(6, select="n") == {"n": 6}
        with pytest.raises(NotFoundError, match="expected step 5, found: 2, 4, 6"):
            run.load(5)


def test_open_gives_a_run_that_reads_and_never_writes(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 2, 4)
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    found = jaxshard.open(root)
    assert isinstance(found, jaxshard.Run)
    assert found.all_steps() == [2, 4]
    assert found.latest_step() == 4
    assert repr(found) == f"<Run '{root}', steps [2, 4]>"
    assert_same_tree(found.load(state_of(0)), state_of(4))
    assert found.load(step=2)["n"] == 2
    assert found.open(2).step == 2
    assert found.open().step == 4
    with pytest.raises(NotFoundError, match="expected step 3, found: 2, 4"):
        found.load(step=3)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before
    run_with(root, 6)
    assert found.latest_step() == 6  # it looks anew each time


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    ResumeManager(tmp_path / "run").close()
    found = jaxshard.open(tmp_path / "run")
    assert found.all_steps() == []
    assert found.latest_step() is None
    with pytest.raises(NotFoundError, match="expected a committed step, found: none"):
        found.load()


def test_leaving_the_block_waits_for_the_last_save_and_closes(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run", options=SLOW) as run:
        pending = run.save(1, slow_state(1))
    assert pending.done()
    assert jaxshard.open(tmp_path / "run").all_steps() == [1]
    for use in (lambda: run.save(2, {}), lambda: run.maybe_save(2, {}), lambda: run.resume({})):
        with pytest.raises(ValueError, match="is closed\nhint: make a new one"):
            use()
    run.close()  # twice does no harm


def test_an_error_in_the_loop_is_not_hidden_by_a_failed_save(tmp_path: Path) -> None:
    def loop(*, fails: bool) -> None:
        with ResumeManager(tmp_path / "run", on_save_error="raise") as run:
            run.save(1, too_large(1))
            if fails:
                raise KeyError("a bug in the loop")

    with files_no_larger_than(LIMIT):
        with pytest.raises(KeyError, match="a bug in the loop") as caught:
            loop(fails=True)
        with pytest.raises(StorageError, match="File too large"):
            loop(fails=False)
    (note,) = caught.value.__notes__
    assert note.startswith("while this was raised, a save failed too: ")


def test_a_run_is_told_by_its_file(tmp_path: Path) -> None:
    root = run_with(tmp_path / "run", 1)
    identity = (root / "run.json").read_bytes()
    run_with(root, 2)
    assert (root / "run.json").read_bytes() == identity  # created once and never changed
    for text, match in [
        (b'{"format":"jaxshard-run","version":2,"run_id":"0"}', "found .*'version': 2.*\nhint: "),
        (b'{"format":"other"}', "run.json: expected"),
        (b"[]", "expected the description of a run"),
        (b"", "expected the description of a run"),
    ]:
        (root / "run.json").write_bytes(text)
        with pytest.raises(FormatError, match=match):
            ResumeManager(root)


def test_a_run_lives_in_memory_too(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    for expected in (0, 2, 4):
        with ResumeManager(url, when=Every(steps=1), keep=Keep(last=2)) as run:
            _, step = run.resume(state_of(0))
            assert step == expected
            for n in run.steps(expected + 2):
                run.maybe_save(n, state_of(n))
    assert jaxshard.open(url).all_steps() == [5, 6]
    assert_same_tree(jaxshard.open(url).load(state_of(0)), state_of(6))


def test_one_line_is_logged_for_each_save_and_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jaxshard"):
        root = run_with(tmp_path / "run", 1, 2, keep=Keep(last=1))
        with ResumeManager(root) as run:
            run.resume(state_of(0))
    lines = [record.message for record in caplog.records if record.name == "jaxshard"]
    wanted = [
        f"saved {root / 'step_00000001'}: ", f"saved {root / 'step_00000002'}: ",
        f"pruned {root}: step_00000001", f"loaded {root / 'step_00000002'}: ",
        f"resumed {root} at step 2",
    ]  # fmt: skip
    assert len(lines) == len(wanted)
    assert all(line.startswith(start) for line, start in zip(lines, wanted, strict=True)), lines


def test_another_default_for_keys_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = run_with(tmp_path / "run", 1)
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        with ResumeManager(root) as run, warnings.catch_warnings():
            assert run.resume(state_of(0))[1] == 1
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert (
        "restored bits are exact, further steps may not be: default_matmul_precision" in caplog.text
    )
