"""Files that a step shares with the step before: which, how safely, and what is said of it."""

import errno
import json
import logging
import os
import re
import shutil
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from support import mesh, on

import jaxshard
from jaxshard import Keep, ResumeManager, SaveOptions, _snapshot, _syncing
from jaxshard.cli import command

ROWS = 512  # float32[512, 1024]: 2 MiB, a piece of its own


def big(value: float) -> jax.Array:
    return jnp.full((ROWS, 1024), value, jnp.float32)


def state(step: int, **others: object) -> dict:
    """A base that stays, and what is trained."""
    base = {name: big(i) for i, name in enumerate("ab")}
    return {"base": base, "lora": big(100 + step), "count": jnp.asarray(step), **others}


def save_all(root: Path, states: dict[int, dict], **options: object) -> list[jaxshard.SaveReport]:
    options.setdefault("keep", Keep())
    reports = []
    with ResumeManager(root, **options) as run:
        run.resume(jax.tree.map(jnp.copy, next(iter(states.values()))))
        for step, tree in states.items():
            reports.append(run.save(step, tree, wait=True).wait())
    return reports


def piece(root: Path, step: int, leaf: str) -> Path:
    """The one file of a leaf."""
    (found,) = root.glob(f"step_{step:08d}/a-*/data/{leaf}/c/0/0")
    return found


def assert_sound(root: Path, states: dict[int, dict]) -> None:
    for step, tree in states.items():
        path = root / f"step_{step:08d}"
        assert jaxshard.verify(path).ok, jaxshard.verify(path)
        jaxshard.testing.assert_trees_bitwise_equal(jaxshard.load(path, tree), tree)


def test_what_did_not_change_is_the_same_file(tmp_path):
    states = {step: state(step) for step in (1, 2, 3)}
    reports = save_all(tmp_path, states)
    for leaf in ("base/a", "base/b"):
        first, *others = (piece(tmp_path, step, leaf).stat() for step in states)
        assert [other.st_ino for other in others] == [first.st_ino] * 2
        assert first.st_nlink == 3
    assert len({piece(tmp_path, step, "lora").stat().st_ino for step in states}) == 3
    assert [r.reused_nbytes for r in reports] == [0, 4 << 20, 4 << 20]
    assert "4.0 MiB of it unchanged, and not written" in str(reports[1])
    assert_sound(tmp_path, states)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_nothing_is_lost_when_older_steps_are_deleted(tmp_path, compression):
    states = {step: state(step) for step in range(1, 8)}
    options = SaveOptions(compression=compression)
    reports = save_all(tmp_path, states, keep=Keep(last=1), options=options)
    assert reports[-1].reused_nbytes == 4 << 20
    assert jaxshard.open(tmp_path).all_steps() == [7]
    assert_sound(tmp_path, {7: states[7]})


def test_a_file_is_written_anew_after_reuse_max_steps(tmp_path):
    states = {step: state(step) for step in range(1, 9)}
    save_all(tmp_path, states, reuse_max=3)
    inodes = [piece(tmp_path, step, "base/a").stat().st_ino for step in states]
    assert [inodes.index(i) + 1 for i in inodes] == [1, 1, 1, 1, 5, 5, 5, 5]
    saves = [jaxshard.open(tmp_path).open(step)["base/a"].info.reused for step in states]
    assert [None if s is None else s.saves for s in saves] == [None, 1, 2, 3, None, 1, 2, 3]


def test_none_is_shared_with_reuse_max_0(tmp_path):
    states = {step: state(step) for step in (1, 2)}
    assert [r.reused_nbytes for r in save_all(tmp_path, states, reuse_max=0)] == [0, 0]
    with pytest.raises(ValueError, match=r"reuse_max must be 0 or more: -1\nhint: reuse_max=20"):
        ResumeManager(tmp_path, reuse_max=-1)


