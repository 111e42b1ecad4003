"""How long does a save take, until it is durable?

Sketch: bytes / bandwidth of buffered write + fsync (0.35-1.3 GB/s on a virtual disk, up to what the
page cache takes), and files x fsync (1-3 ms each, in parallel): *big* is 96 files of 8 MiB and one
pack, so the disk decides; *small* and *many* are one pack, so assembling in Python decides.
The limit is `raw`: the same bytes in as many files by 2, 4 or 16 threads, `write` and fsync; the
target says how far from it we may be.
"""

from benchmarks import _rounds, _states
from benchmarks._process import Contender
from benchmarks._results import Result
from benchmarks._rounds import EVERYBODY, RAW, Ask

STATES = ("big", *(s for s in _states.NAMES if s != "big"))


def run(ask: Ask) -> list[Result]:
    """Save and remove in turn."""
    notes: list[str] = []
    names = ask.among(EVERYBODY)
    with (
        _rounds.folder(ask.where) as folder,
        _rounds.contenders(names, ask.state, notes) as running,
    ):
        result = measured(ask, running, folder)
    result.notes += notes
    return [result]


def measured(ask: Ask, running: dict[str, Contender], folder: str) -> Result:
    """The same with contenders that run already."""

    def measure(contender: Contender) -> float:
        path = f"{folder}/{contender.name}"
        seconds: float = contender.ask("save", path=path)["seconds"]
        contender.ask("remove", path=path)
        return seconds

    return judged(Result("save", ask.state, "s", _rounds.in_turn(running, ask.rounds, measure)))


def judged(result: Result) -> Result:
    """With the targets: of small leaves others than of large ones."""
    if result.case in _states.SMALL:
        result.expect_ratio(_rounds.ORBAX, 20)
        result.expect_ratio(("torch-dcp",), 2)
        result.expect_ratio(("safetensors",), 1 / 1.5)
    if result.case in _states.LARGE:
        result.expect_ratio([name for name in (result.best(RAW),) if name], 0.85)
        result.expect_ratio(("orbax", "orbax-v1"), 4)
        result.expect_ratio(("orbax-tuned",), 2.5)
        result.expect_ratio(("torch-dcp",), 2)
    return result


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
