"""Write tests/compat/v1, a checkpoint of format version 1 with a leaf of every kind.

    .venv/bin/python tests/compat/make_v1.py

Once version 1 is released this is history: the files stay as they are, and must stay readable.
"""

import collections
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxshard

HERE = Path(__file__).parent / "v1"
OPTIONS = jaxshard.SaveOptions(pack_below=100, piece_bytes_max=400)
NATIVE = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "complex64", "complex128",
]  # fmt: skip
EXTENDED = [
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int2", "uint2", "int4",
    "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn",
]  # fmt: skip
Moments = collections.namedtuple("Moments", ["mu", "nu"])  # noqa: PYI024


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A container with attributes."""

    kernel: Any
    bias: Any


@jax.tree_util.register_pytree_node_class
class Stack:
    """A container with numbered children."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Stack":
        return cls(*children)


def pattern(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of many bit patterns, the same everywhere."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    size = int(np.prod(shape))
    raw = (np.arange(size * kind.itemsize, dtype=np.int64) * 37 + 11) % 251
    raw = raw.astype(np.uint8)
    width = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4}.get(dtype, 8)
    width = 4 if "float4" in dtype else 6 if "float6" in dtype else width
    raw &= np.uint8((1 << width) - 1)
    if dtype in ("int2", "int4"):  # ml_dtypes keeps them sign-extended
        raw = np.where(raw >> (width - 1), raw | np.uint8(256 - (1 << width)), raw)
    return raw.view(kind).reshape(shape)


def on(spec: Any, shape: tuple[int, ...] = (2, 4)) -> NamedSharding:
    """A place on a mesh of the first devices."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(jax.sharding.Mesh(devices, ("data", "model")), PartitionSpec(*spec))


def tree() -> Any:
    """What was saved."""
    shared = jnp.arange(6.0)
    return {
        "every numpy type": {name: pattern(name, (3, 5)) for name in [*NATIVE, *EXTENDED]},
        "scalars": {name: pattern(name, (7,))[2] for name in [*NATIVE, *EXTENDED]},
        "placed": {
            "sharded": jax.device_put(pattern("float32", (32, 24)), on(("data", "model"))),
            "replicated": jax.device_put(pattern("bfloat16", (13, 11)), on(())),
            "odd": jax.device_put(pattern("uint8", (1009,)), on(())),
            "int4": jax.device_put(pattern("int4", (6, 16)), on((None, "model"))),
            "int4 odd": jax.device_put(pattern("int4", (6, 12)), on((None, "model"))),
            "float8": jax.device_put(pattern("float8_e4m3fn", (8, 24)), on(("model",))),
            "bool": jax.device_put(pattern("bool", (2, 300)), on(("data",))),
            "one device": jnp.asarray(pattern("int32", (50,))),
        },
        "keys": [
            jax.random.wrap_key_data(np.array([7, 9], np.uint32), impl="threefry2x32"),
            jax.random.wrap_key_data(np.arange(12, dtype=np.uint32).reshape(3, 4), impl="rbg"),
        ],
        "python": (
            0, -(2**200), True, False, None, -0.0, float("inf"), float("nan"), 0.1,
            complex(1.5, -0.0), "", "text \N{SNOWMAN} \ud800", "long " * 1000, b"\x00\xff",
            b"\x01" * 5000,
        ),
        "containers": Moments({}, [(), Layer(jnp.zeros((2, 2)), None), Stack(1, [2.0])]),
        "shapes": {
            "0d": np.array(2.5), "empty": jnp.zeros((0, 4)), "ones": np.ones((1, 1, 1, 3), np.int8),
            "weak": jnp.asarray(1.5), "filed empty": np.zeros((3, 0, 2)),
        },
        "shared": {"a": shared, "b": shared},
        "names": {
            1: 1, "1": 2, "a/b": 3, "a.b": 4, "": 5, (1, "x"): 6, None: 7, b"\xff": 8, 0.5: 9,
            "Case": np.ones(30), "case": np.zeros(30), "x" * 230: np.ones(40),
        },
        "function": jnp.tanh,
    }  # fmt: skip


def main() -> None:
    """Write it anew."""
    shutil.rmtree(HERE, ignore_errors=True)
    metadata = {"what": "a leaf of every kind", "version": jaxshard.__version__}
    report = jaxshard.save(HERE, tree(), metadata=metadata, options=OPTIONS)
    print(f"{report.path}: {report.nbytes} bytes in {report.files} files")


if __name__ == "__main__":
    main()
