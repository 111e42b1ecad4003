"""jax.Arrays, NumPy arrays and scalars <-> plain descriptions, local boxes and host buffers.

With `_placement` the only room that reads shardings. All host-side steps are NumPy, so that they
work under any `jax.set_mesh`, mesh context or Explicit axes. What the public API cannot do is taken
from `jax._src`, here alone: a weak-typed or uncommitted array from its shards without an operation
on the device, and the mesh of a `with` block. Tried with jax 0.8.1 to 0.10.2. Imported where it is
used, so that a JAX that has moved it breaks nothing else.
"""

import contextlib
import enum
import functools
import os
import platform
import types
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxshard import _dtypes, _iterators
from jaxshard._boxes import Box
from jaxshard._spec import INLINE_BYTES_MAX, LeafSpec, MeshSpec, encode_value

Array = np.ndarray[Any, Any]
_SCALARS = {bool: "bool", int: "int", float: "float", complex: "complex", str: "str",
            bytes: "bytes", type(None): "none"}  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
# Objects that are told by what they are and hold nothing; recorded like functions.
_IDENTITIES = {"equinox.nn._stateful._Sentinel"}


class Described(NamedTuple):
    """A leaf and the mesh it lay on."""

    spec: LeafSpec
    mesh: MeshSpec | None


