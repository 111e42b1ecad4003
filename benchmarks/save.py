"""How long does a save take, until it is durable?

Sketch: bytes / bandwidth of buffered write + fsync (0.35-1.3 GB/s on a virtual disk, up to what the
page cache takes), and files x fsync (1-3 ms each, in parallel): *big* is 96 files of 8 MiB and one
pack, so the disk decides; *small* and *many* are one pack, so assembling in Python decides.
The limit is `raw`: the same bytes in as many files by 2, 4 or 16 threads, `write` and fsync.
"""

from benchmarks import _rounds
from benchmarks._rounds import PEERS, RAW, US, Result


def run(state: str, rounds: int, where: str | None = None, names: str | None = None) -> Result:
    """Save and remove in turn."""
    notes: list[str] = []
    asked = _rounds.chosen(names, (US, *PEERS, *RAW))
    with _rounds.folder(where) as folder, _rounds.contenders(asked, state, notes) as running:

        def measure(contender: _rounds.Contender) -> float:
            path = f"{folder}/{contender.name}"
            seconds: float = contender.ask("save", path=path)["seconds"]
            contender.ask("remove", path=path)
            return seconds

        result = Result("save", state, "s", _rounds.in_turn(running, rounds, measure), notes=notes)
    _targets(result)
    return result


def _targets(result: Result) -> None:
    if result.state in {"big", "big8", "huge", "mixed"}:
        limit = result.best(RAW)
        if limit is not None:
            share = result.ratio(limit)
            result.expect(f"{limit} / jaxshard >= 0.85: {share:.2f}", share >= 0.85)
        result.expect_ratio(("orbax", "orbax-v1"), 4)
        result.expect_ratio(("orbax-tuned",), 2.5)
        result.expect_ratio(("torch-dcp",), 2)
    else:
        result.expect_ratio(("orbax", "orbax-tuned", "orbax-v1"), 20)
        result.expect_ratio(("torch-dcp",), 2)
        result.expect_ratio(("safetensors",), 1 / 1.5)


if __name__ == "__main__":
    options = _rounds.arguments(__doc__)
    print(_rounds.markdown([run(options.state, options.rounds, options.dir, options.contenders)]))
