"""How much slower is a training step while a save runs behind it?

Sketch: a save of 120 MB writes for 0.1-0.3 s and takes a core or so meanwhile for checksums,
digests and the kernel's copies; `cp` of the same bytes takes the same copies and no digest. On two
shared cores a step of 50 ms on eight simulated devices feels either. p99 should be at most 1.1
times that under `cp`, and one save may cost 1 % of the wall time at the interval of Young and Daly.

A real step (GPT-2, AdamW, donated state) runs for some seconds; a new save begins as soon as the
last one is on the disk and deleted. The call that begins it is not in the step's time (blocking.py
is about it) but in what one save costs. With views (the default on CPU) the call is short and the
next donating step copies what it would have used again; with `snapshot="copy"` it is the other way
round.
"""

import functools
import math
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import _contenders, _rounds, _states
from benchmarks._process import Worker, require_installed
from benchmarks._results import US, Result
from benchmarks._rounds import Ask

STATES = ("mini", "mixed", "tiny-gpt2")
QUIET, CP = "no save", "cp"
COPY = "jaxshard-copy"  # SaveOptions(snapshot="copy")
_SECONDS = {"mini": 8.0, "mixed": 30.0, "tiny-gpt2": 0.5}
_MTBF_S = 4 * 3600  # a machine that fails six times a day
_COPY = 'cp -r "$1" "$2" && find "$2" -type f -exec sync -d {} +'  # durable, as the others


class Trainer:
    """A training job, and one that saves behind it."""

    def __init__(self, name: str, state: str, folder: str) -> None:
        self._job = _states.job(state)
        Path(folder).mkdir()
        self._folder = folder
        self._saves = 0
        self._begin = self._beginner(name, state)
        self._state = self._job.make()

    def _beginner(self, name: str, state: str) -> Callable[[str], Callable[[], Any]] | None:
        """What begins a save to a path and returns what waits for it."""
        if name == QUIET:
            return None
        if name == CP:
            source = f"{self._folder}/source"
            _contenders.CONTENDERS["raw-2"](state).save(source)
            return lambda path: subprocess.Popen(["/bin/sh", "-c", _COPY, "cp", source, path]).wait
        contender = _contenders.CONTENDERS[name]("tiny")  # it gets our state before each save

        def begin(path: str) -> Callable[[], Any]:
            contender.state = self._state
            wait: Callable[[], Any] = contender.save_async(path)
            contender.state = None
            return wait

        return begin

    def train(self, seconds: float) -> dict[str, Any]:
        """Train for so long; each step's time, and how many saves there were."""
        steps: list[float] = []
        saves, running = 0, None
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or not steps:
            if self._begin is not None and (running is None or not running.is_alive()):
                saves += 1
                running = self._save()
            steps.append(self._step())
        wall = time.perf_counter() - began
        if running is not None:
            running.join()
        return {"steps": steps, "wall": wall, "saves": saves}

    def _step(self) -> float:
        import jax

        began = time.perf_counter()
        self._state, loss = self._job.step(self._state, self._job.tokens)
        jax.block_until_ready((self._state, loss))
        return time.perf_counter() - began

    def _save(self) -> threading.Thread:
        """Begin a save; the thread waits for it and deletes it."""
        assert self._begin is not None
        self._saves += 1
        path = f"{self._folder}/{self._saves}"
        wait = self._begin(path)

        def finish() -> None:
            wait()
            shutil.rmtree(path)

        thread = threading.Thread(target=finish)
        thread.start()
        return thread


def run(ask: Ask) -> list[Result]:
    """Train in turn, each for some seconds."""
    names = (QUIET, CP, *ask.among((US, COPY, "orbax", "orbax-tuned")))
    answers: dict[str, list[dict[str, Any]]] = {}
    notes: list[str] = []
    _rounds.touch(_states.nbytes(ask.state) * 3 * len(names))
    with _rounds.folder(ask.where) as folder:
        starts = {
            name: functools.partial(_start, name, ask.state, f"{folder}/{i}")
            for i, name in enumerate(names)
        }
        with _rounds.started(starts, notes) as running:

            def measure(name: str) -> float:
                answer = running[name].ask("train", seconds=_SECONDS[ask.state])
                answers.setdefault(name, []).append(answer)
                return 0

            _rounds.in_turn({name: name for name in running}, ask.rounds, measure)
    return _results(ask, {name: found[1:] for name, found in answers.items()}, notes)


def _start(name: str, state: str, folder: str) -> Worker:
    require_installed(name)
    return Worker("benchmarks.behind:Trainer", name=name, state=state, folder=folder)


def _results(ask: Ask, answers: dict[str, list[dict[str, Any]]], notes: list[str]) -> list[Result]:
    def each(unit_of: Callable[[dict[str, Any]], float]) -> dict[str, list[float]]:
        return {name: [unit_of(found) for found in rounds] for name, rounds in answers.items()}

    p99 = Result("behind", f"{ask.state}, step p99", "ms", each(lambda f: _p99(f["steps"]) * 1e3))
    median = Result(
        "behind", f"{ask.state}, step median", "ms",
        each(lambda f: statistics.median(f["steps"]) * 1e3), notes=notes,
    )  # fmt: skip
    quiet = median.median(QUIET) / 1e3
    costs = each(lambda f: (f["wall"] - quiet * len(f["steps"])) / max(1, f["saves"]) * 1e3)
    del costs[QUIET]
    cost = Result("behind", f"{ask.state}, cost of one save", "ms", costs)
    if ask.state != "tiny-gpt2":
        for name in filter(answers.__contains__, (US, COPY)):
            p99.expect(f"{name} / {CP}", p99.ratio(name, CP), at_most=1.1)
        lost = cost.median(US) / 1e3
        interval = math.sqrt(2 * _MTBF_S * max(lost, 1e-3))
        cost.expect("of the wall time at the interval of Young and Daly",
                    lost / interval, at_most=0.01)  # fmt: skip
    for name, rounds in answers.items():
        steps, saves = sum(len(f["steps"]) for f in rounds), sum(f["saves"] for f in rounds)
        p99.notes.append(f"{name}: {steps} steps, {saves} saves")
    return [p99, median, cost]


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
