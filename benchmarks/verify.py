"""How fast is a checkpoint verified?

Sketch: every byte is read once and digested. One thread reads 15 GB/s from the page cache into a
buffer that stays in the processor's (`read-1`, what `cat` does; `read-2` is two threads), digests
run at 25 GB/s, checksums at 7: some 3 GB/s on one core, twice that on two. Nobody else has such a
thing; the limit is reading the same files and looking at nothing.
"""

from benchmarks import _rounds, _states
from benchmarks._process import Contender
from benchmarks._results import US, Result
from benchmarks._rounds import Ask

STATES = ("big", *(s for s in _states.NAMES if s != "big"))
READ = ("read-1", "read-2")


def run(ask: Ask) -> list[Result]:
    """Save once, then verify and read the same files in turn."""
    notes: list[str] = []
    with (
        _rounds.folder(ask.where) as folder,
        _rounds.contenders(ask.among((US, *READ)), ask.state, notes) as running,
    ):
        path = f"{folder}/checkpoint"
        nbytes = running[US].ask("save", path=path)["bytes"]

        def measure(contender: Contender) -> float:
            return float(nbytes / contender.ask("verify", path=path)["seconds"] / 1e9)

        values = _rounds.in_turn(running, ask.rounds, measure)
    return [Result("verify", ask.state, "GB/s", values, notes=notes)]


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
