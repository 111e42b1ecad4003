"""`assert_exact_resume`: proof that a training run comes back as if nothing had happened."""

import concurrent.futures
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshard._errors import bullet_list
from jaxshard._threads import cores
from jaxshard.testing._trainer import SCRIPT
from jaxshard.testing._trees import differences

Mesh = Mapping[str, int]
_SHOWN = 10
_TRAINER = "jaxshard.testing._trainer"


@dataclasses.dataclass(frozen=True, slots=True)
class ExactResume:
    """What was proved.

    Attributes:
      steps: of each run.
      kill_at: the steps after which it was killed.
      meshes: on which it came back.
      exact: whether steps after a resume on the first mesh were compared too (level L3); False if
        the step itself is not deterministic and `deterministic=False` was given.
    """

    steps: int
    kill_at: tuple[int, ...]
    meshes: tuple[Mesh | None, ...]
    exact: bool

    def __str__(self) -> str:
        kills = ", ".join(map(str, self.kill_at))
        places = " and ".join("the same mesh" if m is None else str(dict(m)) for m in self.meshes)
        beyond = f", and every step up to {self.steps} as without the kill" if self.exact else ""
        return f"killed after step {kills}; back on {places}: every bit{beyond}"


def assert_exact_resume(
    make: Callable[..., tuple[Any, Callable[[Any, int], Any]]],
    *,
    steps: int,
    kill_at: int | Sequence[int],
    meshes: Sequence[Mesh] | None = None,
    save_every: int = 1,
    deterministic: bool = True,
    timeout_s: float = 600.0,
) -> ExactResume:
    """Train, kill, resume, and compare every leaf after every step with a run that was not killed.

    Each run is a process of its own, and the kill is SIGKILL. Two runs that are not killed come
    first: where they differ, the step itself is not deterministic, and no resume can be exact.

    Checked are, on every mesh, that after the resume each leaf, keys too, has the bits that it had
    when it was saved (levels L0 and L2); and on the first mesh that from there on each step gives
    the same bits as in the run that was not killed (L3).

    Args:
      make: a function of a module or script (not a lambda, not nested) that returns the initial
        state, any pytree, and a function `(state, step) -> state` that does one update. With
        `meshes` it is called with a `jax.sharding.Mesh`, else without arguments.
      steps: how many updates each run makes.
      kill_at: after which steps to kill, each in a run of its own.
      meshes: `[{"data": 4, "model": 2}, {"data": 8}]`: training begins on the first, and comes back
        on each of them.
      save_every: steps between two saves; what came after the last save is done again.
      deterministic: False accepts a step that is not; then L3 is not checked.
      timeout_s: for each process.

    Returns:
      What was proved; `print` it.

    Raises:
      AssertionError: names the first step that differs and its leaves, or what a process died of.
      ValueError: `make` cannot be found by name from another process, or numbers do not fit.

    Example:
      A file `train.py` of your own::

        def make():
            ...
            return {"params": params, "opt": opt_state, "rng": key}, update

        if __name__ == "__main__":
            print(jaxshard.testing.assert_exact_resume(make, steps=20, kill_at=[3, 11]))
    """
    kills = (kill_at,) if isinstance(kill_at, int) else tuple(kill_at)
    if not kills or not all(save_every <= kill < steps for kill in kills):
        raise ValueError(
            f"assert_exact_resume: kill_at={kill_at}, save_every={save_every}, steps={steps}: "
            "expected save_every <= kill_at < steps\n"
            "hint: steps=20, kill_at=[7]"
        )
    places: tuple[Mesh | None, ...] = (None,) if meshes is None else tuple(meshes)
    with tempfile.TemporaryDirectory(prefix="jaxshard-exact-") as folder:
        trainer = _Trainer(Path(folder), make, steps, save_every, timeout_s)
        with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
            both = [pool.submit(trainer.train, name, places[0]) for name in ("whole", "again")]
            killed = [pool.submit(trainer.train, f"kill{k}", places[0], k) for k in kills]
            whole, again = (future.result() for future in both)
        unequal = _first_difference(again, whole)
        if unequal is not None and deterministic:
            raise AssertionError(
                f"the step itself is not deterministic: two runs that were not killed differ\n"
                f"{unequal}\nhint: look at the order of reductions, at threads in the data "
                "pipeline, or at keys that are not in the state; deterministic=False skips this"
            )
        for kill, future in zip(kills, killed, strict=True):
            before = future.result()
            for number, place in enumerate(places):
                after = trainer.train(trainer.copied(f"kill{kill}", number), place)
                _compare(kill, place, before, after, None if unequal or number else whole)
    return ExactResume(steps, kills, places, exact=unequal is None)


