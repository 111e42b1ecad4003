"""`Keep(thin_to=)`: older steps become checkpoints of a part: sound, and not resumable."""

import errno
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from flax import nnx
from flax.training.train_state import TrainState
from support import assert_same_leaf, assert_same_tree, mesh, on

import jaxshard
from jaxshard import (
    Keep,
    ResumeManager,
    SaveOptions,
    _branching,
    _commit,
    _durable,
    _thinning,
)
from jaxshard.cli import command

THIN = Keep(last=4, thin_to="params/**", full_last=2)


def state(step: int) -> dict:
    sharded = jax.device_put(jnp.full((512, 1024), step, jnp.float32), on(mesh((2,)), "a"))
    return {
        "params": {"w": sharded, "b": jnp.arange(5) + step, "n": 3},
        "opt": {"mu": sharded + 1, "count": jnp.asarray(step)},
        "key": jax.random.key(step),
    }


def save_all(root: Path | str, steps: range, make: Any = state, **options: Any) -> None:
    options.setdefault("keep", THIN)
    with ResumeManager(root, **options) as run:
        run.resume(make(0))
        for step in steps:
            run.save(step, make(step), wait=True)


def cli(*arguments: str) -> str:
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def states_of(root: Path) -> dict[int, str]:
    rows = json.loads(cli("ls", str(root), "--json"))["steps"]
    return {row["step"]: row["state"] for row in rows}


def attempts(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.name.startswith("a-")]


@pytest.mark.parametrize("options", [SaveOptions(), SaveOptions(compression="zstd")])
def test_older_steps_keep_what_was_asked_for(tmp_path, options):
    save_all(tmp_path, range(1, 6), options=options)
    whole = states_of(tmp_path)
    assert whole == {2: "thinned", 3: "thinned", 4: "committed", 5: "committed"}
    for step in (2, 3):
        path = tmp_path / f"step_{step:08d}"
        assert set(jaxshard.open(path)) == {"params/w", "params/b", "params/n"}
        assert jaxshard.verify(path).ok
        like = {"params": state(0)["params"]}
        assert_same_tree(jaxshard.load(path, like), {"params": state(step)["params"]})
        assert attempts(path) == [jaxshard.open(path).attempt]
    for step in (4, 5):
        assert_same_tree(jaxshard.load(tmp_path / f"step_{step:08d}", state(0)), state(step))


def test_what_is_left_out_frees_its_bytes_and_the_rest_is_not_copied(tmp_path):
    save_all(tmp_path, range(1, 3))
    (before,) = tmp_path.glob("step_00000001/a-*/data/params/w/c/0/0")
    inode = before.stat().st_ino
    save_all(tmp_path, range(3, 4))
    (after,) = tmp_path.glob("step_00000001/a-*/data/params/w/c/0/0")
    assert after.stat().st_ino == inode
    assert not list(tmp_path.glob("step_00000001/a-*/data/opt"))
    used = sum(f.stat().st_size for f in tmp_path.glob("step_00000001/**/*") if f.is_file())
    assert used < (2 << 20) + 20_000


def test_it_stays_the_same_step(tmp_path):
    """When it was saved, by whom and with what does not change: rules go by it."""
    with ResumeManager(tmp_path, keep=Keep()) as run:
        run.resume(state(0))
        run.save(1, state(1), metrics={"loss": 0.5}, wait=True)
    before = jaxshard.open(tmp_path / "step_00000001")
    save_all(tmp_path, range(2, 4))
    after = jaxshard.open(tmp_path / "step_00000001")
    assert after.thinned_to == ("params/**",)
    assert (after.step, after.created, after.metadata, after.environment) == (
        before.step, before.created, before.metadata, before.environment,
    )  # fmt: skip
    assert jaxshard.open(tmp_path).best_step("loss") == 1


def test_ls_and_show_say_that_it_cannot_be_resumed_from(tmp_path):
    save_all(tmp_path, range(1, 4))
    line = next(line for line in cli("ls", str(tmp_path)).splitlines() if " 1 " in line)
    assert " thinned " in line
    assert "only params/**: not resumable" in line
    assert "thinned to params/**: cannot be resumed from" in cli("show", f"{tmp_path}@1")
    events = [
        json.loads(x) for f in (tmp_path / "events").iterdir() for x in f.read_text().splitlines()
    ]
    assert [e["names"] for e in events if e["event"] == "thin"] == [["step_00000001"]]


