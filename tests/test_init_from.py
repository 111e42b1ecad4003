"""Where a run begins: another run, a checkpoint, or a part of one; and how a mismatch is told."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import assert_same_tree, mesh, on

import jaxshard
from jaxshard import CorruptionError, Keep, LeafMismatchError, NotFoundError, ResumeManager


def state(seed: int, width: int = 4) -> dict:
    params = {"w": jnp.full((8, width), seed, jnp.float32), "b": jnp.zeros(width) + seed}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "rng": jax.random.key(seed)}


def save_run(root: Path, *steps: int, make=state) -> None:
    with ResumeManager(root, keep=Keep()) as run:
        run.resume(make(0))
        for step in steps:
            run.save(step, make(step), wait=True)


def events(root: Path) -> list[dict]:
    lines = [x for f in sorted((root / "events").iterdir()) for x in f.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_a_fresh_run_begins_with_the_newest_step_of_another_one(tmp_path):
    save_run(tmp_path / "old", 3, 7)
    with ResumeManager(tmp_path / "new", init_from=tmp_path / "old") as run:
        begun, step = run.resume(state(0))
        assert step == 0
        assert_same_tree(begun, state(7))
        assert list(run.steps(2)) == [1, 2]
    (fresh,) = [e for e in events(tmp_path / "new") if e["event"] == "fresh"]
    assert (fresh["init_from"], fresh["init_step"]) == (f"{tmp_path}/old/step_00000007", 7)
    assert jaxshard.open(tmp_path / "old").all_steps() == [3, 7]


def test_of_several_the_first_that_is_there(tmp_path):
    jaxshard.save(tmp_path / "b", state(5))
    jaxshard.save(tmp_path / "c", state(6))
    paths = [tmp_path / name for name in "abc"]
    with ResumeManager(tmp_path / "new", init_from=paths) as run:
        assert_same_tree(run.resume(state(0))[0], state(5))


def test_a_resumed_run_does_not_look_at_it(tmp_path):
    save_run(tmp_path / "new", 2)
    with ResumeManager(tmp_path / "new", init_from=tmp_path / "gone") as run:
        resumed, step = run.resume(state(0), mapping={"no": "such"})
        assert step == 2
        assert_same_tree(resumed, state(2))


def test_a_part_under_other_names_and_the_rest_is_fresh(tmp_path):
    """New weights for a new head, and a new optimizer."""
    save_run(tmp_path / "old", 7)

    def tuned(seed: int) -> dict:
        return {"model": {"body": state(seed)["params"], "head": jnp.ones(3)}, "opt": jnp.zeros(2)}

    with ResumeManager(tmp_path / "new", init_from=[tmp_path / "old"]) as run:
        begun, _ = run.resume(tuned(0), mapping={"params/**": "model/body/**"})
    want = tuned(0)
    want["model"]["body"] = state(7)["params"]
    assert_same_tree(begun, want)
    (fresh,) = [e for e in events(tmp_path / "new") if e["event"] == "fresh"]
    assert fresh["mapping"] == {"params/**": "model/body/**"}


def test_what_the_mapping_does_not_name_is_not_taken(tmp_path):
    """Averaged weights for the plain ones, which the checkpoint has under the same name."""
    ema = {"ema": {"w": 2 * jnp.ones(3)}, "params": {"w": jnp.ones(3)}}
    jaxshard.save(tmp_path / "old", ema)
    with ResumeManager(tmp_path / "new", init_from=tmp_path / "old") as run:
        begun, _ = run.resume({"params": {"w": jnp.zeros(3)}}, mapping={"ema/**": "params/**"})
    assert begun["params"]["w"].tolist() == [2.0] * 3


@pytest.mark.parametrize("mapping", [None, {"params/**": "params/**"}])
def test_onto_an_abstract_state_of_another_mesh(tmp_path, mapping):
    save_run(tmp_path / "old", 7)
    sharding = on(mesh((2,)), "a")
    calls = []

    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if x.ndim == 2 else None)

    def make() -> dict:
        calls.append(1)
        return state(1)

    like = {**state(0), "params": jax.tree.map(abstract, state(0)["params"])}
    with ResumeManager(tmp_path / "new", init_from=tmp_path / "old") as run:
        if mapping is None:
            begun, _ = run.resume(like, init=make)
            assert begun["params"]["w"].sharding.is_equivalent_to(sharding, 2)
            assert not calls
        else:
            begun, _ = run.resume(like, init=make, mapping=mapping)
            assert calls
            np.testing.assert_array_equal(begun["opt"][0].count, state(1)["opt"][0].count)
        np.testing.assert_array_equal(begun["params"]["w"], state(7)["params"]["w"])


def test_nnx_objects_are_updated_in_place(tmp_path):
    def make(seed: int) -> dict:
        return {"model": nnx.Linear(3, 4, rngs=nnx.Rngs(seed))}

    save_run(tmp_path / "old", 7, make=make)
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with ResumeManager(tmp_path / "new", init_from=tmp_path / "old") as run:
        begun, _ = run.resume({"model": model}, mapping={"model/**": "model/**"})
    assert begun["model"] is model
    np.testing.assert_array_equal(model.kernel[...], make(7)["model"].kernel[...])


def test_a_thinned_step_will_do(tmp_path):
    thin = Keep(last=3, thin_to="params/**", full_last=1)
    with ResumeManager(tmp_path / "old", keep=thin) as run:
        run.resume(state(0))
        for step in (1, 2):
            run.save(step, state(step), wait=True)
    with ResumeManager(tmp_path / "new", init_from=tmp_path / "old/step_00000001") as run:
        begun, _ = run.resume(state(0), mapping={"params/**": "params/**"})
    assert_same_tree(begun["params"], state(1)["params"])


# Errors


def test_nothing_there_is_never_a_silent_fresh_start(tmp_path):
    (tmp_path / "empty").mkdir()
    with ResumeManager(tmp_path / "new", init_from=[tmp_path / "a", tmp_path / "empty"]) as run:
        with pytest.raises(NotFoundError) as error:
            run.resume(state(0))
        text = str(error.value)
        assert text.startswith(
            f"{tmp_path}/new: nothing of init_from is there:\n  - {tmp_path}/a: "
        )
        assert f"\n  - {tmp_path}/empty: " in text
        assert "\nhint: init_from= names runs or checkpoints" in text


def test_damage_is_an_error_not_the_next_one(tmp_path):
    jaxshard.save(tmp_path / "a", state(5))
    jaxshard.save(tmp_path / "b", state(6))
    (pack,) = (tmp_path / "a").glob("a-*/packs/00000/c/0")
    pack.write_bytes(b"damaged")
    paths = [tmp_path / "a", tmp_path / "b"]
    with ResumeManager(tmp_path / "new", init_from=paths) as run, pytest.raises(CorruptionError):
        run.resume(state(0))


def test_all_differences_and_what_to_do(tmp_path):
    save_run(tmp_path / "old", 7)
    with ResumeManager(tmp_path / "new", init_from=tmp_path / "old") as run:
        with pytest.raises(LeafMismatchError, match="'params/w': saved") as error:
            run.resume(state(0, width=5), mapping={"params/**": "params/**"})
        assert len(error.value.mismatches) == 2
        like = state(0)
        like["params"]["head"] = jnp.ones(1)
        with pytest.raises(LeafMismatchError, match="'params/head': wanted") as error:
            run.resume(like, mapping={"params/**": "params/**"})
        assert str(error.value.hint).startswith("resume(state, mapping={saved: wanted}) says")
        with pytest.raises(LeafMismatchError) as error:
            run.resume(state(0), mapping={"params/**": "parms/**", "optt/**": "opt/**"})
        text = str(error.value)
        assert "- mapping 'optt/**' matches no leaf of what was saved; there is, for e" in text
        assert (
            "- mapping 'parms/**' matches no leaf of the state; there is, for example, 'p" in text
        )
        assert "hint: mapping={'saved/names/**': 'names/in/state/**'}" in text
        with pytest.raises(LeafMismatchError, match="mapping gives this name to more than one"):
            run.resume(state(0), mapping={"params/**": "params/w"})


def test_a_mapping_without_a_place_to_take_from_is_never_ignored(tmp_path):
    with ResumeManager(tmp_path) as run:
        with pytest.raises(ValueError, match="init_from=, which is not given\nhint: ResumeManager"):
            run.resume(state(0), mapping={"params/**": "params/**"})
        with pytest.raises(TypeError, match="expected mapping to be a dict, found list\nhint: map"):
            run.resume(state(0), mapping=["params/**"])


def test_a_report_says_with_what_a_run_began(tmp_path):
    save_run(tmp_path / "old", 7)
    with ResumeManager(tmp_path / "new", init_from=tmp_path / "old") as run:
        run.resume(state(0))
    report = jaxshard.report(tmp_path / "new")
    assert report.begun_with == f"{tmp_path}/old/step_00000007"
    assert f"  began with {tmp_path}/old/step_00000007\n" in f"{report}\n"
    assert jaxshard.report(tmp_path / "old").begun_with is None


def test_what_is_meant_for_the_command_line_is_told(tmp_path):
    save_run(tmp_path / "old", 7)
    with pytest.raises(NotFoundError, match=r"here .*/old/step_00000007"):
        jaxshard.open(f"{tmp_path}/old@7")


def test_a_mismatch_at_resume_says_how_to_go_on_with_another_model(tmp_path):
    save_run(tmp_path, 7)
    like = state(0)
    like["opt"] = optax.sgd(1e-3, momentum=0.9).init(like["params"])
    with ResumeManager(tmp_path) as run:
        with pytest.raises(LeafMismatchError) as error:
            run.resume(like)
        hint = str(error.value.hint)
        step = f"{tmp_path}/step_00000007"
        assert str(error.value).count("hint:") == 1
        assert f"begin another run, with init_from='{tmp_path}'" in hint
        assert "resume(state, mapping={'params/**': 'params/**'})" in hint
        assert f"jaxshard.load('{step}', state, …) with select= for a part" in hint
        assert "fill_missing=True" in hint
        assert "rename=" in hint
    with ResumeManager(tmp_path / "next", init_from=step) as run:  # as it says
        begun, _ = run.resume(like, mapping={"params/**": "params/**"})
        assert_same_tree(begun["params"], state(7)["params"])
