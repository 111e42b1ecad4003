"""Names of element types, and how sub-byte types lie in bytes.

A logical dtype is named as NumPy and ml_dtypes name it (`float32`, `bfloat16`, `int4`). What
Zarr v3 in TensorStore cannot hold, and every type smaller than a byte, is stored in a `uint8`
carrier: low bits first along the last axis, or one byte per element. Pure: numpy only, and that
only where elements are touched, since names and sizes are all that a manifest asks for.

Format: docs/format.md, "Element types".
"""

# ruff: noqa: PLC0415  (numpy and ml_dtypes take longer to import than a manifest to read)

import functools
from typing import TYPE_CHECKING, Any

from jaxshard._errors import FormatError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_NATIVE_BYTES = {
    "bool": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
_SUB_BYTE_BITS = {
    "int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4,
    "float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6,
}  # fmt: skip
_BYTE_FLOATS = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
_EXTENDED = ["bfloat16", *_BYTE_FLOATS, *_SUB_BYTE_BITS]
# The first two are not known to every supported version of TensorStore.
_CARRIER = {"float8_e4m3", "float8_e8m0fnu", *_SUB_BYTE_BITS}


@functools.cache
def _table() -> "dict[str, np.dtype[Any]]":
    import ml_dtypes
    import numpy as np

    table = {name: np.dtype(name) for name in _NATIVE_BYTES}
    for name in _EXTENDED:
        scalar = getattr(ml_dtypes, name, None)  # the 1-bit and 6-bit types are young
        if scalar is not None:
            table[name] = np.dtype(scalar)
    return table


def names() -> list[str]:
    """Every logical dtype that this installation can hold."""
    return list(_table())


def is_known(name: object) -> bool:
    """Whether the format has a logical dtype of that name; this installation may lack it."""
    return isinstance(name, str) and (name in _NATIVE_BYTES or name in _EXTENDED)


def is_supported(dtype: "np.dtype[Any]") -> bool:
    """Whether arrays of `dtype` can be stored (byte order does not matter)."""
    return dtype.name in _table() and not dtype.hasobject and dtype.names is None


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """The NumPy dtype (native byte order) of a logical dtype.

    Raises:
      KeyError: no such dtype.
      FormatError: the installed ml_dtypes is too old for it.
    """
    if name not in _table() and is_known(name):
        raise FormatError(
            f"dtype {name}: expected to be in ml_dtypes, found a version without it",
            hint="pip install --upgrade ml_dtypes",
        )
    return _table()[name]


def itemsize(name: str) -> int:
    """Bytes that one element takes in memory; those of less than a byte take one."""
    return 2 if name == "bfloat16" else _NATIVE_BYTES.get(name, 1)


def bits(name: str) -> int:
    """Bits of one element."""
    return _SUB_BYTE_BITS.get(name) or 8 * itemsize(name)


def stored_dtype(name: str) -> str:
    """Zarr data type that holds elements of a logical dtype."""
    return "uint8" if name in _CARRIER else name


def elements_per_byte(name: str) -> int:
    """How many elements share a byte when they are packed; 1 for whole-byte and 6-bit types."""
    size = _SUB_BYTE_BITS.get(name, 8)
    return 8 // size if 8 % size == 0 else 1


def to_stored(array: "Array", name: str, per_byte: int) -> "Array":
    """Elements `[..., n]` to stored elements `[..., ceil(n / per_byte)]`; a view where possible."""
    import numpy as np

    dtype = numpy_dtype(name)
    if array.dtype != dtype:
        array = array.astype(dtype, copy=False)  # only the byte order can differ here
    if name not in _CARRIER:
        return array
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(array.shape)
    mask = np.uint8((1 << min(8, bits(name))) - 1)
    if per_byte == 1:
        return raw & mask
    # Slot by slot, so that no copy of the unpacked elements is made.
    packed = np.zeros((*raw.shape[:-1], -(-raw.shape[-1] // per_byte)), np.uint8)
    for slot in range(per_byte):
        part = raw[..., slot::per_byte] & mask
        part <<= np.uint8(slot * bits(name))
        packed[..., : part.shape[-1]] |= part
    return packed


def from_stored(stored: "Array", name: str, per_byte: int, last: slice) -> "Array":
    """Stored elements to logical ones; of the last axis, once unpacked, only `last` is kept."""
    import numpy as np

    dtype = numpy_dtype(name)
    if name not in _CARRIER:
        return stored.view(dtype)
    raw = stored.reshape(-1) if stored.ndim == 0 else stored
    if per_byte > 1:
        mask = np.uint8((1 << bits(name)) - 1)
        unpacked = np.empty((*stored.shape[:-1], stored.shape[-1] * per_byte), np.uint8)
        for slot in range(per_byte):
            unpacked[..., slot::per_byte] = (stored >> np.uint8(slot * bits(name))) & mask
        raw = unpacked[..., last]
    if name in {"int1", "int2", "int4"}:  # ml_dtypes keeps signed ones sign-extended in memory
        sign = np.uint8(1 << (bits(name) - 1))
        raw = raw ^ sign
        raw -= sign
    shape = raw.shape if stored.ndim else ()
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)