class Pair(NamedTuple):
    first: Any
    second: Any


def odd(step: int) -> dict:
    """What lies in packs, in all kinds, and is shared; parts of sequences and named tuples."""
    shared = jnp.arange(6.0) + step
    return {
        "list": [{"w": shared, "m": jnp.zeros(3)}, {"w": shared, "m": shared}],
        "pair": Pair({"w": jax.random.key(step)}, jnp.ones(2)),
        "text": {"w": "x" * 5000, "m": b"b"},
        "small": {"w": np.arange(9).astype(ml_dtypes.int4), "m": 1},
        "many": {"w": jnp.arange(3000.0).reshape(30, 100) + step, "m": 2.0},
        "none": {"w": None, "m": None},
        "left": {"m": [jnp.ones(1)]},
    }


@pytest.mark.parametrize(
    "options", [SaveOptions(), SaveOptions(piece_bytes_max=4096, pack_below=8192)]
)
def test_any_part_of_any_tree(tmp_path, options):
    keep = Keep(thin_to="**/w", full_last=1)
    save_all(tmp_path, range(1, 3), odd, keep=keep, options=options)
    path, want = tmp_path / "step_00000001", odd(1)
    assert jaxshard.verify(path).ok
    found = jaxshard.load(path)
    assert list(jaxshard.open(path).leaves) == [
        "list/0/w", "list/1/w", "many/w", "none/w", "pair/first/w", "small/w", "text/w",
    ]  # fmt: skip
    assert jaxshard.open(path).leaves["list/1/w"].same_as == "list/0/w"
    assert found["text"] == {"w": "x" * 5000}
    assert_same_leaf(found["pair"]["first"]["w"], want["pair"].first["w"], placement=False)
    for name in ("many", "small"):
        np.testing.assert_array_equal(found[name]["w"], np.asarray(want[name]["w"]))
    np.testing.assert_array_equal(found["list"][1]["w"], np.asarray(want["list"][1]["w"]))
    like = {"list": [{"w": want["list"][0]["w"]}, {"w": want["list"][1]["w"]}]}
    assert_same_tree(jaxshard.load(path, like, select="list/**"), like)


def test_of_a_shared_array_the_name_that_stays_gets_the_data(tmp_path):
    def tied(step: int) -> dict:
        embedding = jnp.full((512, 1024), step, jnp.float32)
        small = jnp.arange(3) + step
        return {"a": {"e": embedding, "s": small}, "b": {"e": embedding, "s": small}}

    save_all(tmp_path, range(1, 3), tied, keep=Keep(thin_to="b/**", full_last=1))
    path = tmp_path / "step_00000001"
    assert jaxshard.verify(path).ok
    assert_same_tree(jaxshard.load(path, {"b": tied(0)["b"]}), {"b": tied(1)["b"]})


def linen(step: int) -> TrainState:
    model = nn.Dense(8)
    params = model.init(jax.random.key(step), jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def test_a_train_state(tmp_path):
    save_all(tmp_path, range(1, 3), linen, keep=Keep(thin_to="params/**", full_last=1))
    path = tmp_path / "step_00000001"
    like = linen(0)
    loaded = jaxshard.load(path, like, select="params/**")
    assert_same_tree(loaded.params, linen(1).params)
    assert_same_tree(loaded.opt_state, like.opt_state)


def test_an_nnx_model(tmp_path):
    def make(step: int) -> dict:
        model = nnx.Linear(3, 4, rngs=nnx.Rngs(step))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)}

    save_all(tmp_path, range(1, 3), make, keep=Keep(thin_to="model/**", full_last=1))
    loaded = jaxshard.load(tmp_path / "step_00000001", {"model": make(0)["model"]})
    assert_same_tree(nnx.state(loaded["model"]), nnx.state(make(1)["model"]))


def test_protected_steps_stay_whole(tmp_path):
    with ResumeManager(tmp_path, keep=THIN) as run:
        run.resume(state(0))
        run.save(1, state(1), wait=True)
        run.protect(1)
        for step in (2, 3, 4):
            run.save(step, state(step), wait=True)
    assert states_of(tmp_path) == {1: "protected", 2: "thinned", 3: "committed", 4: "committed"}


def test_memory(tmp_path):
    del tmp_path
    save_all("memory://thin", range(1, 5))
    path = "memory://thin/step_00000002"
    assert jaxshard.verify(path).ok
    assert set(jaxshard.open(path)) == {"params/w", "params/b", "params/n"}


