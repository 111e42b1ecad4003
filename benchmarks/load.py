"""How long does a load take, until the arrays are usable: on the same mesh, and on others?

Sketch: bytes / what two threads read from the page cache into huge pages (6-14 GB/s), plus the
checksum of TensorStore and our digest of every tile (25 GB/s each by core). 805 MB in 0.06-0.09 s
raw, so about 0.2 s. On another mesh the same tiles are read, some of them scattered.
PyTorch DCP and safetensors fill tensors of the host; they know no mesh.
"""

from benchmarks import _rounds
from benchmarks._rounds import PEERS, RAW, US, Result

MESHES = {"2x4": (2, 4), "4x2": (4, 2), "8x1": (8, 1), "1x8": (1, 8), "1": (1, 1)}


def run(
    state: str, rounds: int, mesh: str = "2x4", where: str | None = None, names: str | None = None
) -> Result:
    """Save once, then load in turn."""
    notes: list[str] = []
    everybody = (US, *PEERS, *RAW) if mesh == "2x4" else (US, *PEERS[:3])
    asked = _rounds.chosen(names, everybody)
    with _rounds.folder(where) as folder, _rounds.contenders(asked, state, notes) as running:
        for name, contender in running.items():
            contender.ask("save", path=f"{folder}/{name}")

        def measure(contender: _rounds.Contender) -> float:
            answer = contender.ask("load", path=f"{folder}/{contender.name}", mesh=MESHES[mesh])
            return float(answer["seconds"])

        question = "load" if mesh == "2x4" else f"load 2x4 on {mesh}"
        values = _rounds.in_turn(running, rounds, measure)
    result = Result(question, state, "s", values, notes=notes)
    _targets(result, mesh)
    return result


def _targets(result: Result, mesh: str) -> None:
    if result.state in {"small", "many"}:
        result.expect_ratio(("orbax", "orbax-tuned", "orbax-v1"), 20)
        result.expect_ratio(("torch-dcp",), 2)
        return
    result.expect_ratio(("orbax", "orbax-tuned", "orbax-v1"), 4 if mesh == "2x4" else 3)
    result.expect_ratio(("torch-dcp",), 3)
    limit = result.best(RAW)
    if limit is not None:
        times = 1 / result.ratio(limit)
        result.expect(f"jaxshard / {limit} <= 3: {times:.2f}", times <= 3)


if __name__ == "__main__":
    options = _rounds.arguments(__doc__)
    results = [
        run(options.state, options.rounds, mesh, options.dir, options.contenders) for mesh in MESHES
    ]
    print(_rounds.markdown(results))