def is_plain_leaf(value: Any) -> bool:
    """Whether a value is a leaf of a kind that is known here (it may still be refused)."""
    if type(value) in _SCALARS:
        return True
    return isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def describe(name: str, value: Any, *, abstract: bool) -> Described | str:
    """Description of one leaf, or the reason why it cannot be stored."""
    kind = _SCALARS.get(type(value))
    if kind is not None:
        return _describe_scalar(name, kind, value)
    if isinstance(value, jax.core.Tracer):
        return "a tracer; save outside of jit, grad and vmap"
    if isinstance(value, jax.Array):
        if not abstract and value.is_deleted():  # in `like` only its description counts
            return "a deleted jax.Array (donated?); save before the buffer is donated"
        return _describe_jax(name, value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return _describe_jax(name, value) if abstract else "a jax.ShapeDtypeStruct has no values"
    if isinstance(value, np.ndarray):
        return _describe_numpy(name, value)
    if isinstance(value, np.generic):
        if not _dtypes.is_supported(value.dtype):
            return f"a NumPy scalar of dtype {value.dtype} cannot be stored"
        dtype = value.dtype.name
        encoded = encode_value("numpy_scalar", value)
        return Described(LeafSpec(name=name, kind="numpy_scalar", dtype=dtype, value=encoded), None)
    return _describe_other(name, value)


def _describe_other(name: str, value: Any) -> Described | str:
    class_name = _iterators.class_name(value)
    if isinstance(value, _iterators.Taken):
        return Described(_describe_state(name, value), None)
    if _iterators.is_iterator(value):  # of `like`: what it is, compared when it is restored
        return Described(LeafSpec(name=name, kind="iterator", value={"class": class_name}), None)
    if hasattr(value, "__next__"):
        return (
            f"an iterator ({class_name}) without get_state and set_state; "
            "jaxshard.data.Stateful(make_iterator) counts, and reads forward to the position"
        )
    if isinstance(value, jax.sharding.Sharding):
        return "a sharding; use jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
    if isinstance(value, enum.Enum):
        return f"an enum member ({class_name}); save its value"
    if _is_function(value) or class_name in _IDENTITIES:
        return Described(LeafSpec(name=name, kind="function"), None)
    return f"{class_name} is neither a known leaf nor registered as a pytree node"


def _describe_state(name: str, taken: _iterators.Taken) -> LeafSpec:
    """The state of an iterator lies in the manifest if it is small, else where arrays do."""
    value = taken.to_json()
    text = taken.text.encode()
    if len(text) <= INLINE_BYTES_MAX:
        return LeafSpec(name=name, kind="iterator", value=value)
    del value["state"]
    shape = (len(text),)
    return LeafSpec(
        name=name, kind="iterator", dtype="uint8", shape=shape, array_shape=shape, value=value
    )


def _is_function(value: Any) -> bool:
    """Whether a value is code without data: a callable object of a user's class may hold some."""
    if isinstance(value, _FUNCTIONS):
        return True
    package = type(value).__module__.partition(".")[0]
    return callable(value) and package in {"jax", "jaxlib", "numpy", "functools"}


def _describe_scalar(name: str, kind: Any, value: Any) -> Described:
    if kind in {"str", "bytes"} and len(_text_bytes(value)) > INLINE_BYTES_MAX:
        shape = (len(_text_bytes(value)),)
        return Described(
            LeafSpec(name=name, kind=kind, dtype="uint8", shape=shape, array_shape=shape), None
        )
    return Described(LeafSpec(name=name, kind=kind, value=encode_value(kind, value)), None)


def _text_bytes(value: str | bytes | _iterators.Taken) -> bytes:
    if isinstance(value, _iterators.Taken):
        value = value.text
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _describe_numpy(name: str, value: Array) -> Described | str:
    if type(value) not in (np.ndarray, np.memmap):
        return f"a NumPy array of type {type(value).__name__} would lose what that type adds"
    if not _dtypes.is_supported(value.dtype):
        return f"a NumPy array of dtype {value.dtype} cannot be stored"
    spec = LeafSpec(
        name=name,
        kind="array",
        container="numpy",
        dtype=value.dtype.name,
        shape=value.shape,
        array_shape=value.shape,
    )
    return Described(spec, None)


def flag(name: str) -> Any:
    return getattr(jax.config, name)


def _is_key(value: Any) -> bool:
    return _is_key_dtype(value.dtype)


@functools.lru_cache(maxsize=1024)
def _is_key_dtype(dtype: Any) -> bool:
    return bool(
        jax.dtypes.issubdtype(  # type: ignore[attr-defined]  # public, but not in its stubs
            dtype, jax.dtypes.prng_key
        )
    )


@functools.lru_cache(maxsize=1024)
def _dtype_name(dtype: Any) -> str | None:
    """Name of a dtype of a jax.Array that can be stored."""
    plain = np.dtype(dtype)
    return plain.name if _dtypes.is_supported(plain) else None


def _describe_jax(name: str, value: Any) -> Described | str:
    key = _is_key(value)
    dtype = "uint32" if key else _dtype_name(value.dtype)
    if dtype is None:
        return f"a jax.Array of dtype {value.dtype} cannot be stored"
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return "a jax.Array that spans several processes; this version serves one process"
    sharding = value.sharding
    mesh, partition, unreduced = _plain_sharding(sharding, len(value.shape))
    if unreduced:
        return "an unreduced jax.Array (partial sums); reduce it first"
    impl = value.dtype._impl if key else None  # noqa: SLF001  (key_impl takes no abstract one)
    spec = LeafSpec(
        name=name,
        kind="key" if key else "array",
        container="jax",
        dtype=dtype,
        shape=tuple(value.shape),
        array_shape=(*value.shape, *impl.key_shape) if impl else tuple(value.shape),
        weak_type=bool(getattr(value, "weak_type", False)),
        committed=is_committed(value),
        key_impl=impl.name if impl else None,
        spec=partition,
        memory_kind=getattr(sharding, "memory_kind", None),
    )
    return Described(spec, mesh)


def is_committed(value: Any) -> bool:
    """Whether an array is bound to its devices; a ShapeDtypeStruct is if it has a sharding."""
    if isinstance(value, jax.Array):
        return bool(_base(value).committed)
    return value.sharding is not None


@functools.lru_cache(maxsize=1024)
def _plain_sharding(
    sharding: Any, rank: int
) -> tuple[MeshSpec | None, tuple[Any, ...] | None, bool]:
    """Mesh and partition spec as plain data, and whether arrays hold partial sums."""
    if not isinstance(sharding, NamedSharding):
        return None, None, False
    if getattr(sharding.spec, "unreduced", None):
        return None, None, True
    mesh = sharding.mesh
    sizes = tuple(mesh.shape[axis] for axis in mesh.axis_names)
    types = tuple(getattr(t, "name", str(t)) for t in mesh.axis_types)
    partition = tuple(sharding.spec)[:rank]
    return MeshSpec(tuple(map(str, mesh.axis_names)), sizes, types), partition, False


# Saving: values as shards --------------------------------------------------------------------


def _base(value: jax.Array) -> Any:
    """The array of uint32 words below a key array; any other array itself."""
    if not _is_key(value):
        return value
    # jax.random.key_data would be an operation on the device, and lose the shards.
    return value._base_array  # type: ignore[attr-defined]  # noqa: SLF001  (as said above)


def partitions(spec: LeafSpec, value: Any) -> tuple[int, ...]:
    """Into how many shards each axis of the stored elements is cut."""
    shape = spec.array_shape or ()
    if not isinstance(value, jax.Array):
        return (1,) * len(shape)
    return _partitions(_base(value).sharding, shape)


@functools.lru_cache(maxsize=1024)
def _partitions(sharding: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    shard = sharding.shard_shape(shape)
    return tuple(n // s if s else 1 for n, s in zip(shape, shard, strict=True))


class Shards(NamedTuple):
    """The distinct parts of a leaf on this process.

    `host(i)` brings the one of `boxes[i]` to host memory: on CPU a view without a copy, except of
    sub-byte types. `views` says whether that is memory that nobody changes, so that it need not be
    copied to be kept.
    """

    boxes: tuple[Box, ...]
    host: Callable[[int], Array]
    views: bool


def shards(spec: LeafSpec, value: Any) -> Shards:
    """The distinct shards of a leaf, whatever holds it."""
    shape = spec.array_shape or ()
    if isinstance(value, jax.Array):
        base = _base(value)
        boxes, places = distinct_boxes(base.sharding, shape)
        data = [base] if base.is_fully_replicated else list(map(base.addressable_data, places))
        # np.asarray of one shard on CPU is a view that JAX keeps no reference to.
        views = is_view(spec, value)
        host = np.asarray if views else _copy
        return Shards(boxes, lambda i: host(data[i]), views)
    if isinstance(value, np.ndarray):
        return Shards((Box.whole(shape),), lambda _: value, views=False)
    text = np.frombuffer(_text_bytes(value), np.uint8)
    return Shards((Box.whole(shape),), lambda _: text, views=True)


@functools.lru_cache(maxsize=1024)
def distinct_boxes(
    sharding: Any, shape: tuple[int, ...]
) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """Boxes of the distinct shards, and where `addressable_data` has each.

    Remembered, since `addressable_shards` asks anew for each array: the boxes of 2,000 arrays on 8
    devices took 0.2 s of the 0.25 s in which all are seen. (benchmarks/blocking.py, leaves8)
    """
    places: dict[Box, int] = {}
    # In the order of the devices, as `addressable_data` counts.
    for place, index in enumerate(sharding.addressable_devices_indices_map(shape).values()):
        places.setdefault(Box.from_slices(index, shape), place)
    return tuple(places), tuple(places.values())


def _copy(data: Any) -> Array:
    """The elements of one shard, copied to host memory; JAX does not keep the copy."""
    # np.asarray caches a copy on the array that it is asked for; this one is gone at once.
    return np.asarray(assemble(data, weak_type=False, committed=True))


def is_view(spec: LeafSpec, value: Any) -> bool:
    """`Shards.views` of a leaf."""
    if not isinstance(value, jax.Array):
        return not isinstance(value, np.ndarray)
    return _on_cpu(_base(value).sharding) and _dtypes.bits(str(spec.dtype)) >= 8


@functools.lru_cache(maxsize=1024)
def _on_cpu(sharding: Any) -> bool:
    return all(d.platform == "cpu" for d in sharding.device_set)


def assemble(array: Any, *, weak_type: bool, committed: bool) -> Any:
    """The same buffers under another aval or commitment, without an operation on the device."""
    from jax._src.array import ArrayImpl  # noqa: PLC0415  (see the head of this room)
    from jax._src.core import ShapedArray  # noqa: PLC0415  (see the head of this room)

    aval = ShapedArray(array.shape, array.dtype, weak_type=weak_type, sharding=array.aval.sharding)
    parts = [shard.data for shard in array.addressable_shards]
    return ArrayImpl(aval, array.sharding, parts, committed=committed)


def current_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh` or `with mesh:`, if there is one."""
    # jax.sharding.get_mesh() answers for set_mesh only, and raises inside jit.
    from jax._src import mesh as mesh_lib  # noqa: PLC0415  (see the head of this room)

    for mesh in (mesh_lib.get_concrete_mesh(), mesh_lib.thread_resources.env.physical_mesh):
        if mesh is not None and not mesh.empty:
            return mesh
    return None


def transfers_allowed() -> contextlib.AbstractContextManager[None]:
    """Saving and loading are transfers that were asked for, whatever a guard says of others."""
    return jax.transfer_guard("allow")


def release(value: Any) -> None:
    """Free the device memory of an array of `like` whose replacement has been read."""
    if isinstance(value, jax.Array) and not value.is_deleted():
        value.delete()


def text_of(spec: LeafSpec, raw: Array) -> str | bytes:
    """The long string, bytes or state that was stored as an array."""
    data = raw.tobytes()
    return data if spec.kind == "bytes" else data.decode("utf-8", "surrogatepass")


@functools.cache
def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "numpy", "tensorstore", "ml_dtypes")
    return {package: version(package) for package in packages}


def environment() -> dict[str, Any]:
    """Versions and flags that matter for exactness."""
    return {
        **_versions(),
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "device_kind": jax.local_devices()[0].device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "enable_x64": bool(flag("jax_enable_x64")),
        "threefry_partitionable": bool(flag("jax_threefry_partitionable")),
        "default_prng_impl": str(flag("jax_default_prng_impl")),
        "default_matmul_precision": flag("jax_default_matmul_precision"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
