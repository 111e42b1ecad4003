"""`jaxshard.testing`: trainings come back exactly, and what does not is named."""

import importlib
import os
import subprocess
import sys
import textwrap

import exact_makes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import REPOSITORY, mesh, on

from jaxshard.testing import assert_exact_resume, assert_trees_bitwise_equal

EXAMPLES = REPOSITORY / "examples" / "exact"
sys.path.insert(0, str(EXAMPLES))  # also of the processes that train
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py"))
assert len(NAMES) >= 4


@pytest.fixture(params=NAMES)
def make(request, monkeypatch):
    """What an example trains, on eight simulated devices."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    if "equinox" in request.param:
        pytest.importorskip("equinox")
    return importlib.import_module(request.param).make


def test_an_example_comes_back_exactly_and_on_another_mesh(make):
    """With three steps between saves and accumulations, it comes back within one."""
    meshes = [{"data": 4}, {"data": 8}]
    proof = assert_exact_resume(make, steps=8, kill_at=5, save_every=4, meshes=meshes)
    assert str(proof) == (
        "killed after step 5; back on {'data': 4} and {'data': 8}: every bit, and every step up to "
        "8 as without the kill"
    )


@pytest.mark.soak
def test_an_example_comes_back_exactly_from_ten_kills(make):
    kills = np.random.default_rng(5).choice(np.arange(1, 30), 10, replace=False)
    assert_exact_resume(make, steps=30, kill_at=[int(k) for k in kills])


@pytest.mark.soak
def test_an_example_comes_back_on_any_mesh(make):
    meshes = [{"data": n} for n in (4, 8, 2, 1)]
    assert_exact_resume(make, steps=6, kill_at=[2, 5], meshes=meshes)


@pytest.mark.soak
def test_an_example_runs_as_its_head_says(make):
    file = importlib.import_module(make.__module__).__file__
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.stdout.startswith("killed after step 5, 13; back on {'data': 4} and {'data': 8}")


def test_what_is_not_in_the_state_is_noticed_at_the_first_step_that_needs_it():
    with pytest.raises(AssertionError) as caught:
        assert_exact_resume(exact_makes.hidden_counter, steps=6, kill_at=3)
    assert str(caught.value) == (
        "killed after step 3, back at step 3: not as without the kill (L3)\n"
        "first at step 4:\n  - 'w': other bits\n"
        "hint: something that the step depends on is not in the state: the data, a key, a counter, "
        "a cache"
    )


def test_a_step_that_is_not_deterministic_is_told_from_a_resume_that_is_not_exact():
    with pytest.raises(AssertionError) as caught:
        assert_exact_resume(exact_makes.by_chance, steps=4, kill_at=2)
    text = str(caught.value)
    assert text.startswith("the step itself is not deterministic: two runs that were not killed")
    assert "first at step 1:\n  - 'w': other bits\nhint: look at the order of reductions" in text
    proof = assert_exact_resume(exact_makes.by_chance, steps=4, kill_at=2, deterministic=False)
    assert str(proof) == "killed after step 2; back on the same mesh: every bit"


def test_a_process_that_dies_of_something_else_says_of_what():
    with pytest.raises(AssertionError, match="ended with 1, expected 0") as caught:
        assert_exact_resume(exact_makes.breaks, steps=4, kill_at=2)
    assert "ZeroDivisionError: of its own" in str(caught.value)


def test_a_script_can_prove_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import jax.numpy as jnp
        import jaxshard.testing

        def make():
            return {"w": jnp.zeros(3)}, lambda state, step: {"w": state["w"] + step}

        if __name__ == "__main__":
            print(jaxshard.testing.assert_exact_resume(make, steps=3, kill_at=[1, 2]))
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.stdout.startswith("killed after step 1, 2; back on the same mesh: every bit, and")


def test_a_script_with_arguments_gets_them_in_every_process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import jax.numpy as jnp
        import jaxshard.testing

        size = int(sys.argv[1])

        def make():
            return {"w": jnp.zeros(size)}, lambda state, step: {"w": state["w"] + step}

        if __name__ == "__main__":
            jaxshard.testing.assert_exact_resume(make, steps=3, kill_at=2)
        """)
    )
    subprocess.run([sys.executable, str(script), "5"], check=True,
                   env={"PYTHONPATH": str(REPOSITORY)})  # fmt: skip


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import jaxshard.testing

        def make():
            return {"w": 1}, lambda state, step: state

        jaxshard.testing.assert_exact_resume(make, steps=3, kill_at=2)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          check=False, env={"PYTHONPATH": str(REPOSITORY)})  # fmt: skip
    assert done.returncode == 1
    assert 'hint: put the call below if __name__ == "__main__":' in done.stderr
    done = subprocess.run([sys.executable, "-"], input=script.read_text(), capture_output=True,
                          text=True, check=False, env={"PYTHONPATH": str(REPOSITORY)})  # fmt: skip
    assert "expected a function of a module or script, found <function make" in done.stderr


@pytest.mark.parametrize(
    "numbers", [{"kill_at": []}, {"kill_at": 4}, {"kill_at": 1, "save_every": 2}]
)
def test_numbers_that_do_not_fit_are_told_at_once(numbers):
    with pytest.raises(ValueError, match=r"expected save_every <= kill_at < steps\nhint: "):
        assert_exact_resume(exact_makes.breaks, steps=4, **numbers)


def test_a_function_that_no_other_process_can_find_is_told_at_once():
    with pytest.raises(ValueError, match="expected a function of a module or script, found <func"):
        assert_exact_resume(lambda: None, steps=4, kill_at=2)  # type: ignore[arg-type,return-value]


# Trees --------------------------------------------------------------------------------------


def test_equal_trees_are_equal_wherever_they_lie():
    grid = mesh((4,))
    w = np.arange(16.0, dtype=np.float32)
    mine = {"w": jax.device_put(w, on(grid, "a")), "key": jax.random.key(1), "n": 1, "none": None}
    other = {"w": jnp.asarray(w), "key": jax.random.key(1), "n": 1, "none": None}
    assert_trees_bitwise_equal(mine, other)


def test_every_leaf_that_differs_is_named():
    with pytest.raises(AssertionError) as caught:
        assert_trees_bitwise_equal(
            {"a": jnp.zeros(2), "b": 0.0, "c": jnp.zeros(3), "d": np.float32(0), "more": 1},
            {"a": -jnp.zeros(2), "b": -0.0, "c": jnp.zeros(4), "d": np.float64(0), "less": 1},
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "6 leaves differ:"
    assert "  - 'a': other bits" in lines
    assert any(line.startswith("  - 'c': expected float32[4]") for line in lines)
    assert "  - 'less': expected, found nothing" in lines
    assert "  - 'more': found, expected nothing" in lines
