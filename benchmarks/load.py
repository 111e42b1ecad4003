"""How long does a load take, until the arrays are usable: on the same mesh, and on others?

Sketch: bytes / what two threads read from the page cache into memory that was touched (5-14 GB/s),
plus a digest (25 GB/s) and a copy of every tile (5-10 GB/s by core), plus page faults where memory
is new. 805 MB in 0.06-0.16 s raw, so about 0.2 s, at most three times raw. On another mesh the same
tiles are read, some of them copied to several places. PyTorch DCP and safetensors fill tensors of
the host; they know no mesh.
"""

from collections.abc import Callable, Sequence

from benchmarks import _rounds, _states, save
from benchmarks._process import Contender
from benchmarks._results import US, Result
from benchmarks._rounds import EVERYBODY, ORBAX, RAW, Ask

STATES = ("big", *(s for s in _states.NAMES if s != "big"))
MESHES = {"2x4": (2, 4), "4x2": (4, 2), "8x1": (8, 1), "1x8": (1, 8), "1": (1, 1)}
_SAME = "2x4"


def run(ask: Ask) -> list[Result]:
    """Save once, then load in turn: on the mesh that saved, and on all others."""
    return _run(ask, tuple(MESHES))


def run_behind_save(ask: Ask) -> list[Result]:
    """`save` and `load` with the same processes: starting nine of them takes minutes."""
    return _run(ask, tuple(MESHES) if ask.state == "big" else (_SAME,), save.measured)


def _run(
    ask: Ask,
    meshes: Sequence[str],
    first: Callable[[Ask, dict[str, Contender], str], Result] | None = None,
) -> list[Result]:
    notes: list[str] = []
    names = ask.among(EVERYBODY)
    with (
        _rounds.folder(ask.where) as folder,
        _rounds.contenders(names, ask.state, notes) as running,
    ):
        results = [first(ask, running, folder)] if first else []
        for name, contender in running.items():
            contender.ask("save", path=f"{folder}/{name}")
        for mesh in meshes:
            if mesh != _SAME:
                for name in [n for n in running if not _places(n)]:
                    running.pop(name).close()  # its memory is for the page cache of the others
            results.append(_on_mesh(ask, running, folder, mesh))
    results[0].notes += notes
    return results


def _on_mesh(ask: Ask, running: dict[str, Contender], folder: str, mesh: str) -> Result:
    def measure(contender: Contender) -> float:
        path = f"{folder}/{contender.name}"
        return float(contender.ask("load", path=path, mesh=MESHES[mesh])["seconds"])

    case = ask.state if mesh == _SAME else f"{ask.state}, mesh {mesh}"
    return judged(Result("load", case, "s", _rounds.in_turn(running, ask.rounds, measure)))


def _places(name: str) -> bool:
    """Whether a contender is asked for other meshes: those that know them.

    Not `orbax-v1`: its process keeps what it has loaded, 0.8 GB more with each load of *big*, and
    40 loads are more than there is memory.
    """
    return name == US or name in ("orbax", "orbax-tuned")


def judged(result: Result) -> Result:
    """With the targets: of small leaves others than of large ones, and of other meshes."""
    state, _, mesh = result.case.partition(", mesh ")
    if state in _states.SMALL:
        result.expect_ratio(ORBAX, 20)
        result.expect_ratio(("torch-dcp",), 2)
    if state in _states.LARGE:
        result.expect_ratio(ORBAX, 3 if mesh else 4)
        result.expect_ratio(("torch-dcp",), 3)
        limit = result.best(RAW)
        if limit is not None:
            result.expect(f"{US} / {limit}", result.ratio(US, limit), at_most=3)
    return result


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
