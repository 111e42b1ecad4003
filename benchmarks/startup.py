"""How long do the imports take, and the two commands that people type most?

Sketch: `import jax` takes half a second or more and is not ours; on top of it come our modules (a
few ms) and those of tensorstore (some 30 ms), at most 60 ms. `jaxshard ls` and `show` import
neither; Python itself takes 15 ms, click 40 ms; at most 150 ms. Whole processes are timed.
"""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import _rounds
from benchmarks._process import AbsentError, require_installed, timed
from benchmarks._results import Result
from benchmarks._rounds import Ask

STATES = ("tiny",)
JAX, IMPORT, DOORS = (
    "import jax",
    "import jax, jaxshard",
    "all that a training loop needs of jaxshard",
)
_CODE = {
    JAX: "import jax",
    IMPORT: "import jax, jaxshard",
    DOORS: "import jax; from jaxshard import save, save_async, load, ResumeManager",
    "import jax, orbax.checkpoint": "import jax, orbax.checkpoint",
    "python": "pass",
}

_RUN = """
import sys, numpy, jaxshard
with jaxshard.ResumeManager(sys.argv[1]) as run:
    run.save(1, {"w": numpy.ones((4, 4)), "step": 1}, wait=True)
"""


def run(ask: Ask) -> list[Result]:
    """Start all of them in turn."""
    notes: list[str] = []
    with _rounds.folder(ask.where) as folder:
        _milliseconds([sys.executable, "-c", _RUN, f"{folder}/run"])
        commands = {what: [sys.executable, "-c", code] for what, code in _CODE.items()}
        commands["jaxshard ls"] = [*_script(), "ls", f"{folder}/run"]
        commands["jaxshard show"] = [*_script(), "show", f"{folder}/run/step_00000001"]
        try:
            require_installed("orbax")
        except AbsentError:
            del commands["import jax, orbax.checkpoint"]
            notes.append(_rounds.absent("orbax"))
        values = _rounds.in_turn(commands, ask.rounds, _milliseconds)
    result = Result("startup", "whole processes", "ms", values, notes=notes)
    for what in (IMPORT, DOORS):
        result.expect(f"{what}, over jax, in ms", result.difference(what, JAX), at_most=60)
    for what in ("jaxshard ls", "jaxshard show"):
        result.expect(f"{what} in ms", result.median(what), at_most=150)
    return [result]


def _script() -> list[str]:
    """The command that is installed beside this Python; else the module, which is the same."""
    script = Path(sys.executable).with_name("jaxshard")
    return [str(script)] if script.exists() else [sys.executable, "-m", "jaxshard"]


def _milliseconds(command: list[str]) -> float:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return timed(subprocess.run, command, check=True, capture_output=True, env=env)[1] * 1e3


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
