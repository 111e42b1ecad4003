"""How long does it take to load one part of a checkpoint, and what is read for it?

Sketch: bytes of the part / what a load reads in a second; one of the 12 layers of *big* (67 MB) in
a twelfth of the time of the whole, some 20 ms, plus the manifest. Bytes read should be at most
1.1 times the bytes needed. The whole, loaded by us, stands beside it.
"""

from benchmarks import _rounds, _states
from benchmarks._process import Contender
from benchmarks._results import US, Result
from benchmarks._rounds import ORBAX, Ask

STATES = ("big", *(s for s in _states.PART if s != "big"))
WHOLE = "jaxshard, the whole"


def run(ask: Ask) -> list[Result]:
    """Save once, then load the part in turn."""
    notes: list[str] = []
    prefix = _states.PART[ask.state]
    answer: dict[str, float] = {}
    with (
        _rounds.folder(ask.where) as folder,
        _rounds.contenders(ask.among((US, *ORBAX)), ask.state, notes) as running,
    ):
        for name, contender in running.items():
            contender.ask("save", path=f"{folder}/{name}")

        def measure(contender: Contender) -> float:
            found = contender.ask("subset", path=f"{folder}/{contender.name}", prefix=prefix)
            answer.update(found if contender.name == US else {})
            return float(found["seconds"])

        def measure_whole(contender: Contender) -> float:
            return float(contender.ask("load", path=f"{folder}/{contender.name}")["seconds"])

        values = _rounds.in_turn(running, ask.rounds, measure)
        whole = _rounds.in_turn({WHOLE: running[US]}, ask.rounds, measure_whole)
    result = Result("subset", f"{ask.state}, {prefix}", "s", {**values, **whole}, notes=notes)
    read, needed = answer["read"], answer["needed"]
    result.notes.append(f"{US} read {read / 1e6:.1f} MB, {needed / 1e6:.1f} MB were needed")
    if ask.state in _states.LARGE:
        result.expect("bytes read / bytes needed", read / needed, at_most=1.1)
    return [result]


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