def test_of_a_leaf_that_changed_a_little_the_other_pieces_are_shared(tmp_path):
    options = SaveOptions(piece_bytes_max=2 << 20)
    before = np.zeros((4 * ROWS, 1024), np.float32)
    after = before.copy()
    after[ROWS, 7] = 1.0
    states = {1: {"table": jnp.asarray(before)}, 2: {"table": jnp.asarray(after)}}
    reports = save_all(tmp_path, states, options=options)
    assert reports[1].reused_nbytes == 6 << 20
    reused = jaxshard.open(tmp_path / "step_00000002")["table"].info.reused
    assert reused == (3, 6 << 20, 1)
    assert_sound(tmp_path, states)


def test_a_resumed_run_shares_with_the_step_it_came_from(tmp_path):
    save_all(tmp_path, {1: state(1)})
    (report,) = save_all(tmp_path, {2: state(2)})
    assert report.reused_nbytes == 4 << 20


def test_another_grid_is_written(tmp_path):
    save_all(tmp_path, {1: {"w": big(1.0)}})
    assert jaxshard.open(tmp_path / "step_00000001")["w"].info.piece_shape == (ROWS, 1024)
    sharded = jax.device_put(big(1.0), on(mesh((2,)), "a", None))
    options = SaveOptions(piece_bytes_max=1 << 20)
    (report,) = save_all(tmp_path, {2: {"w": sharded}}, options=options)
    assert report.reused_nbytes == 0
    (report,) = save_all(tmp_path, {3: {"w": sharded}}, options=SaveOptions(compression="zstd"))
    assert report.reused_nbytes == 0
    assert_sound(tmp_path, {1: {"w": big(1.0)}, 2: {"w": sharded}, 3: {"w": sharded}})


def test_memory_shares_nothing_but_works():
    tree = state(1)
    root = "memory://reuse"
    with ResumeManager(root, keep=Keep(), frozen="base/**") as run:
        run.resume(tree)
        reports = [run.save(s, {**tree, "count": s}, wait=True).report for s in (1, 2, 3)]
    assert [r.reused_nbytes for r in reports] == [0, 0, 0]
    assert jaxshard.verify(f"{root}/step_00000003").ok
    last = {**tree, "count": 3}
    jaxshard.testing.assert_trees_bitwise_equal(jaxshard.load(f"{root}/step_00000003", last), last)


# Without a look at the values


@pytest.fixture
def copies(monkeypatch):
    """Bytes that snapshots copied."""
    found = []
    copy = _snapshot._copy

    def counting(part):
        found.append(part.nbytes)
        return copy(part)

    monkeypatch.setattr(_snapshot, "_copy", counting)
    return found


@pytest.mark.parametrize("by", ["the same arrays", "frozen"])
def test_what_cannot_have_changed_is_not_even_copied_once_it_was_found_equal(tmp_path, copies, by):
    base = state(1)["base"]
    again = lambda: base if by == "the same arrays" else state(1)["base"]  # noqa: E731
    states = {step: {"base": again(), "lora": big(step)} for step in (1, 2, 3, 4)}
    frozen = ["base/*"] if by == "frozen" else ()
    save_all(tmp_path, states, frozen=frozen, options=SaveOptions(snapshot="copy"))
    assert sum(copies) == (6 + 6 + 2 + 2) << 20
    assert_sound(tmp_path, states)


def test_what_is_frozen_and_was_not_equal_from_the_first_is_never_taken_unseen(tmp_path, caplog):
    """A pattern that catches too much costs a look at each save, and nothing else."""
    states = {step: state(step) for step in range(1, 5)}
    options = SaveOptions(snapshot="copy")
    save_all(tmp_path, states, frozen="**", options=options)
    assert_sound(tmp_path, states)
    assert "2 leaves are frozen, and not what they were at step 1" in caplog.text


