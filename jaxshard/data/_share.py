"""Which rows of a global batch the devices of this process own, and the global arrays of them.

The only room of `data` that knows jax and reads shardings.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxshard import _arrays

Array = np.ndarray[Any, Any]

_WHERE = "jaxshard.data.ElasticLoader"


class Share:
    """The part of each batch that this process loads.

    Args:
      sharding: of all leaves of a batch, or a dict of them; a `PartitionSpec` is taken on the mesh
        of `jax.set_mesh`. None for NumPy arrays of the whole batch.
      devices: whose rows are wanted; None for those of this process.

    Raises:
      TypeError: no sharding.
      ValueError: a PartitionSpec without a mesh.
    """

    def __init__(self, sharding: Any, devices: Collection[Any] | None = None) -> None:
        self._sharding = _resolved(sharding)
        self._devices = None if devices is None else frozenset(devices)
        self._needed = functools.lru_cache(maxsize=16)(self._rows_of)

    @property
    def is_numpy(self) -> bool:
        """Whether batches are NumPy arrays, whole."""
        return self._sharding is None

    def require_divides(self, size: int) -> None:
        """A batch of that size can be cut among the devices.

        Raises:
          ValueError: it cannot.
        """
        for name, sharding in _each(self._sharding):
            ways = _ways(sharding)
            if size % ways:
                where = f" of {name!r}" if name else ""
                raise ValueError(
                    f"{_WHERE}: expected global_batch to be a multiple of {ways}, into which "
                    f"sharding={sharding}{where} cuts it, found {size}\n"
                    f"hint: global_batch={max(ways, size - size % ways)}"
                )

    def rows(self, size: int) -> Array:
        """Numbers of the rows of a batch of that size that are needed here, int64, rising."""
        return self._needed(size)

    def _rows_of(self, size: int) -> Array:
        if self._sharding is None:
            return np.arange(size)
        needed = np.zeros(size, bool)
        for _, sharding in _each(self._sharding):
            for device, index in _for_rank(sharding, 1).devices_indices_map((size,)).items():
                if self._is_mine(device):
                    needed[index[0]] = True
        return np.flatnonzero(needed)

    def _is_mine(self, device: Any) -> bool:
        if self._devices is None:
            return bool(device.process_index == jax.process_index())
        return device in self._devices

    def to_global(self, local: Any, size: int) -> Any:
        """Global arrays of a batch, whose needed rows are here."""
        if self._sharding is None:
            return local
        with _arrays.transfers_allowed():
            return _map_named(functools.partial(self._array, self._needed(size), size), local, ())

    def _array(self, needed: Array, size: int, path: tuple[Any, ...], values: Array) -> Any:
        sharding = _for_rank(self._of(path), values.ndim)
        shape = (size, *values.shape[1:])
        values = _as_jax_has_it(values, path)

        def part(index: tuple[slice, ...] | None) -> Array:
            assert index is not None
            start, stop, _ = index[0].indices(size)
            at = int(np.searchsorted(needed, start))
            found: Array = values[(slice(at, at + stop - start), *index[1:])]
            return found

        return jax.make_array_from_callback(shape, sharding, part)

    def _of(self, path: tuple[Any, ...]) -> Any:
        found = self._sharding
        for key in path:
            if not isinstance(found, Mapping):
                break
            if key not in found:
                raise ValueError(
                    f"{_WHERE}: sharding has {list(found)}, a batch has {key!r}\n"
                    "hint: one sharding serves all leaves"
                )
            found = found[key]
        return found


def _resolved(sharding: Any) -> Any:
    if sharding is None or isinstance(sharding, Sharding):
        return sharding
    if isinstance(sharding, Mapping):
        return {key: _resolved(part) for key, part in sharding.items()}
    if isinstance(sharding, PartitionSpec):
        mesh = _arrays.current_mesh()
        if mesh is None:
            raise ValueError(
                f"{_WHERE}: sharding={sharding} needs a mesh\n"
                "hint: jax.set_mesh(mesh), or sharding=NamedSharding(mesh, spec)"
            )
        return NamedSharding(mesh, sharding)
    raise TypeError(
        f"{_WHERE}: expected a sharding, found {type(sharding).__qualname__}\n"
        "hint: sharding=NamedSharding(mesh, PartitionSpec('data')), or None for NumPy arrays"
    )


def _each(sharding: Any, name: str = "") -> list[tuple[str, Sharding]]:
    if sharding is None:
        return []
    if isinstance(sharding, Mapping):
        return [pair for key, part in sharding.items() for pair in _each(part, f"{name}{key}")]
    return [(name, sharding)]


@functools.lru_cache(maxsize=256)
def _for_rank(sharding: Any, rank: int) -> Any:
    """The sharding without the axes that a leaf does not have, so that labels go with tokens."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > rank:
        return NamedSharding(
            sharding.mesh,
            PartitionSpec(*sharding.spec[:rank]),  # type: ignore[no-untyped-call]  # JAX's
            memory_kind=sharding.memory_kind,
        )
    return sharding


def _ways(sharding: Any) -> int:
    """Into how many parts the batch axis is cut."""
    if not isinstance(sharding, NamedSharding) or not len(sharding.spec):
        return 1
    axes = sharding.spec[0]
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    ways = 1
    for name in names:
        ways *= sharding.mesh.shape[name]
    return ways


def _as_jax_has_it(values: Array, path: tuple[Any, ...]) -> Array:
    """Elements of a type that JAX has; 64-bit integers are cut only if none of them changes."""
    name = "/".join(map(str, path)) or "the batch"
    if values.dtype.kind not in "biufcV" or values.dtype.hasobject:
        raise TypeError(
            f"{name!r}: expected numbers, found {values.dtype}, which no jax.Array holds\n"
            "hint: encode it in transform=, or sharding=None for NumPy arrays"
        )
    wanted = jax.dtypes.canonicalize_dtype(values.dtype)
    if wanted == values.dtype:
        return values
    if wanted.kind in "iu" and values.size:
        info = np.iinfo(wanted)
        if values.min() < info.min or values.max() > info.max:
            raise OverflowError(
                f"{name!r}: {values.dtype} values do not fit into {wanted}, and jax_enable_x64 is "
                "off\nhint: jax.config.update('jax_enable_x64', True), or other numbers"
            )
    return values.astype(wanted)


def _map_named(call: Callable[..., Any], tree: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map_named(call, part, (*path, key)) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_map_named(call, part, (*path, i)) for i, part in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return call(path, tree)
