"""How far does host memory rise over what the state takes?

Sketch: a save on CPU takes views and needs what is in flight (up to 128 MiB of buffers for packs
and narrow tiles, mostly nothing); a donating step behind `save_async` makes XLA copy what is
still held, so up to one more state; a copied snapshot needs its budget; a load needs the arrays
that it makes, and its budget. Each may take 64 MiB more.

Each figure comes from a fresh process: after a warm-up of about 1 MiB the growth of VmHWM from just
before the call. Pages of mapped files count in it too.
"""

import sys
from typing import Any

from benchmarks import _contenders, _measured, _rounds, _states
from benchmarks._process import AbsentError, Worker, require_installed
from benchmarks._results import US, Result
from benchmarks._rounds import Ask

STATES = ("big", *(s for s in _states.NAMES if s != "big"))
BUDGET_BYTES = 256 << 20
_MIB = 1 << 20
_SPARE_MIB = 64


class Peak:
    """One contender, for one figure."""

    def __init__(self, name: str, state: str) -> None:
        kind = _contenders.CONTENDERS[name]
        self._warm = kind("tiny")
        self._contender = kind(state)

    def save(self, path: str) -> dict[str, Any]:
        """Save."""
        self._warm.save(f"{path}-warm")
        return _grown(lambda: self._contender.save(path))

    def load(self, path: str, saved: str) -> dict[str, Any]:
        """Load what was saved before."""
        self._warm.save(f"{path}-warm")
        self._warm.load(f"{path}-warm", _states.MESH)
        return _grown(lambda: self._contender.load(saved, _states.MESH))

    def background(self, path: str, **options: Any) -> dict[str, Any]:
        """Save in the background, and let a step take the arrays over meanwhile."""
        import jax

        if options:
            self._contender.background = self._contender.jaxshard.SaveOptions(**options)
        step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
        self._warm.save_async(f"{path}-warm")()
        # Compiled, and in memory that can be donated.
        self._contender.state = jax.block_until_ready(step(self._contender.state))

        def save_and_step() -> None:
            wait = self._contender.save_async(path)
            self._contender.state = jax.block_until_ready(step(self._contender.state))
            wait()

        return _grown(save_and_step)


def _grown(call: Any) -> dict[str, Any]:
    return {"grown": _measured.peak(call)[1] / _MIB}


def run(ask: Ask) -> list[Result]:
    """All four cases (of one array of eight budgets only its load), each in a fresh process."""
    state_mib = _states.nbytes(ask.state) / _MIB
    budget_mib = BUDGET_BYTES / _MIB
    jax_ones = (US, "orbax", "orbax-tuned")
    everybody = (*jax_ones, "torch-dcp")
    copied = {"snapshot": "copy", "host_bytes_max": BUDGET_BYTES}
    _rounds.touch(3 * _states.nbytes(ask.state))
    load = (ask, "load", everybody, state_mib + budget_mib)
    if ask.state == "huge":
        return [_case(*load)]
    return [
        _case(ask, "save", everybody, 0),
        _case(ask, "save_async and a donating step", jax_ones, state_mib, do="background"),
        _case(ask, "save_async of a copy", (US,), budget_mib, do="background", **copied),
        _case(*load),
    ]


def _case(
    ask: Ask, what: str, names: tuple[str, ...], at_most_mib: float, do: str = "", **options: Any
) -> Result:
    result = Result("memory", f"{ask.state}, {what}", "MiB", {})
    with _rounds.folder(ask.where) as folder:
        for name in ask.among(names):
            try:
                require_installed(name)
            except AbsentError:
                result.notes.append(_rounds.absent(name))
                continue
            grown = [
                _one(f"{folder}/{name}{i}", name, ask.state, do or what, options)
                for i in range(ask.rounds)
            ]
            result.values[name] = grown
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if ask.state in _states.LARGE:
        result.expect(f"{US} in MiB", result.median(US), at_most=at_most_mib + _SPARE_MIB)
    return result


def _one(path: str, name: str, state: str, do: str, options: dict[str, Any]) -> float:
    if do == "load":
        with Worker("benchmarks.memory:Peak", name=name, state=state) as worker:
            worker.ask("save", path=f"{path}-saved")
        options = {"saved": f"{path}-saved"}
    with Worker("benchmarks.memory:Peak", name=name, state=state) as worker:
        return float(worker.ask(do, path=path, **options)["grown"])


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