def test_what_is_frozen_and_changes_later_is_told_when_it_is_written_anew(tmp_path, caplog):
    states = {step: state(step) for step in range(1, 6)}
    for step in (3, 4, 5):
        states[step]["base"]["a"] = big(7.0)
    options = SaveOptions(snapshot="copy")
    save_all(tmp_path, states, frozen="base/**", reuse_max=2, options=options)
    assert_sound(tmp_path, {1: states[1], 2: states[2], 4: states[4], 5: states[5]})
    stale = jaxshard.load(tmp_path / "step_00000003")  # that is what frozen= asks for
    assert stale["base"]["a"][0, 0] == 0
    said = [r.getMessage() for r in caplog.records if "is frozen" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path}/step_00000004: 'base/a' is frozen")
    assert "earlier steps may hold older values" in said[0]


def test_numpy_arrays_are_always_looked_at(tmp_path):
    """They can change in place, and a look at them copies nothing from a device."""
    values = np.zeros((ROWS, 1024), np.float32)
    with ResumeManager(tmp_path, keep=Keep(), frozen="**") as run:
        run.resume({"w": values})
        for step in (1, 2, 3, 4):
            values[0, 0] = step == 4
            run.save(step, {"w": values}, wait=True)
    assert jaxshard.load(tmp_path / "step_00000004")["w"][0, 0] == 1


def test_what_is_frozen_is_looked_at_where_that_copies_nothing(tmp_path, caplog):
    """So that a leaf that is called frozen, and is not, is saved as it is, and said."""
    states = {1: state(1), 2: state(2), 3: state(3)}
    states[2]["base"]["a"] = states[3]["base"]["a"] = big(7.0)
    save_all(tmp_path, states, frozen="base/**")
    assert_sound(tmp_path, states)
    (warning,) = [r.getMessage() for r in caplog.records if "frozen" in r.getMessage()]
    assert warning.startswith(f"{tmp_path}/step_00000002: 'base/a' is frozen, and not what it was")
    assert "at step 1" in warning
    assert warning.endswith("hint: frozen= is for what training never changes")


def test_a_pattern_that_freezes_nothing_is_said_once(tmp_path, caplog):
    save_all(tmp_path, {1: state(1), 2: state(2), 3: state(3)}, frozen=["bose/**", "base/**"])
    said = [r.getMessage() for r in caplog.records if "frozen" in r.getMessage()]
    assert said == [f"{tmp_path}: frozen 'bose/**' matches no leaf"]


def test_the_same_array_is_not_held(tmp_path):
    """A weak reference only: what was donated or dropped is freed."""
    tree = state(1)
    with ResumeManager(tmp_path) as run:
        tree, _ = run.resume(tree)
        run.save(1, tree, wait=True)
        earlier = run._writer.sharing.earlier
        assert earlier.marks["lora"]() is tree["lora"]
        del tree
        assert earlier.marks["lora"]() is None


# When it cannot be


@pytest.mark.parametrize("code", [errno.EMLINK, errno.EPERM, errno.EXDEV])
@pytest.mark.parametrize("frozen", ["", "base/**"])
def test_where_links_are_not_made_all_is_written(tmp_path, monkeypatch, code, frozen):
    """Out of the array, or of the file of the step before where nobody has looked at that."""

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    states = {step: state(step) for step in (1, 2, 3)}
    link = os.link
    monkeypatch.setattr(os, "link", lambda a, b: refuse() if "/data/" in str(a) else link(a, b))
    options = SaveOptions(snapshot="copy")
    reports = save_all(tmp_path, states, frozen=frozen or (), options=options)
    assert [r.reused_nbytes for r in reports] == [0, 0, 0]
    assert len({piece(tmp_path, step, "base/a").stat().st_ino for step in states}) == 3
    assert_sound(tmp_path, states)


def test_what_the_step_before_has_lost_is_written(tmp_path):
    states = {step: state(step) for step in (1, 2)}
    with ResumeManager(tmp_path, keep=Keep()) as run:
        run.resume(states[1])
        run.save(1, states[1], wait=True)
        piece(tmp_path, 1, "base/a").unlink()
        os.truncate(piece(tmp_path, 1, "base/b"), 1 << 20)
        assert run.save(2, states[2], wait=True).report.reused_nbytes == 0
    assert_sound(tmp_path, {2: states[2]})