class _Trainer:
    """Starts processes that train."""

    def __init__(
        self, folder: Path, make: Callable[..., Any], steps: int, save_every: int, timeout_s: float
    ) -> None:
        self._folder = folder
        self._make = _named(make)
        self._steps = steps
        self._save_every = save_every
        self._timeout_s = timeout_s

    def copied(self, name: str, number: int) -> str:
        """A run as it was left, for another process to come back to."""
        copy = f"{name}-{number}"
        shutil.copytree(self._folder / name, self._folder / copy)
        return copy

    def train(self, name: str, mesh: Mesh | None, kill_at: int | None = None) -> list[Any]:
        """What each step of one process gave."""
        log = self._folder / f"{name}.jsonl"
        orders = self._folder / f"{name}.json"
        orders.write_text(
            json.dumps(
                {
                    **self._make,
                    "root": str(self._folder / name),
                    "log": str(log),
                    "steps": self._steps,
                    "save_every": self._save_every,
                    "kill_at": kill_at,
                    "mesh": None if mesh is None else dict(mesh),
                    "sys_path": sys.path,
                    "argv": [self._make["file"] or "", *sys.argv[1:]],
                }
            )
        )
        done = subprocess.run(  # noqa: S603  (the user's own training, which is what is asked for)
            [sys.executable, "-m", _TRAINER, str(orders)],
            capture_output=True,
            text=True,
            check=False,
            timeout=self._timeout_s,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        expected = 0 if kill_at is None else -signal.SIGKILL
        if done.returncode != expected:
            raise AssertionError(
                f"a process that trains ended with {done.returncode}, expected {expected}:\n"
                f"{done.stderr[-4000:]}"
            )
        return [json.loads(line) for line in log.read_text().splitlines()]


def _named(make: Callable[..., Any]) -> dict[str, Any]:
    """How another process finds a function."""
    name = getattr(make, "__qualname__", "<unknown>")
    module = getattr(make, "__module__", "__main__")
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == SCRIPT:
        raise RuntimeError(
            "assert_exact_resume: the script calls it while other processes import it\n"
            'hint: put the call below if __name__ == "__main__":'
        )
    if "<" in name or (module == "__main__" and not Path(file or "").is_file()):
        raise ValueError(
            f"make: expected a function of a module or script, found {make!r}\n"
            "hint: another process has to find it by its name: def make(): at the top of a file"
        )
    return {"module": None if module == "__main__" else module, "file": file, "name": name}


def _compare(
    kill: int, place: Mesh | None, before: list[Any], after: list[Any], whole: list[Any] | None
) -> None:
    """Compare a run that was killed and has come back.

    Raises:
      AssertionError: it did not come back exactly.
    """
    where = "" if place is None else f" on {dict(place)}"
    begin = after[0]
    saved = {line["step"]: line["leaves"] for line in before}
    lines = differences(begin["leaves"], saved[begin["step"]])
    if lines:
        raise AssertionError(
            bullet_list(
                f"killed after step {kill}: what came back{where} is not what was saved at step "
                f"{begin['step']} (L0):",
                _shortened(lines),
            )
        )
    if whole is None:
        return
    wanted = [line for line in whole if line["kind"] == "step" and line["step"] > begin["step"]]
    unequal = _first_difference(after[1:], wanted)
    if unequal is not None:
        raise AssertionError(
            f"killed after step {kill}, back at step {begin['step']}{where}: not as without the "
            f"kill (L3)\n{unequal}\nhint: something that the step depends on is not in the state: "
            "the data, a key, a counter, a cache"
        )


def _first_difference(found: list[Any], expected: list[Any]) -> str | None:
    """The first step that differs, and its leaves; None if all are equal."""
    for mine, other in zip(found, expected, strict=True):
        lines = differences(mine["leaves"], other["leaves"])
        if lines:
            return bullet_list(f"first at step {other['step']}:", _shortened(lines))
    return None


def _shortened(lines: list[str]) -> tuple[str, ...]:
    more = len(lines) - _SHOWN
    return tuple(lines[:_SHOWN]) + ((f"and {more} more",) if more > 0 else ())
