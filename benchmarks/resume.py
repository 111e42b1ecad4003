"""How long from SIGKILL until the new process has done its first new step?

Sketch: Python and the imports take 2-4 s and are nobody's here; then whichever takes longer of
compiling the step and bytes / read rate, if they overlap: 3-6 s of compilation against 1.5 GB in
half a second. At most 1.2 times the longer one and 3 s beyond the imports.

A real training process (GPT-2, AdamW, `ResumeManager` or Orbax's `CheckpointManager`) is killed
in the middle of a step, and the same command is started at once. `overlapped` compiles in a thread
while the checkpoint is read. Nothing is cached but the pages of the files.
"""

import functools
import importlib
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks import _rounds, _states
from benchmarks._process import Contender, Worker, require_installed
from benchmarks._results import US, Result
from benchmarks._rounds import Ask

STATES = ("mixed", "mini", "tiny-gpt2")
OVERLAPPED = "jaxshard, overlapped"
ORBAX_OVERLAPPED = "orbax, overlapped"
_STAGES = ("python", "imports", "abstract", "restore", "compile", "step")
_SPARE_S = 3


class Training:
    """A training process; made anew, it goes on where the last one was killed.

    Attributes:
      ready: when each stage ended, on the clock of the machine.
    """

    def __init__(self, name: str, state: str, path: str) -> None:
        self.ready: dict[str, float] = {}
        self._ended("python")
        restore = _jaxshard(path) if name.startswith(US) else _orbax(path)
        self._ended("imports")
        self._job = _states.job(state)
        self._ended("abstract")
        compiling = threading.Thread(target=self._compile)
        if "overlapped" in name:
            compiling.start()
        self._state = restore(self._job)
        self._ended("restore")
        if "overlapped" not in name:
            compiling.start()
        compiling.join()
        self._ended("compile")
        self._train_once()
        self._ended("step")

    def _ended(self, stage: str) -> None:
        self.ready[stage] = time.monotonic()

    def _compile(self) -> None:
        self._step = self._job.step.lower(self._job.abstract, self._job.tokens).compile()

    def _train_once(self) -> None:
        import jax

        self._state, loss = self._step(self._state, self._job.tokens)
        jax.block_until_ready((self._state, loss))

    def train(self) -> dict[str, Any]:
        """Go on until killed."""
        while True:
            self._train_once()


def _import_what_training_needs() -> None:
    for name in ("optax", "flax.nnx"):
        importlib.import_module(name)


def _jaxshard(path: str) -> Callable[[Any], Any]:
    """Do the imports; what restores the state of a job, or makes and saves it."""
    import jax

    import jaxshard

    _import_what_training_needs()
    jax.devices()

    def resume(job: Any) -> Any:
        with jaxshard.ResumeManager(path) as run:
            state, step = run.resume(job.abstract, init=job.make)
            if not step:
                run.save(1, state, wait=True)
        return jax.block_until_ready(state)

    return resume


def _orbax(path: str) -> Callable[[Any], Any]:
    """The same for Orbax."""
    import absl.logging
    import jax
    import orbax.checkpoint as ocp

    _import_what_training_needs()
    absl.logging.set_verbosity(absl.logging.ERROR)
    jax.devices()

    def resume(job: Any) -> Any:
        with ocp.CheckpointManager(path) as manager:
            if manager.latest_step() is None:
                state = job.make()
                manager.save(1, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
            else:
                state = manager.restore(1, args=ocp.args.StandardRestore(job.abstract))
        return jax.block_until_ready(state)

    return resume


class Victim:
    """A training job that is killed again and again.

    Attributes:
      restarts: seconds of each stage, for each restart.
    """

    def __init__(self, name: str, state: str, path: str) -> None:
        require_installed(name)
        self._arguments: dict[str, Any] = {"name": name, "state": state, "path": path}
        self.restarts: list[dict[str, float]] = []
        self._worker = self._start()

    def _start(self) -> Worker:
        return Worker("benchmarks.resume:Training", **self._arguments)

    def restart(self) -> float:
        """Kill it in the middle of a step; seconds until the next process has done its first."""
        self._worker.begin("train")
        time.sleep(0.3)
        killed = time.monotonic()
        self._worker.kill()
        self._worker = self._start()
        self.restarts.append(_stages(killed, self._worker.ready))
        return sum(self.restarts[-1].values())

    def close(self) -> None:
        """End it."""
        self._worker.close()


def _stages(killed: float, at: dict[str, float]) -> dict[str, float]:
    """Seconds of each stage, from the kill on."""
    ends = [killed, *(at[stage] for stage in _STAGES)]
    return {stage: ends[i + 1] - ends[i] for i, stage in enumerate(_STAGES)}


def run(ask: Ask) -> list[Result]:
    """Kill and restart in turn."""
    notes: list[str] = []
    wanted = ask.among((US, "orbax"))
    names = (US, OVERLAPPED, *(("orbax", ORBAX_OVERLAPPED) if "orbax" in wanted else ()))
    _rounds.touch(2 * len(names) * _states.nbytes(ask.state))
    with _rounds.folder(ask.where) as folder:
        starts = {
            name: functools.partial(Victim, name, ask.state, f"{folder}/{i}")
            for i, name in enumerate(names)
        }
        with _rounds.started(starts, notes) as victims:
            values = _rounds.in_turn(victims, ask.rounds, Victim.restart)
        read_s = _read_seconds(f"{folder}/0", ask.rounds)
    total = Result("resume", f"{ask.state}, SIGKILL to first step", "s", values, notes=notes)
    counted = {name: victim.restarts[1:] for name, victim in victims.items()}
    stages = [
        Result(
            "resume", f"{ask.state}, {stage}", "s",
            {name: [restart[stage] for restart in restarts] for name, restarts in counted.items()},
        )
        for stage in _STAGES
    ]  # fmt: skip
    compile_s = stages[_STAGES.index("compile")].median(US)
    total.notes.append(f"compiling alone took {compile_s:.2f} s, reading the files {read_s:.2f} s")
    if ask.state != "tiny-gpt2":
        beyond = [sum(restart[stage] for stage in _STAGES[2:]) for restart in counted[OVERLAPPED]]
        at_most = 1.2 * max(compile_s, read_s) + _SPARE_S
        what = f"{OVERLAPPED}, beyond imports, in s"
        total.expect(what, statistics.median(beyond), at_most=at_most)
    return [total, *stages]


def _read_seconds(path: str, rounds: int) -> float:
    """How long two threads take to read the files of the run."""
    with Contender("read-2", "tiny") as reader:
        return min(float(reader.ask("verify", path=path)["seconds"]) for _ in range(rounds + 1))


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