@pytest.mark.parametrize("wait", [False, True])
def test_what_nobody_looked_at_and_is_lost_fails_one_save_at_most(tmp_path, caplog, wait):
    """With `wait` the values are still there: they are saved after all."""
    base = state(0)["base"]
    states = {step: {"base": base, "lora": big(step)} for step in (1, 2, 3, 4)}
    with ResumeManager(tmp_path, keep=Keep()) as run:
        run.resume(states[1])
        for step in (1, 2):
            run.save(step, states[step], wait=True)
        piece(tmp_path, 2, "base/a").unlink()
        if wait:
            assert run.save(3, states[3], wait=True).report.reused_nbytes == 0
            assert "step 3 is saved again, sharing nothing: leaf 'base/a'" in caplog.text
        else:
            error = run.save(3, states[3]).exception()
            assert "'base/a'" in str(error)
            assert "the step before has lost it" in str(error)
            assert not (tmp_path / "step_00000003/manifest.json").exists()
        assert run.save(4, states[4], wait=True).report.reused_nbytes == (4 << 20 if wait else 0)
    assert_sound(tmp_path, {3: states[3], 4: states[4]} if wait else {4: states[4]})


def test_what_was_marked_bad_is_not_shared(tmp_path):
    """Somebody has looked at its files, and found one damaged."""
    states = {step: state(step) for step in (1, 2, 3)}
    with ResumeManager(tmp_path, keep=Keep()) as run:
        run.resume(state(0))
        for step in (1, 2):
            run.save(step, states[step], wait=True)
        run.mark_bad(2, "a bad sector")
        assert run.save(3, states[3], wait=True).report.reused_nbytes == 0


def test_a_damaged_table_of_the_step_before_is_no_obstacle(tmp_path):
    states = {step: state(step) for step in (1, 2)}
    save_all(tmp_path, {1: states[1]})
    with ResumeManager(tmp_path, keep=Keep()) as run:
        run.resume(state(0))
        earlier = run._writer.sharing.earlier
        earlier.source.__dict__.pop("tables", None)  # as if nothing had been read yet
        (table,) = tmp_path.glob("step_00000001/a-*/tables/0/p00000.bin")
        table.write_bytes(b"damaged")
        assert run.save(2, states[2], wait=True).report.reused_nbytes == 0
    assert_sound(tmp_path, {2: states[2]})


def test_the_space_that_is_needed_is_that_of_what_changed(tmp_path, monkeypatch):
    from jaxshard import _store

    states = {step: state(step) for step in (1, 2, 3)}
    free = {1: 64 << 20, 2: 64 << 20, 3: 4 << 20}  # of which 2 MiB change, and 1 is spare
    now = []
    monkeypatch.setattr(_store.LocalStore, "free_bytes", lambda _: free[now[-1]])
    with ResumeManager(tmp_path, keep=Keep()) as run:
        run.resume(states[1])
        for step, tree in states.items():
            now.append(step)
            run.save(step, tree, wait=True)
    assert_sound(tmp_path, states)


def test_sync_covers_the_directories_of_links(tmp_path, monkeypatch):
    """A second name is durable once its directory is synced."""
    synced = set()
    sync = _syncing._durable.sync_dir
    monkeypatch.setattr(
        _syncing._durable, "sync_dir", lambda path: (synced.add(str(path)), sync(path))[1]
    )
    save_all(tmp_path, {step: state(step) for step in (1, 2)})
    assert str(piece(tmp_path, 2, "base/a").parent) in synced


def test_a_pattern_that_is_none_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="braces must be paired"):
        ResumeManager(tmp_path, frozen="{a")
    assert not (tmp_path / "run.json").exists()