def test_nothing_stays_of_what_is_left_out_not_even_what_is_empty(tmp_path):
    """Optax keeps empty states; loading the part must not ask for them."""

    def make(step: int) -> dict:
        params = {"w": jnp.full(3, step), "nothing": {}}
        return {"params": params, "opt": optax.adamw(1e-3).init(params), "also": ()}

    save_all(tmp_path, range(1, 3), make, keep=Keep(thin_to="params/**", full_last=1))
    path = tmp_path / "step_00000001"
    like = {"params": make(0)["params"]}
    assert_same_tree(jaxshard.load(path, like), {"params": make(1)["params"]})
    assert list(jaxshard.load(path)) == ["params"]


def test_without_links_it_is_copied(tmp_path, monkeypatch):
    link = _durable.os.link

    def refuse(a, b):
        if "/data/" in str(a):
            raise OSError(errno.EPERM, "Operation not permitted")
        link(a, b)

    monkeypatch.setattr(_durable.os, "link", refuse)
    save_all(tmp_path, range(1, 5))
    path = tmp_path / "step_00000002"
    assert jaxshard.verify(path).ok
    like = {"params": state(0)["params"]}
    assert_same_tree(jaxshard.load(path, like), {"params": state(2)["params"]})


# Decided meanwhile


@pytest.mark.parametrize("at", ["before it", "within it"])
def test_what_is_protected_while_others_are_thinned_stays_whole(tmp_path, monkeypatch, at):
    save_all(tmp_path, range(1, 5), keep=Keep())
    thin, write = _thinning.thin, _thinning.write
    other = jaxshard._store.open_store(tmp_path)

    def protecting(*args):
        if at == "before it":
            monkeypatch.setattr(_thinning, "thin", thin)
            _branching.protect(other, 2)
        return thin(*args)

    def writing(job, staged):
        if at == "within it" and job.step == 2:
            _branching.protect(other, 2)
        return write(job, staged)

    monkeypatch.setattr(_thinning, "thin", protecting)
    monkeypatch.setattr(_thinning, "write", writing)
    save_all(tmp_path, range(5, 6), keep=Keep(thin_to="params/**"))
    found = states_of(tmp_path)
    assert found[2] == "protected"
    assert not jaxshard.open(tmp_path).open(2).thinned_to
    assert found[1] == "thinned"


def test_protecting_what_is_thinned_just_now_says_so(tmp_path, monkeypatch):
    save_all(tmp_path, range(1, 3), keep=Keep())
    store = jaxshard._store.open_store(tmp_path)
    add = _branching._decisions.add

    def slow(*args, **fields):
        _thinning.thin(store.child("step_00000001"), ["params/**"], _Epoch(), _nothing)
        return add(*args, **fields)

    monkeypatch.setattr(_branching._decisions, "add", slow)
    with pytest.raises(jaxshard.NotFoundError, match="expected all of step 1, found a part: par"):
        _branching.protect(store, 1)


def test_two_that_thin_do_not_mix(tmp_path, monkeypatch):
    """One that slept finds another manifest, and leaves it alone."""
    save_all(tmp_path, range(1, 3), keep=Keep())
    store = jaxshard._store.open_store(tmp_path / "step_00000001")
    write = _thinning.write

    def slept(job, staged):
        monkeypatch.setattr(_thinning, "write", write)
        _thinning.thin(store, ["params/w"], _Epoch(), _nothing)
        return write(job, staged)

    monkeypatch.setattr(_thinning, "write", slept)
    with pytest.raises((jaxshard.ConflictError, jaxshard.CheckpointReplacedError)):
        _thinning.thin(store, ["params/**"], _Epoch(), _nothing)
    assert list(jaxshard.open(store.url)) == ["params/w"]
    assert jaxshard.verify(store.url).ok


# Coming back


def test_resume_falls_back_to_whole_steps_only(tmp_path, caplog):
    save_all(tmp_path, range(1, 5))
    (piece,) = tmp_path.glob("step_00000004/a-*/data/opt/mu/c/0/0")
    piece.write_bytes(b"damaged")
    with ResumeManager(tmp_path, keep=THIN) as run:
        restored, step = run.resume(state(0))
        assert step == 3
        assert_same_tree(restored, state(3))
    (piece,) = tmp_path.glob("step_00000003/a-*/data/opt/mu/c/0/0")
    piece.write_bytes(b"damaged")
    with (
        ResumeManager(tmp_path, keep=THIN) as run,
        pytest.raises(jaxshard.CorruptionError) as error,
    ):
        run.resume(state(0))
    text = str(error.value)
    assert "none of 4 committed steps is sound" in text
    assert "step_00000001: only params/** is left of it" in text
    assert "step_00000002: only params/** is left of it" in text


