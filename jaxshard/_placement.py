"""Where a loaded leaf goes, and the array that goes there.

With `_arrays` the only room that reads shardings. All host-side steps are NumPy, so that they work
under any `jax.set_mesh`, mesh context or Explicit axes.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxshard import _arrays
from jaxshard._boxes import Box
from jaxshard._patterns import first_match
from jaxshard._spec import LeafSpec, MeshSpec

Rules = Sequence[tuple[str, PartitionSpec]]
_WIDE = {"int64", "uint64", "float64", "complex128"}


class Target(NamedTuple):
    """Where one loaded leaf goes; `sharding` is None for NumPy."""

    sharding: Any
    committed: bool
    weak_type: bool


@contextlib.contextmanager
def _reason(into: list[str]) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError) as e:
        into.append(str(e).splitlines()[0])


def require_placement(mesh: Any, rules: Any) -> None:
    """Refuse arguments that are no mesh and no rules (TypeError)."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh: expected a jax.sharding.Mesh, found {type(mesh).__name__}\n"
            'hint: jax.make_mesh((2, 4), ("data", "model"))'
        )
    pairs = isinstance(rules, (list, tuple)) and all(
        isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], PartitionSpec)
        for rule in rules
    )
    if rules is not None and not pairs:
        raise TypeError(
            f"rules: expected a list of (pattern, PartitionSpec), found {rules!r:.80}\n"
            'hint: rules=[("**/kernel", PartitionSpec(None, "model"))]'
        )


def target(
    saved: LeafSpec,
    saved_mesh: MeshSpec | None,
    like: Any,
    *,
    mesh: Mesh | None,
    rules: Rules | None,
    name: str,
) -> Target | str:
    """Where one leaf goes, or what keeps it from going there.

    Args:
      saved: the leaf in the checkpoint.
      saved_mesh: the mesh it lay on.
      like: the value in `like`, or None where there is no `like`.
      mesh: the mesh the caller gave.
      rules: patterns and partition specs that the caller gave.
      name: name of the leaf after renaming.
    """
    rule = first_match(list(rules or ()), name)
    weak = saved.weak_type
    if isinstance(like, np.ndarray):
        return Target(None, committed=False, weak_type=False)
    if like is None:
        placed = (mesh is not None and saved.container == "jax") or rule is not None
        if not placed and saved.kind != "key":
            return Target(None, committed=False, weak_type=False)
    elif isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        weak = bool(getattr(like, "weak_type", False))
    found = _sharding(saved, saved_mesh, like, mesh, rule)
    if isinstance(found, str):
        return found
    sharding, committed = found
    if saved.kind != "key" and saved.dtype in _WIDE and not _arrays.flag("jax_enable_x64"):
        return f"saved {saved.describe()}, but 64-bit types are off (jax_enable_x64=True keeps it)"
    reasons: list[str] = []
    with _reason(reasons):
        sharding.shard_shape(saved.shape)
        return Target(sharding, committed, weak)
    return f"saved {saved.describe()} does not fit the wanted sharding: {reasons[0]}"


def _sharding(
    saved: LeafSpec, saved_mesh: MeshSpec | None, like: Any, mesh: Mesh | None, rule: Any
) -> tuple[Any, bool] | str:
    """(sharding, committed) in the order that the documentation of `load` gives."""
    wanted = like.sharding if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)) else None
    known = mesh if mesh is not None else _arrays.current_mesh()
    if isinstance(wanted, NamedSharding) and isinstance(wanted.mesh, AbstractMesh):
        return _on_known_mesh(wanted, known)
    if wanted is not None:
        return wanted, _arrays.is_committed(like)
    if rule is not None:
        if known is None:
            return "a rule gives a PartitionSpec, but there is no mesh (mesh=, or jax.set_mesh)"
        return _named(known, rule, saved.memory_kind, "the rule")
    if known is not None:
        spec = PartitionSpec(*(saved.spec or ()))  # type: ignore[no-untyped-call]  # JAX has not typed it
        return _named(known, spec, saved.memory_kind, "the saved spec")
    default = _arrays.flag("jax_default_device")
    device = default if isinstance(default, jax.Device) else jax.local_devices()[0]
    kind = saved.memory_kind if saved.memory_kind in _memory_kinds(device) else None
    return SingleDeviceSharding(device, memory_kind=kind), saved.committed and saved_mesh is None


def _on_known_mesh(wanted: NamedSharding, known: Mesh | None) -> tuple[Any, bool] | str:
    """A spec on an AbstractMesh, put on the concrete mesh that it stands for."""
    asked = dict(wanted.mesh.shape)
    if known is None:
        return f"like is on an abstract mesh {asked}, but there is no mesh (mesh=, or jax.set_mesh)"
    if dict(known.shape) != asked:
        return f"like is on an abstract mesh {asked}, but the mesh is {dict(known.shape)}"
    return NamedSharding(known, wanted.spec, memory_kind=wanted.memory_kind), True


def _named(mesh: Mesh, spec: Any, memory_kind: str | None, whose: str) -> tuple[Any, bool] | str:
    axes = [a for part in spec for a in (part if isinstance(part, tuple) else (part,)) if a]
    absent = [a for a in axes if a not in mesh.shape]
    if absent:
        have = ", ".join(map(str, mesh.axis_names))
        return f"{whose} has the axis {absent[0]!r}, which the mesh lacks (it has: {have})"
    kind = memory_kind if memory_kind in _memory_kinds(mesh.devices.flat[0]) else None
    reasons: list[str] = []
    with _reason(reasons):
        return NamedSharding(mesh, spec, memory_kind=kind), True
    return f"{whose} does not fit the mesh: {reasons[0]}"


@functools.lru_cache(maxsize=256)
def _memory_kinds(device: Any) -> frozenset[str]:
    return frozenset(m.kind for m in device.addressable_memories())


def wanted_boxes(spec: LeafSpec, target: Target) -> list[Box]:
    """Distinct boxes of a leaf that this process's devices need; the whole for NumPy."""
    shape = spec.array_shape or ()
    if target.sharding is None:
        return [Box.whole(shape)]
    return list(_arrays.distinct_boxes(target.sharding, shape)[0])


# Buffers to arrays --------------------------------------------------------------------------


def to_array(
    spec: LeafSpec, target: Target, buffers: dict[Box, _arrays.Array], *, donatable: bool
) -> Any:
    """The leaf, from host buffers of `wanted_boxes` in the wanted dtype.

    Buffers that are 64-byte aligned become the array on CPU without a copy; nobody may write into
    them afterwards. With `donatable` the array owns device memory of its own.
    """
    shape = spec.array_shape or ()
    if target.sharding is None:
        return buffers[Box.whole(shape)]
    by_offset = {box.offset: buffer for box, buffer in buffers.items()}
    array = jax.make_array_from_callback(
        shape,
        target.sharding,
        lambda index: by_offset[tuple([part.start or 0 for part in index or ()])],
    )
    if donatable:
        # Only of a jax.Array does device_put honour may_alias; of NumPy memory it keeps aliases.
        array = jax.device_put(array, target.sharding, may_alias=False)
    if target.weak_type or not target.committed:
        array = _arrays.assemble(array, weak_type=target.weak_type, committed=target.committed)
    if spec.kind == "key":
        with jax.ensure_compile_time_eval():  # a value also inside jit, as the other leaves are
            return jax.random.wrap_key_data(array, impl=spec.key_impl)
    return array