def test_what_all_go_together_is_freed_once(tmp_path):
    save_all(tmp_path, {step: {"base": state(0)["base"]} for step in (1, 2)})
    with ResumeManager(tmp_path, keep=Keep()) as run:
        run.save(3, {"other": jnp.zeros(3)}, wait=True)
    dry = jaxshard.prune(tmp_path, keep=Keep(last=1), dry_run=True).nbytes
    assert 4 << 20 <= dry < 5 << 20
    assert jaxshard.prune(tmp_path, keep=Keep(last=1)).nbytes == dry


# What is said of it


def cli(*arguments: str) -> str:
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_ledger_ls_and_show_say_what_is_shared(tmp_path):
    save_all(tmp_path, {step: state(step) for step in (1, 2, 3)})
    lines = [
        json.loads(x)
        for f in (tmp_path / "events").iterdir()
        for x in f.read_text().split("\n")
        if x
    ]
    assert [e["reused"] for e in lines if e["event"] == "save"] == [0, 4 << 20, 4 << 20]
    listed = cli("ls", str(tmp_path))
    assert listed.count("4.0 MiB of it unchanged when it was saved") == 2
    rows = json.loads(cli("ls", str(tmp_path), "--json"))["steps"]
    assert [row["reused_nbytes"] for row in rows] == [0, 4 << 20, 4 << 20]
    shown = cli("show", f"{tmp_path}@3")
    assert "unchanged since the step before: 4.0 MiB" in shown
    assert re.search(r"base/a .* array, unchanged +2.0 MiB", shown)
    shown = json.loads(cli("show", f"{tmp_path}@3", "--json"))
    assert shown["reused_nbytes"] == 4 << 20
    by_name = {leaf["name"]: leaf for leaf in shown["leaves"]}
    for name, found in (("base/a", (2 << 20, 2)), ("lora", (0, 0))):
        assert (by_name[name]["reused_nbytes"], by_name[name]["reused_saves"]) == found


def test_prune_counts_what_it_frees(tmp_path):
    save_all(tmp_path, {step: state(step) for step in (1, 2, 3)})
    used = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file())
    expected = jaxshard.prune(tmp_path, keep=Keep(last=1), dry_run=True).nbytes
    report = jaxshard.prune(tmp_path, keep=Keep(last=1))
    assert report.nbytes == expected
    assert len(report.steps) == 2
    assert 4 << 20 <= report.nbytes < 5 << 20 < used  # lora of both; base stays
    assert_sound(tmp_path, {3: state(3)})


def test_a_copy_of_a_run_is_whole(tmp_path):
    states = {step: state(step) for step in (1, 2)}
    save_all(tmp_path / "run", states)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert_sound(tmp_path / "copy", states)


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    history=st.lists(st.sets(st.sampled_from("abc")), min_size=2, max_size=7),
    last=st.integers(1, 3),
    reuse_max=st.integers(0, 3),
)
def test_any_history_comes_back(tmp_path_factory, history, last, reuse_max):
    """Whatever changes, is kept and is shared: each step that is there is what was saved."""
    root = tmp_path_factory.mktemp("run")
    shape = (256, 1025)
    values = {name: np.full(shape, i, np.float32) for i, name in enumerate("abc")}
    saved = {}
    options = SaveOptions(piece_bytes_max=1 << 19, pack_below=1 << 16)
    with ResumeManager(root, keep=Keep(last=last), reuse_max=reuse_max, options=options) as run:
        run.resume({n: jnp.asarray(v) for n, v in values.items()})
        for step, changed in enumerate(history, 1):
            for name in changed:
                values[name] = values[name].copy()
                values[name][step % 256, -1] += 1
            saved[step] = {n: jnp.asarray(v) for n, v in values.items()}
            run.save(step, saved[step], wait=True)
        assert run.all_steps() == sorted(saved)[-last:]
    assert_sound(root, {step: saved[step] for step in sorted(saved)[-last:]})


@pytest.fixture(autouse=True)
def _stale_saves_are_meant(caplog):
    caplog.set_level(logging.WARNING)
