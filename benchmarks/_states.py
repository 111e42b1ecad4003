"""The states that are saved and loaded: the same bits for every contender.

Values are random, so that no contender gains by compression what real weights would not give.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

DEVICES = 8
MESH = (2, 4)
AXES = ("data", "model")
_KERNEL = (4096, 4096)  # 64 MiB of float32


class Array(NamedTuple):
    """Shape of one array and how its axes lie on the mesh (None: on one device, uncommitted)."""

    shape: tuple[int, ...]
    spec: tuple[Any, ...] | None


def _big(layers: int) -> dict[str, Array]:
    out = {}
    for i in range(layers):
        out[f"layer{i:03d}/kernel"] = Array(_KERNEL, AXES)
        out[f"layer{i:03d}/bias"] = Array(_KERNEL[1:], ("model",))
        out[f"layer{i:03d}/scale"] = Array(_KERNEL[1:], ())
    return out


def _flat(count: int, shape: tuple[int, ...], spec: tuple[Any, ...] | None) -> dict[str, Array]:
    return {f"leaf{i:05d}": Array(shape, spec) for i in range(count)}


ARRAYS: dict[str, Callable[[], dict[str, Array]]] = {
    "tiny": lambda: {**_flat(3, (256, 256), AXES), "scale": Array((256,), ())},  # smoke tests
    "big": lambda: _big(12),
    "big8": lambda: _big(128),  # 8 GiB
    "small": lambda: _flat(1_500, (128, 128), AXES),
    "many": lambda: _flat(20_000, (32, 32), AXES),
    "huge": lambda: {"table": Array((32_768, 16_384), AXES)},
    "leaves": lambda: _flat(2_000, (64, 64), None),
    "leaves8": lambda: _flat(2_000, (64, 64), AXES),
}
NAMES = (*ARRAYS, "mixed")
WHAT = {
    "tiny": "768 KiB, for smoke tests",
    "big": "12 x (64 MiB kernel on a 2x4 mesh, bias, replicated scale), 805 MB",
    "big8": "the same with 128 layers, 8.6 GB",
    "small": "1,500 leaves of 64 KiB on a 2x4 mesh, 98 MB",
    "many": "20,000 leaves of 4 KiB on a 2x4 mesh, 82 MB",
    "huge": "one array of 2.1 GB on a 2x4 mesh",
    "leaves": "2,000 leaves of 16 KiB, each on one device",
    "leaves8": "2,000 leaves of 16 KiB on a 2x4 mesh",
    "mixed": "GPT-2 of 124M parameters in Flax NNX with AdamW on a 2x4 mesh, 1.5 GB",
}


def numbers(index: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values of the array number `index`; also how it is verified after loading."""
    return np.random.default_rng(index).standard_normal(shape, np.float32)


def host_state(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The state as NumPy arrays by name, for contenders without devices."""
    if name == "mixed":
        return {path: host(leaf) for path, leaf in named_leaves(mixed()).items()}
    return {k: numbers(i, a.shape) for i, (k, a) in enumerate(ARRAYS[name]().items())}


def mesh(shape: tuple[int, ...]) -> Any:
    """A mesh with the axes of the states; of one axis only the last one is divided."""
    import jax

    full = (1,) * (2 - len(shape)) + shape
    devices = np.array(jax.devices()[: int(np.prod(full))]).reshape(full)
    return jax.sharding.Mesh(devices, AXES)


def placed(spec: tuple[Any, ...] | None, on: Any) -> Any:
    """The sharding of an array."""
    import jax

    if spec is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(*spec))


def device_state(name: str) -> dict[str, Any]:
    """The state as a nested dict of jax.Arrays on the 2x4 mesh."""
    import jax

    if name == "mixed":
        return mixed()
    on = mesh(MESH)
    out: dict[str, Any] = {}
    for i, (path, array) in enumerate(ARRAYS[name]().items()):
        values = numbers(i, array.shape)
        value = jax.device_put(values, placed(array.spec, on))
        _put(out, path, value)
    return jax.block_until_ready(out)


def abstract_state(state: dict[str, Any], shape: tuple[int, ...]) -> Any:
    """What to load: the shapes of a state, on a mesh of another shape."""
    import jax

    on = mesh(shape)

    def abstract(leaf: Any) -> Any:
        sharding = leaf.sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            sharding = jax.sharding.NamedSharding(on, sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(abstract, state)


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a state by name."""
    import jax

    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in flat}


def host(value: Any) -> np.ndarray[Any, Any]:
    """The elements of any array; `np.asarray` would leave a second copy on a jax.Array."""
    if not hasattr(value, "addressable_shards"):
        return np.asarray(value)
    out = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        out[shard.index] = np.asarray(shard.data)
    return out


def mixed() -> dict[str, Any]:
    """Parameters and AdamW moments of GPT-2 (124M) as nested dicts, after one update."""
    import jax
    import optax
    from flax import nnx

    from benchmarks._gpt2 import GPT2

    on = mesh(MESH)
    model = GPT2(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    optimizer = optax.adamw(1e-3)

    def make(params: Any) -> Any:
        grads = jax.tree.map(lambda p: p * 0.01 + 1e-4, params)
        _, moments = optimizer.update(grads, optimizer.init(params), params)
        return moments

    moments = jax.jit(make)(params)
    adam = moments[0]
    tree = {
        "params": nnx.to_pure_dict(params),
        "mu": nnx.to_pure_dict(adam.mu),
        "nu": nnx.to_pure_dict(adam.nu),
    }
    return jax.block_until_ready(jax.tree.map(lambda p: jax.device_put(p, _fsdp(p, on)), tree))


def _fsdp(leaf: Any, on: Any) -> Any:
    """Matrices on both axes of the mesh where they divide, vectors on one."""
    spec: list[Any] = [None] * leaf.ndim
    if leaf.ndim and leaf.shape[-1] % MESH[1] == 0:
        spec[-1] = AXES[1]
    if leaf.ndim > 1 and leaf.shape[0] % MESH[0] == 0:
        spec[0] = AXES[0]
    return placed(tuple(spec), on)
