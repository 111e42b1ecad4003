"""What a person reads who mistyped something: the place, what was expected, and what to do."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support import P, mesh

import jaxshard
from jaxshard import CorruptionError, LeafMismatchError, ResumeManager

STATE = {"params": {"kernel": np.ones((4, 2), np.float32), "bias": np.zeros(2)}, "step": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    jaxshard.save(tmp_path / "ckpt", STATE)
    return tmp_path / "ckpt"


@pytest.mark.parametrize("like", [None, STATE], ids=["without like", "onto like"])
def test_each_pattern_of_select_must_match(saved: Path, like: object) -> None:
    with pytest.raises(LeafMismatchError, match=r"select 'opt/\*\*' matches no leaf"):
        jaxshard.load(saved, like, select=["params/**", "opt/**"])
    with pytest.raises(LeafMismatchError, match=r"'params' matches no leaf; did you mean 'params/"):
        jaxshard.load(saved, like, select="params")


def test_a_rename_or_rule_that_matches_nothing_is_named(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jaxshard.load(saved, rename={"prams/**": "p/**"})
    jaxshard.load(saved, mesh=mesh((2,)), rules=[("kernel/**", P())])
    assert "the pattern 'prams/**' matches no leaf" in caplog.text
    assert "the pattern 'kernel/**' matches no leaf" in caplog.text


def test_the_hint_has_only_what_would_help(saved: Path) -> None:
    with pytest.raises(LeafMismatchError, match="1 difference between") as error:
        jaxshard.load(saved, {"params": STATE["params"]})
    assert error.value.hint == "change like, or ask for the difference: select= for a part"


def test_arguments_of_another_type_are_told_apart(saved: Path) -> None:
    with pytest.raises(TypeError, match=r"hint: the path comes first: save\(path, tree\)"):
        jaxshard.save(STATE, str(saved))
    with pytest.raises(TypeError, match=r"mesh: expected a jax.sharding.Mesh, found tuple"):
        jaxshard.load(saved, mesh=(2, 4))
    with pytest.raises(TypeError, match=r"rules: expected a list of \(pattern, PartitionSpec\)"):
        jaxshard.load(saved, mesh=mesh((2,)), rules={"kernel": P()})


def test_a_name_that_is_not_there_offers_others(saved: Path) -> None:
    with pytest.raises(KeyError, match=r"is no leaf of .*did you mean one of .*params/kernel"):
        jaxshard.open(saved)["param/kernel"]
    with pytest.raises(IndexError, match=r"index 7 is outside of the shape \(4, 2\)"):
        jaxshard.open(saved)["params/kernel"].read(7)


def test_a_report_of_damage_is_false_and_an_error_names_the_checkpoint(saved: Path) -> None:
    assert jaxshard.verify(saved)
    (pack,) = saved.glob("a-*/packs/00000/c/0")
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    pack.write_bytes(data)
    assert not jaxshard.verify(saved)
    with pytest.raises(
        CorruptionError, match=rf"{saved}: leaf .*\nhint: jaxshard.verify\('{saved}"
    ):
        jaxshard.load(saved)


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    with (
        ResumeManager(tmp_path / "run") as run,
        pytest.raises(TypeError, match="metrics: expected 'loss' to be a number, found"),
    ):
        run.save(1, STATE, metrics={"loss": jnp.ones(2)})


def test_a_save_into_a_run_that_was_not_resumed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ResumeManager(tmp_path / "run") as run:
        run.save(1, STATE, wait=True)
    with ResumeManager(tmp_path / "run") as run:
        run.save(2, STATE, wait=True)
    assert "has step 1, and step 2 is saved without resume()" in caplog.text