def test_what_was_passed_over_is_not_the_newest_any_more(tmp_path):
    """Else new steps, with lower numbers, would be the ones that are deleted."""
    keep = Keep(last=2, thin_to="params/**", full_last=1)
    with ResumeManager(tmp_path, keep=keep) as run:
        run.resume(state(0))
        run.save(1, state(1), wait=True)
        run.protect(1)
        for step in (5, 6, 7):
            run.save(step, state(step), wait=True)
    (piece,) = tmp_path.glob("step_00000007/a-*/data/opt/mu/c/0/0")
    piece.write_bytes(b"damaged")
    with ResumeManager(tmp_path, keep=keep) as run:
        assert run.resume(state(0))[1] == 1
        assert run.latest_step() == 1
        for step in (2, 3, 4):
            run.save(step, state(step), wait=True)
        assert {2: "gone", **states_of(tmp_path)}[2] == "gone"
        assert run.all_steps() == [1, 3, 4]
    assert jaxshard.open(tmp_path).latest_step() == 4


def test_batches_that_are_left_out_stay_so_when_newer_steps_are_passed_over(tmp_path):
    keep = Keep(last=3, thin_to="params/**", full_last=1)
    with ResumeManager(tmp_path, keep=keep) as run:
        run.resume(state(0))
        run.save(1, state(1), wait=True)
        run.protect(1)
        run.rollback(1, "a spike", skip_batches=5)
        run.resume(state(0))
        for step in (2, 3):
            run.save(step, state(step), wait=True)
    (piece,) = tmp_path.glob("step_00000003/a-*/data/opt/mu/c/0/0")
    piece.write_bytes(b"damaged")
    with ResumeManager(tmp_path, keep=keep) as run:
        assert run.resume(state(0))[1] == 1
        assert run.skip_batches == 5


def test_rollback_refuses_a_part(tmp_path):
    save_all(tmp_path, range(1, 5))
    with ResumeManager(tmp_path, keep=THIN) as run:
        run.resume(state(0))
        with pytest.raises(jaxshard.NotFoundError) as error:
            run.rollback(2, "loss went up")
        assert "expected all of step 2, found a part: params/**" in str(error.value)
        assert f"hint: `jaxshard ls {tmp_path}` shows which steps are whole" in str(error.value)
        run.rollback(3, "loss went up")
        _, step = run.resume(state(0))
        assert step == 3


# When it goes wrong


def test_a_pattern_that_matches_nothing_is_said_at_the_first_save_and_once_more(tmp_path, caplog):
    """At once, and when it would have mattered; nothing is lost."""
    with ResumeManager(tmp_path, keep=Keep(last=4, thin_to="parms/**")) as run:
        run.resume(state(0))
        run.save(1, state(1), wait=True)
        said = [r.getMessage() for r in caplog.records]
        assert said == [f"{tmp_path}: thin_to 'parms/**' matches no leaf"]
        for step in range(2, 6):
            run.save(step, state(step), wait=True)
    said = [r.getMessage() for r in caplog.records][1:]
    assert len(said) == 1
    assert "steps stay whole" in said[0]
    assert "thin_to 'parms/**' matches no leaf; there is, for example, 'params/" in said[0]
    assert set(states_of(tmp_path).values()) == {"committed"}


def test_loading_all_of_a_part_says_why_it_is_not_there(tmp_path):
    save_all(tmp_path, range(1, 5))
    with pytest.raises(jaxshard.LeafMismatchError) as error:
        jaxshard.load(tmp_path / "step_00000002", state(0))
    first, *_, hint = str(error.value).splitlines()
    assert "only params/** was left of it (Keep(thin_to=)); 3 differences:" in first
    assert hint == "hint: select=['params/**']"
    found = jaxshard.load(tmp_path / "step_00000002", state(0), select=["params/**"])
    assert_same_tree(found["params"], state(2)["params"])
    assert ", thinned to params/**" in repr(jaxshard.open(tmp_path / "step_00000002"))


