"""How do planning and the manifest grow with the number of leaves and devices?

Sketch: nothing is done in Python for a piece, and some 10 us for a leaf: 100,000 leaves in one or
two seconds whatever the mesh, 800,000 pieces in columns of 24 bytes; at most 5 s and 1 GiB. The
manifest has some 250 bytes a leaf: 25 MB of JSON in a second or two to write, one to read.
Devices are simulated: specs and who holds which shard, no array. Each figure comes from a fresh
process.
"""

import datetime
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import _measured, _rounds
from benchmarks._process import Worker, timed
from benchmarks._results import Result
from benchmarks._rounds import Ask

STATES = ("100000", "10000", "1000", "tiny")
_DEVICES_OF_A_PROCESS = 8
_GIB = 1 << 30
# Of the shards: three that become files, one that goes into the pack.
_SHARDS = ((1_024, 256), (256, 1_024), (2_048, 2_048), (64, 64))


class Plan:
    """Plans a save of leaves on a mesh of simulated devices."""

    def plan(self, count: int, mesh: list[int]) -> dict[str, Any]:
        """What one process does before it writes: layouts, who writes what, its own part."""
        from jaxshard import _plan

        parts = (mesh[0], mesh[1])
        devices = parts[0] * parts[1]
        processes = max(1, devices // _DEVICES_OF_A_PROCESS)
        holders = None
        if processes > 1:
            of_shard = tuple((i // _DEVICES_OF_A_PROCESS,) for i in range(devices))
            holders = _plan.Holders(parts, of_shard)

        def make() -> Any:
            leaves = _leaves(count, parts)
            return _plan.plan_save(leaves, [holders] * count, processes=processes).of(0)

        (plan, seconds), grown = _measured.peak(lambda: timed(make))
        return {"seconds": seconds, "grown": grown, "mine": len(plan.pieces) + len(plan.entries)}


class Manifests:
    """Writes the manifest of a checkpoint without data."""

    def write(self, count: int, path: str) -> dict[str, Any]:
        """To JSON, to the disk."""
        manifest = _manifest(count)

        def write() -> None:
            Path(path).mkdir()
            Path(path, "manifest.json").write_bytes(manifest.to_bytes())

        return {"seconds": timed(write)[1]}


class Readers:
    """Opens that."""

    def open(self, path: str) -> dict[str, Any]:
        """As `jaxshard.open` does, then what it says of every leaf."""
        import jaxshard

        checkpoint, seconds = timed(jaxshard.open, path)
        leaves, more = timed(lambda: checkpoint.leaves)
        return {"seconds": seconds + more, "open": seconds, "leaves": len(leaves)}


def _leaves(count: int, partitions: tuple[int, int]) -> tuple[Any, ...]:
    return tuple(_leaf_specs(count, partitions))


def _leaf_specs(count: int, partitions: tuple[int, int]) -> Iterator[Any]:
    from jaxshard import SaveOptions, _saving
    from jaxshard._spec import LeafSpec

    options = SaveOptions()
    layout = functools.partial(
        _saving.layout_for,
        "float32",
        partitions=partitions,
        piece_bytes_max=options.piece_bytes_max,
        pack_below=options.pack_below,
    )
    for i in range(count):
        rows, columns = _SHARDS[i % len(_SHARDS)]
        shape = (rows * partitions[0], columns * partitions[1])
        name = f"layer{i // 10:05d}/w{i % 10}"
        yield LeafSpec(
            name=name,
            kind="array",
            container="jax",
            dtype="float32",
            shape=shape,
            array_shape=shape,
            committed=True,
            spec=("data", "model"),
            mesh=0,
            layout=layout(shape=shape)._replace(path=name),
            digest="0" * 32,
        )


def _manifest(count: int) -> Any:
    from jaxshard import _manifest as manifests
    from jaxshard._spec import MeshSpec, Node, TreeSpec

    layers = [
        Node("dict", tuple(f"w{j}" for j in range(10)), tuple(range(i, i + 10)))
        for i in range(0, count, 10)
    ]
    names = tuple(f"layer{i:05d}" for i in range(len(layers)))
    mesh = MeshSpec(("data", "model"), (2, 4), ("Auto", "Auto"))
    return manifests.Manifest(
        attempt="a-00000000",
        nonce="0" * 32,
        step=1,
        created=datetime.datetime.now(datetime.UTC).isoformat(),
        metadata={},
        environment={},
        compression=None,
        tree=TreeSpec(Node("dict", names, tuple(layers)), _leaves(count, (2, 4)), (mesh,)),
        processes=(manifests.ProcessRecord(0, "0" * 32),),
    )


def run(ask: Ask) -> list[Result]:
    """Powers of ten up to the number of leaves; the state *is* that number."""
    most = 100 if ask.state == "tiny" else int(ask.state)
    counts = [10**power for power in range(2, 7) if min(1000, most) <= 10**power <= most]
    meshes = {"2x4": (2, 4), "64x64": (64, 64)}
    plans = [
        _plans(ask, mesh, parts, [c for c in counts if c <= 1000 or mesh == "2x4"])
        for mesh, parts in meshes.items()
    ]
    return [*plans, *_manifests(ask, counts)]


def _plans(ask: Ask, mesh: str, parts: tuple[int, int], counts: list[int]) -> Result:
    result = Result("scale", f"plan for mesh {mesh}", "s", {})
    for count in counts:
        found = [_plan_once(count, parts) for _ in range(ask.rounds)]
        result.values[f"{count} leaves"] = [f["seconds"] for f in found]
        result.notes.append(
            f"{count} leaves: {found[0]['mine']} files and entries of this process, "
            f"{max(f['grown'] for f in found) / 2**20:.0f} MiB"
        )
    if ask.state != "tiny":
        last = f"{counts[-1]} leaves"
        result.expect(f"{last} in s", result.median(last), at_most=5)
        grown = max(f["grown"] for f in found) / _GIB
        result.expect(f"{last} in GiB", grown, at_most=1)
    return result


def _plan_once(count: int, parts: tuple[int, int]) -> dict[str, Any]:
    with Worker("benchmarks.scale:Plan") as worker:
        worker.ask("plan", count=1, mesh=parts)  # imports
        return worker.ask("plan", count=count, mesh=parts)


def _manifests(ask: Ask, counts: list[int]) -> list[Result]:
    written = Result("scale", "manifest, write", "s", {})
    opened = Result("scale", "manifest, open", "s", {})
    with _rounds.folder(ask.where) as folder:
        for count in counts:
            name = f"{count} leaves"
            written.values[name], opened.values[name] = [], []
            for i in range(ask.rounds):
                path = f"{folder}/{count}-{i}"
                with Worker("benchmarks.scale:Manifests") as worker:
                    answer = worker.ask("write", count=count, path=path)
                written.values[name].append(answer["seconds"])
                with Worker("benchmarks.scale:Readers") as worker:
                    answer = worker.ask("open", path=path)
                opened.values[name].append(answer["seconds"])
            size = Path(folder, f"{count}-0", "manifest.json").stat().st_size
            written.notes.append(f"{name}: {size / 1e6:.1f} MB")
            opened.notes.append(f"{name}: {answer['open']:.3g} s of it before `.leaves`")
    if ask.state != "tiny":
        written.expect(f"{name} in s", written.median(name), at_most=2)
        opened.expect(f"{name} in s", opened.median(name), at_most=1)
    return [written, opened]


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
