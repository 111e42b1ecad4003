"""The states that are saved and loaded: the same bits for every contender.

Values are random, so that no contender gains by compression what real weights would not give.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

DEVICES = 8
MESH = (2, 4)
AXES = ("data", "model")


class Array(NamedTuple):
    """Shape of one array and how its axes lie on the mesh (None: on one device, uncommitted)."""

    shape: tuple[int, ...]
    spec: tuple[Any, ...] | None

    @property
    def nbytes(self) -> int:
        """Of float32."""
        return math.prod(self.shape) * 4


class Size(NamedTuple):
    """Of a GPT-2, and of the batches `[rows, length]` that it is trained with."""

    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int
    rows: int
    length: int

    @property
    def parameters(self) -> int:
        """Embeddings, blocks, and the last norm."""
        embeddings = (self.vocabulary + self.context) * self.width
        return embeddings + self.layers * (12 * self.width + 13) * self.width + 2 * self.width


def _layers(count: int, width: int) -> dict[str, Array]:
    out = {}
    for i in range(count):
        out[f"layer{i:03d}/kernel"] = Array((width, width), AXES)
        out[f"layer{i:03d}/bias"] = Array((width,), ("model",))
        out[f"layer{i:03d}/scale"] = Array((width,), ())
    return out


def _flat(count: int, shape: tuple[int, ...], spec: tuple[Any, ...] | None) -> dict[str, Array]:
    return {f"leaf{i:05d}": Array(shape, spec) for i in range(count)}


ARRAYS: dict[str, Callable[[], dict[str, Array]]] = {
    "tiny": lambda: _layers(3, 256),
    "big": lambda: _layers(12, 4096),
    "big8": lambda: _layers(128, 4096),
    "small": lambda: _flat(1_500, (128, 128), AXES),
    "many": lambda: _flat(20_000, (32, 32), AXES),
    "huge": lambda: {"table": Array((32_768, 16_384), AXES)},
    "leaves": lambda: _flat(2_000, (64, 64), None),
    "leaves8": lambda: _flat(2_000, (64, 64), AXES),
}
MODELS = {
    "tiny-gpt2": Size(256, 16, 32, 2, 1, 2, 8),
    "mini": Size(32_768, 64, 256, 4, 2, 2, 8),
    "mixed": Size(50_257, 1_024, 768, 12, 12, 2, 16),
}
WHAT = {
    "tiny": "three layers of 258 KiB, for smoke tests",
    "big": "12 x (64 MiB kernel on a 2x4 mesh, bias, replicated scale), 805 MB",
    "big8": "the same with 128 layers, 8.6 GB",
    "small": "1,500 leaves of 64 KiB on a 2x4 mesh, 98 MB",
    "many": "20,000 leaves of 4 KiB on a 2x4 mesh, 82 MB",
    "huge": "one array of 2.1 GB on a 2x4 mesh",
    "leaves": "2,000 leaves of 16 KiB, each on one device",
    "leaves8": "2,000 leaves of 16 KiB on a 2x4 mesh",
    "tiny-gpt2": "a GPT-2 of 21K parameters with AdamW, for smoke tests",
    "mini": "a GPT-2 of 10M parameters in Flax NNX with AdamW on a 2x4 mesh, 120 MB",
    "mixed": "GPT-2 of 124M parameters in Flax NNX with AdamW on a 2x4 mesh, 1.5 GB",
}
NAMES = tuple(WHAT)
# Those that targets are set for: bytes decide, or leaves do.
LARGE = frozenset({"big", "big8", "huge", "mixed"})
SMALL = frozenset({"small", "many"})
# One part of a state, as its prefix: what is loaded where not all is wanted.
PART = {"tiny": "layer000", "big": "layer000", "big8": "layer000"} | dict.fromkeys(MODELS, "params")


@functools.cache
def _normal(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def numbers(index: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values of the array number `index`: normal ones, other bits for each index."""
    values: np.ndarray[Any, Any] = _normal(shape) * np.float32(1 + index / 65_536)
    return values


def nbytes(name: str) -> int:
    """Bytes of a state, without making it."""
    if name in MODELS:
        return 3 * 4 * MODELS[name].parameters + 4  # weights, two moments, and a counter
    return sum(array.nbytes for array in ARRAYS[name]().values())


def host_state(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The state as NumPy arrays by name, for contenders without devices."""
    if name in ARRAYS:
        return {k: numbers(i, a.shape) for i, (k, a) in enumerate(ARRAYS[name]().items())}
    return {path: host(leaf) for path, leaf in named_leaves(device_state(name)).items()}


def mesh(shape: tuple[int, ...]) -> Any:
    """A mesh with the axes of the states."""
    import jax

    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, AXES)


def job(name: str) -> Any:
    """The training job that a state with a model is of."""
    from benchmarks import _gpt2

    return _gpt2.Job(MODELS[name], mesh(MESH))


def device_state(name: str) -> dict[str, Any]:
    """The state as a nested dict of jax.Arrays on the 2x4 mesh."""
    import jax

    if name in MODELS:
        return dict(job(name).make())
    out: dict[str, Any] = {}
    on = mesh(MESH)
    for i, (path, array) in enumerate(ARRAYS[name]().items()):
        value = numbers(i, array.shape)
        if array.spec is None:
            _put(out, path, jax.device_put(value))
        else:
            spec = jax.sharding.PartitionSpec(*array.spec)
            _put(out, path, jax.device_put(value, jax.sharding.NamedSharding(on, spec)))
    _normal.cache_clear()
    return jax.block_until_ready(out)


def abstract_state(state: Any, shape: tuple[int, ...] = MESH) -> Any:
    """What to load: the shapes of a state, on a mesh of another shape."""
    import jax

    on = mesh(shape)

    def abstract(leaf: Any) -> Any:
        sharding = leaf.sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            sharding = jax.sharding.NamedSharding(on, sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(abstract, state)


def fresh(state: Any) -> Any:
    """The same values in arrays that nobody has looked at, as they come out of a step."""
    import jax

    return jax.block_until_ready(jax.tree.map(lambda leaf: leaf.copy(), state))


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a state by name."""
    import jax

    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def host(value: Any) -> np.ndarray[Any, Any]:
    """The elements of any array; `np.asarray` would leave a second copy on a jax.Array."""
    if not hasattr(value, "addressable_shards"):
        return np.asarray(value)
    out = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        out[shard.index] = np.asarray(shard.data)
    return out
