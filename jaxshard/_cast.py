"""Conversions of elements that were asked for: rounding among floats, exact to and from integers.

Pure: numpy.
"""

from typing import Any

import numpy as np

from jaxshard import _dtypes

Array = np.ndarray[Any, Any]
_CHUNK = 1 << 16


def convert(values: Array, wanted: str) -> Array:
    """Elements in another dtype.

    Float to float and complex to complex round to nearest. To or from integers every value must be
    representable.

    Raises:
      ValueError: a value is not representable, or the kinds do not convert (bool, complex to real).
    """
    target = _dtypes.numpy_dtype(wanted)
    source_kind, target_kind = _kind(values.dtype), _kind(target)
    loses_imaginary = source_kind == "complex" and target_kind != "complex"
    if "bool" in {source_kind, target_kind} or loses_imaginary:
        raise ValueError(f"{values.dtype} is never converted to {target}")
    if "int" not in {source_kind, target_kind}:
        with np.errstate(all="ignore"):
            return _through(values, np.float64).astype(target)
    return _exactly(values, target)


def _through(values: Array, wide: Any) -> Array:
    """Values of an ml_dtypes type in a wider one: those types do not all convert to each other."""
    return values if values.dtype.isbuiltin == 1 else values.astype(wide)


def _exactly(values: Array, target: np.dtype[Any]) -> Array:
    """Convert to or from integers, if nothing is lost; in chunks, to stay small in memory."""
    flat = values.reshape(-1)
    out = np.empty(flat.shape, target)
    lost = [
        flat[start : start + _CHUNK][~_convert_chunk(flat, out, slice(start, start + _CHUNK))]
        for start in range(0, flat.size, _CHUNK)
    ]
    count = sum(map(len, lost))
    if count:
        first = next(part[0] for part in lost if len(part))
        raise ValueError(f"{count} values are not representable in {target}, the first: {first}")
    return out.reshape(values.shape)


def _convert_chunk(flat: Array, out: Array, part: slice) -> Array:
    """Convert a chunk into `out`; `[n]` whether each value is representable."""
    values, target = flat[part], out.dtype
    with np.errstate(all="ignore"):
        if _kind(values.dtype) == "float":
            wide = values.astype(np.float64)
            low, high = _int_range(target)
            inside = (wide >= float(low)) & (wide < float(high) + 1) & (np.trunc(wide) == wide)
            out[part] = np.where(inside, wide, 0).astype(target)
            return np.asarray(inside, bool)
        exact = values.astype(object)
        if _kind(target) == "int":
            low, high = _int_range(target)
            inside = np.asarray((exact >= low) & (exact <= high), bool)
            out[part] = np.where(inside, exact, 0).astype(np.int64 if low else np.uint64)
            return inside
        out[part] = values.astype(target)
        same: Array = np.asarray(_back_to_int(out[part]) == exact, bool)
        return same


def _back_to_int(values: Array) -> Array:
    """Floats as Python ints, None where they are none."""
    real = values.real.astype(np.float64)
    flat = [int(v) if np.isfinite(v) else None for v in real.reshape(-1).tolist()]
    return np.array(flat, object).reshape(values.shape)


def _int_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    bits = _dtypes.bits(dtype.name)
    if dtype.name.startswith("u"):
        return 0, (1 << bits) - 1
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def _kind(dtype: np.dtype[Any]) -> str:
    name = dtype.name
    if name == "bool":
        return "bool"
    if name.lstrip("u").startswith("int"):
        return "int"
    return "complex" if name.startswith("complex") else "float"
