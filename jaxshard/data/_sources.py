"""Random-access sources of rows: what is one, how many rows it has, how they are read.

Arrays (NumPy, memory-mapped, Zarr, h5py, `jax.Array`) and dicts of arrays of one length are read by
columns, many rows at once; everything else with `__len__` and `__getitem__` row by row, or many at
once by `__getitems__`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

Array = np.ndarray[Any, Any]

_ROWS_MAX = 1 << 62
_WHERE = "jaxshard.data.ElasticLoader"


class RowSource(Protocol):
    """Rows that can be read in any order."""

    length: int

    def columns(self, ids: Array) -> Any | None:
        """These rows as arrays with a leading axis; None if it cannot read by columns."""

    def rows(self, ids: Array) -> list[Any]:
        """These rows, one by one."""


def open_source(source: Any) -> RowSource:
    """Make a source of what a user gave.

    Raises:
      TypeError: it cannot be read in any order, or does not say how many rows it has.
      ValueError: it has no rows, or claims to have no end.
    """
    if isinstance(source, Mapping) or _is_array(source):
        return Columns(source)
    _require_random_access(source)
    return Items(source)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def _require_random_access(source: Any) -> None:
    name = type(source).__qualname__
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")) or isinstance(
        source, (str, bytes)
    ):
        hint = "list(rows) if they fit into memory"
        if hasattr(source, "__iter__"):
            hint += (
                "; a stream that can only be read forward goes into the state itself, as "
                "jaxshard.data.Stateful(stream)"
            )
        raise TypeError(
            f"{_WHERE}: expected a source with __len__ and __getitem__, found {name}\nhint: {hint}"
        )
    try:
        length = len(source)
    except (TypeError, OverflowError) as e:
        raise TypeError(f"{_WHERE}: {name} does not say how many rows it has: {e}") from e
    if length >= _ROWS_MAX:
        raise ValueError(
            f"{_WHERE}: {name} is repeated without end: it says that it has {length:,} rows\n"
            "hint: give the source before its .repeat(), and say epochs= here"
        )
    if length == 0:
        raise ValueError(f"{_WHERE}: {name} has no rows\nhint: is the path of the data right?")


class Columns:
    """An array, or a dict of arrays of one length."""

    def __init__(self, source: Any) -> None:
        self._is_dict = isinstance(source, Mapping)
        arrays = dict(source) if isinstance(source, Mapping) else {"": source}
        for name, array in arrays.items():
            if not _is_array(array):
                raise TypeError(
                    f"{_WHERE}: expected a dict of arrays, found {type(array).__qualname__} at "
                    f"{name!r}\nhint: np.asarray(values)"
                )
        lengths = {name: array.shape[0] for name, array in arrays.items() if array.shape}
        if len(set(lengths.values())) != 1 or len(lengths) != len(arrays):
            raise ValueError(
                f"{_WHERE}: expected arrays with as many rows each, found "
                f"{ {name: a.shape for name, a in arrays.items()} }\n"
                "hint: the first axis counts the rows"
            )
        self.length = next(iter(lengths.values()))
        if self.length == 0:
            raise ValueError(f"{_WHERE}: the source has no rows\nhint: is the path right?")
        self._arrays = {
            name: np.asarray(a) if type(a).__module__.startswith("jax") else a
            for name, a in arrays.items()
        }

    def columns(self, ids: Array) -> Any:
        """These rows as arrays with a leading axis."""
        found = {name: _take(array, ids) for name, array in self._arrays.items()}
        return found if self._is_dict else found[""]

    def rows(self, ids: Array) -> list[Any]:
        """These rows, one by one."""
        columns = self.columns(ids)
        if not self._is_dict:
            return list(columns)
        return [{name: a[i] for name, a in columns.items()} for i in range(len(ids))]


def _take(array: Any, ids: Array) -> Array:
    if isinstance(array, np.ndarray):
        return np.asarray(array[ids])
    # Zarr and HDF5: each row once and in rising order, so that a chunk is read once.
    wanted, places = np.unique(ids, return_inverse=True)
    found = array.oindex[wanted] if hasattr(array, "oindex") else array[wanted]
    return np.asarray(found)[places]


class Items:
    """Anything with `__len__` and `__getitem__`."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.length = len(source)
        self._many = getattr(source, "__getitems__", None)

    def columns(self, ids: Array) -> None:
        """It cannot."""
        del ids

    def rows(self, ids: Array) -> list[Any]:
        """These rows, one by one."""
        numbers = ids.tolist()
        if self._many is not None:
            rows = list(self._many(numbers))
            if len(rows) != len(numbers):
                raise ValueError(
                    f"{type(self._source).__qualname__}.__getitems__: asked for {len(numbers)} "
                    f"rows, got {len(rows)}"
                )
        else:
            rows = [self._source[number] for number in numbers]
        for number, row in zip(numbers, rows, strict=True):
            if row is None:
                raise ValueError(
                    f"row {number} of {type(self._source).__qualname__} is None: a source that "
                    "filters has no fixed rows\nhint: filter first, and give the numbers of the "
                    "rows that are left: [source[i] for i in kept]"
                )
        return rows


# What tells one source from another ---------------------------------------------------------------


def fingerprint(source: RowSource) -> dict[str, Any]:
    """How many rows a source has, and a digest of four of them.

    The digest is None where rows are of types that have none, or differ when they are read again.
    """
    ids = np.unique(np.array([0, source.length // 3, 2 * source.length // 3, source.length - 1]))
    try:
        digests = [_digest(source.rows(ids)) for _ in range(2)]
    except TypeError:
        digests = []
    same = len(digests) == 2 and digests[0] == digests[1]
    return {"rows": source.length, "digest": digests[0] if same else None}


def _digest(rows: Sequence[Any]) -> str:
    hasher = xxhash.xxh3_128()
    for row in rows:
        _feed(hasher, row)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    """Types and bits of a row.

    Raises:
      TypeError: it has a value without one.
    """
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            hasher.update(f"{key!s}:".encode())
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"{len(value)}[".encode())
        for part in value:
            _feed(hasher, part)
    elif isinstance(value, (str, bytes)):
        hasher.update(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
    else:
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(type(value).__qualname__)
        hasher.update(f"{array.dtype.name}{array.shape}".encode())
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
