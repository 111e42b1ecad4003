"""How long does `save_async` keep the training loop, until it returns?

Sketch: on CPU a snapshot copies nothing, it takes a view of every shard: `np.asarray(shard.data)`
costs 5-9 us, so 0 ms for the 164 shards of *big*, 10-20 ms for the 2,000 of *leaves*, and
150 ms for the 16,000 of *leaves8*; planning costs some 10 us a leaf. `bare-loop` is that loop and
nothing else; the target is at most twice as long. Arrays are as new in each round, as they come out
of a training step: what JAX remembers of one that was looked at before makes the second look free.
"""

from benchmarks import _rounds, _states
from benchmarks._process import Contender
from benchmarks._results import US, Result
from benchmarks._rounds import ORBAX, Ask

STATES = ("big", *(s for s in _states.NAMES if s != "big"))
BARE = "bare-loop"
_AT_MOST_MS = {"big": 20, "leaves": 60}


def run(ask: Ask) -> list[Result]:
    """Save in the background in turn; each one is waited for, outside of the clock."""
    notes: list[str] = []
    names = ask.among((US, *ORBAX, BARE))
    with (
        _rounds.folder(ask.where) as folder,
        _rounds.contenders(names, ask.state, notes) as running,
    ):

        def measure(contender: Contender) -> float:
            path = f"{folder}/{contender.name}"
            seconds: float = contender.ask("save_async", path=path)["seconds"]
            contender.ask("remove", path=path)
            return seconds * 1e3

        values = _rounds.in_turn(running, ask.rounds, measure)
    result = Result("blocking", ask.state, "ms", values, notes=notes)
    if ask.state in _AT_MOST_MS:
        result.expect("jaxshard in ms", result.median(US), at_most=_AT_MOST_MS[ask.state])
    if ask.state == "leaves8" and BARE in values:
        result.expect(f"{US} / {BARE}", result.ratio(US, BARE), at_most=2)
    if ask.state in {"big", "leaves", "leaves8", "mixed"}:
        result.expect_ratio(ORBAX, 10)
    return [result]


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