@pytest.mark.parametrize("what", ["packs/00000/c/0", "tables/0/p00000.bin", "data/params/w/c/0/0"])
def test_what_is_damaged_is_left_as_it_is(tmp_path, caplog, what):
    save_all(tmp_path, range(1, 3), reuse_max=0)
    (file,) = tmp_path.glob(f"step_00000001/a-*/{what}")
    data = file.read_bytes()
    file.write_bytes(bytes(b ^ 1 for b in data) if "packs" in what else data[:100])
    before = sorted(p for p in (tmp_path / "step_00000001").rglob("*"))
    save_all(tmp_path, range(3, 5), reuse_max=0)
    assert sorted(p for p in (tmp_path / "step_00000001").rglob("*")) == before
    said = [r.getMessage() for r in caplog.records if "step 1 stays whole: " in r.getMessage()]
    assert len(said) == 1  # and not tried again
    assert what in said[0]
    assert states_of(tmp_path)[2] == "thinned"


def test_a_store_that_fails_is_tried_again_at_the_next_save(tmp_path, caplog, monkeypatch):
    with ResumeManager(tmp_path, keep=THIN) as run:
        run.resume(state(0))
        for step in (1, 2):
            run.save(step, state(step), wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(_thinning, "thin", _fail)
            run.save(3, state(3), wait=True)
        assert any("will be tried again: " in r.getMessage() for r in caplog.records)
        assert states_of(tmp_path)[1] == "committed"
        run.save(4, state(4), wait=True)
    assert states_of(tmp_path) == {1: "thinned", 2: "thinned", 3: "committed", 4: "committed"}


def _fail(*args: object) -> bool:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("at", ["replace", "remove_tree"])
def test_a_crash_leaves_the_whole_or_the_part(tmp_path, monkeypatch, at):
    """Before the manifest is replaced all is there; after it the rest is removed later."""
    save_all(tmp_path, range(1, 3), keep=Keep())
    with monkeypatch.context() as patch:
        patch.setattr(_durable, at, _kill)
        patch.setattr(_commit, "abandon", lambda *_: None)  # who was killed cleans up nothing
        with pytest.raises(KeyboardInterrupt):
            _thinning.thin(
                jaxshard._store.open_store(tmp_path / "step_00000001"),
                ["params/**"],
                _Epoch(),
                _nothing,
            )
    path = tmp_path / "step_00000001"
    assert jaxshard.verify(path).ok
    assert bool(jaxshard.open(path).thinned_to) == (at == "remove_tree")
    assert len(attempts(path)) == 2
    save_all(tmp_path, range(3, 5))
    assert jaxshard.open(path).thinned_to == ("params/**",)
    assert len(attempts(path)) == 1
    assert jaxshard.verify(path).ok


def _nothing() -> None:
    pass


class _Epoch:
    def require_newest(self) -> None:
        pass


def _kill(*args: object) -> None:
    raise KeyboardInterrupt


def test_who_reads_is_told(tmp_path):
    save_all(tmp_path, range(1, 3))
    reader = jaxshard.open(tmp_path).open(1)
    save_all(tmp_path, range(3, 4))
    with pytest.raises(jaxshard.CheckpointReplacedError, match="replaced or deleted"):
        reader["opt/mu"].read()


def test_a_reader_of_the_newest_step_follows_when_that_is_thinned(tmp_path, monkeypatch):
    save_all(tmp_path, range(1, 3), keep=Keep())
    store = jaxshard._store.open_store(tmp_path / "step_00000001")
    run = jaxshard.open(tmp_path)
    opened = jaxshard._checkpoint.open_checkpoint
    first = []

    def slow(path):
        found = opened(path)
        if not first:
            first.append(_thinning.thin(store, ["params/**"], _Epoch(), _nothing))
        return found

    monkeypatch.setattr(jaxshard._checkpoint, "open_checkpoint", slow)
    like = {"params": state(0)["params"]}
    assert_same_tree(run.load(like, step=1, select="params/**"), {"params": state(1)["params"]})


def test_arguments():
    with pytest.raises(ValueError, match="thin_to has no pattern\nhint: Keep"):
        Keep(thin_to=[])
    with pytest.raises(ValueError, match="braces must be paired"):
        Keep(thin_to="{a")
    with pytest.raises(ValueError, match="full_last=3 is for thin_to=, which is not given\nhint"):
        Keep(full_last=3)
    with pytest.raises(
        ValueError, match=r"full_last must be at least 1: 0\nhint: Keep\(full_last=3"
    ):
        Keep(thin_to="params/**", full_last=0)


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.WARNING)
