"""What does a save of a run cost when nine tenths of the weights do not change?

Sketch: what did not change is linked: some microseconds for each file. If the arrays are the very
same ones nothing is looked at; if they are other ones with the same bits they are digested, at
25 GB/s. So the tenth that is trained decides: at most 0.2 of the time and of the new bytes of a
save in which all changed.

A `ResumeManager` saves steps in turn. The time is that of its report: from the call until the step
is durable; older steps are deleted behind that.
"""

import os
from pathlib import Path
from typing import Any

from benchmarks import _rounds, _states
from benchmarks._process import Worker
from benchmarks._results import Result
from benchmarks._rounds import Ask

STATES = ("big", "big8", "tiny")
ALL, SAME, EQUAL = "all changed", "the same arrays", "equal arrays"
_LAYER = "layer000"


class Run:
    """A run whose steps are saved; one layer is trained, and all of them if asked."""

    def __init__(self, state: str, folder: str) -> None:
        import jax

        import jaxshard

        self._run = jaxshard.ResumeManager(folder, keep=jaxshard.Keep(last=2), signals=())
        self._state, self._step = self._run.resume(_states.device_state(state))
        self._trained = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
        self._copied = jax.jit(lambda tree: jax.tree.map(jax.numpy.copy, tree))

    def save(self, case: str) -> dict[str, Any]:
        """One step later: the time until it is durable, and what was written for it."""
        import jax

        if case == ALL:
            self._state = self._trained(self._state)
        else:
            others = self._copied(self._state) if case == EQUAL else self._state
            self._state = {**others, _LAYER: self._trained(self._state[_LAYER])}
        jax.block_until_ready(self._state)
        self._step += 1
        report = self._run.save(self._step, self._state, wait=True).wait()
        files = (Path(here, n).stat() for here, _, names in os.walk(report.path) for n in names)
        own = sum(file.st_size for file in files if file.st_nlink == 1)
        return {"seconds": report.seconds, "mb": own / 1e6}


def run(ask: Ask) -> list[Result]:
    """Save in turn: all changed, one layer changed."""
    mb: dict[str, list[float]] = {}
    _rounds.touch(3 * _states.nbytes(ask.state))
    with (
        _rounds.folder(ask.where) as folder,
        Worker("benchmarks.reuse:Run", state=ask.state, folder=f"{folder}/run") as worker,
    ):

        def measure(case: str) -> float:
            answer = worker.ask("save", case=case)
            mb.setdefault(case, []).append(answer["mb"])
            return float(answer["seconds"])

        cases = {name: name for name in (ALL, EQUAL, SAME)}  # unseen is what was seen to be equal
        seconds = Result("reuse", ask.state, "s", _rounds.in_turn(cases, ask.rounds, measure))
    written = Result(
        "reuse", f"{ask.state}, written", "MB", {name: found[1:] for name, found in mb.items()}
    )
    for result in (seconds, written) if ask.state in _states.LARGE else ():
        for name in (SAME, EQUAL):
            result.expect(f"{name} / {ALL}", result.ratio(name, ALL), at_most=0.2)
    return [seconds, written]


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
