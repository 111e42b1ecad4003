"""The wheel, installed in an environment of its own with what it declares, works there."""

import subprocess
import sys
from pathlib import Path

from support import REPOSITORY

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, jaxshard, pathlib
assert "site-packages" in jaxshard.__file__, jaxshard.__file__
state = {"w": jnp.arange(6.0).reshape(2, 3), "k": jax.random.key(3), "n": 10**30}
jaxshard.save("ckpt", state)
back = jaxshard.load("ckpt", state)
assert np.array_equal(back["w"], state["w"]) and back["n"] == 10**30
assert jaxshard.verify("ckpt").ok
assert (pathlib.Path(jaxshard.__file__).parent / "py.typed").exists()
print("works")
"""


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    python = str(tmp_path / "venv/bin/python")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), cwd=REPOSITORY)
    (wheel,) = tmp_path.glob("jaxshard-*.whl")
    _run(sys.executable, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    _run(*pip, str(wheel), cwd=tmp_path)
    assert _run(python, "-c", SCRIPT, cwd=tmp_path).strip() == "works"
    assert "flax" not in _run(python, "-m", "pip", "list", cwd=tmp_path)
