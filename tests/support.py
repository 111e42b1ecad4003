"""What several tests need: bitwise comparison, meshes, training states, subprocesses."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

REPOSITORY = Path(__file__).parent.parent
P = PartitionSpec


def mesh(shape: tuple[int, ...], names: tuple[str, ...] = ("a", "b", "c"), **kwargs: Any) -> Mesh:
    """A mesh over the first devices."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names[: len(shape)], **kwargs)


def on(mesh: Mesh, *spec: Any, **kwargs: Any) -> NamedSharding:
    """A NamedSharding."""
    return NamedSharding(mesh, PartitionSpec(*spec), **kwargs)


def bits(value: Any) -> bytes:
    """The bits of an array or scalar, sub-byte types masked to their width."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(np.asarray(value))
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    raw = array.reshape(-1).view(np.uint8)
    from jaxshard import _dtypes

    width = _dtypes.bits(array.dtype.name)
    return (raw & np.uint8((1 << width) - 1) if width < 8 else raw).tobytes()


def assert_same_leaf(got: Any, want: Any, where: str = "", *, placement: bool = True) -> None:
    """Two leaves are the same: type, dtype, shape, bits, and for jax.Arrays how they are placed."""
    if isinstance(want, jax.Array):
        assert isinstance(got, jax.Array), (where, type(got))
        assert got.dtype == want.dtype, (where, got.dtype, want.dtype)
        assert got.shape == want.shape, where
        assert getattr(got, "weak_type", False) == getattr(want, "weak_type", False), where
        if placement:
            assert got.sharding.is_equivalent_to(want.sharding, want.ndim), (where, got.sharding)
            assert got.sharding.memory_kind == want.sharding.memory_kind, where
            assert got.committed == want.committed, (where, got.committed)
        assert bits(got) == bits(want), where
    elif isinstance(want, (np.ndarray, np.generic)):
        assert type(got) is type(want) or isinstance(want, np.memmap), (where, type(got))
        assert got.dtype == want.dtype.newbyteorder("="), (where, got.dtype)
        assert got.shape == want.shape, where
        assert bits(got) == bits(want), where
    elif isinstance(want, float):
        assert type(got) is float, where
        assert bits(np.float64(got)) == bits(np.float64(want)), (where, got, want)
    elif isinstance(want, complex):
        assert type(got) is complex, where
        assert bits(np.complex128(got)) == bits(np.complex128(want)), where
    else:
        assert type(got) is type(want), (where, type(got), type(want))
        assert got == want, (where, got, want)


def assert_same_tree(got: Any, want: Any, *, placement: bool = True) -> None:
    """Two trees have the same structure and the same leaves."""
    is_none = lambda x: x is None  # noqa: E731
    a, structure_a = jax.tree_util.tree_flatten_with_path(got, is_leaf=is_none)
    b, structure_b = jax.tree_util.tree_flatten_with_path(want, is_leaf=is_none)
    assert structure_a == structure_b
    for (path, x), (_, y) in zip(a, b, strict=True):
        assert_same_leaf(x, y, jax.tree_util.keystr(path), placement=placement)


def run_python(code: str, *, devices: int = 8, timeout_s: float = 300, **env: str) -> str:
    """Run code in a process of its own; its output, or a failure with all of it."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]),
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def spelled_out(body: Any) -> Any:
    """The JSON of a manifest with all fields in its leaves, which is allowed, and no templates."""
    templates = body["templates"]
    body["templates"] = []
    for leaf in body["leaves"]:
        if "template" in leaf:
            common = copy.deepcopy(templates[leaf.pop("template")])
            common["layout"]["path"] = leaf.pop("path", leaf["name"])
            leaf.update(common)
    return body
