"""Lets zarr-python read bfloat16 and float8: importing this module registers them.

Zarr-python knows the element types of NumPy; a checkpoint also holds those that JAX adds. After
`import jaxshard.zarr_dtypes`, zarr reads and writes all types that jaxshard stores under their own
names. Those that no Zarr library has to know (int4, float4_e2m1fn, float8_e4m3 and others smaller
or younger than most) lie in `uint8` arrays, with an attribute that says how to unpack them.

This module imports neither jax nor tensorstore. It is also announced as entry points of the group
`zarr.data_type`; zarr-python collects these but up to 3.1.6 never loads them, hence the import.

Example:
  >>> import jaxshard, jaxshard.zarr_dtypes, ml_dtypes, numpy as np, tempfile, zarr
  >>> tree = {"w": np.ones((2, 3), ml_dtypes.bfloat16)}
  >>> with tempfile.TemporaryDirectory() as path:
  ...     _ = jaxshard.save(f"{path}/c", tree, options=jaxshard.SaveOptions(pack_below=0))
  ...     group = zarr.open_group(jaxshard.open(f"{path}/c").zarr_root, mode="r")
  ...     group["w"][0]
  array([1, 1, 1], dtype=bfloat16)

Xarray opens the group too: `xarray.open_zarr(ckpt.zarr_root, consolidated=False)`, and
`xarray.open_datatree(..., engine="zarr")` with all that is below. The dimensions of a leaf `w` are
`w.0`, `w.1` and so on.

Format: docs/format.md, "Element types".
Source: the zarr-extensions registry, data type `bfloat16` and those named `float8_…`.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, Never, Self

import ml_dtypes  # noqa: F401  (gives NumPy their names)
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

__all__ = [
    "BFloat16",
    "Float8E3M4",
    "Float8E4M3B11FNUZ",
    "Float8E4M3FN",
    "Float8E4M3FNUZ",
    "Float8E5M2",
    "Float8E5M2FNUZ",
]

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _ExtendedFloat(ZDType[np.dtype[Any], Any], HasItemSize):
    """A floating-point type of ml_dtypes, as Zarr v3 names it."""

    @classmethod
    def native(cls) -> np.dtype[Any]:
        """Its NumPy dtype."""
        return np.dtype(cls._zarr_v3_name)

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """The type of arrays of `dtype`, if it is this one."""
        if dtype == cls.native():
            return cls()
        raise DataTypeValidationError(f"dtype: expected {cls._zarr_v3_name}, found {dtype}")

    def to_native_dtype(self) -> np.dtype[Any]:
        """Its NumPy dtype."""
        return self.native()

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return self.native().itemsize

    @classmethod
    def _from_json_v2(cls, data: object) -> Never:
        raise DataTypeValidationError(f"data type: expected one of Zarr v3, found {data!r} of v2")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"data type: expected {cls._zarr_v3_name!r}, found {data!r}")

    def to_json(self, zarr_format: Literal[2, 3]) -> str:  # type: ignore[override]  # v3 alone
        """Its name."""
        if zarr_format == 3:
            return self._zarr_v3_name
        raise ValueError(f"{self._zarr_v3_name}: expected Zarr v3, found v{zarr_format}")

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (numbers.Real, self.native().type))

    def cast_scalar(self, data: object) -> Any:
        """A number, rounded to this type."""
        if self._check_scalar(data):
            return self.native().type(data)
        raise TypeError(f"{self._zarr_v3_name}: expected a number, found {data!r}")

    def default_scalar(self) -> Any:
        """Zero."""
        return self.native().type(0)

    def from_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> Any:
        """A fill value: a number, `"NaN"`, `"Infinity"`, or bits as `"0x7fc0"`."""
        del zarr_format
        if isinstance(data, str) and data.startswith("0x"):
            bits = int(data, 16).to_bytes(self.item_size, "little")
            return np.frombuffer(bits, self.native())[0]
        return self.cast_scalar(_WORDS.get(data, data) if isinstance(data, str) else data)

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> float | str:
        """What `from_json_scalar` reads back with the same bits."""
        del zarr_format
        value = self.cast_scalar(data)
        number = float(value)
        if math.isfinite(number):
            return number
        if math.isinf(number):
            return "Infinity" if number > 0 else "-Infinity"
        if value.tobytes() == self.native().type(math.nan).tobytes():
            return "NaN"
        return f"0x{int.from_bytes(value.tobytes(), 'little'):0{2 * self.item_size}x}"


@dataclass(frozen=True, kw_only=True)
class BFloat16(_ExtendedFloat, HasEndianness):
    """`bfloat16`: the upper half of a float32. Little-endian only, as ml_dtypes has it."""

    dtype_cls = type(np.dtype("bfloat16"))
    _zarr_v3_name = "bfloat16"

    def to_native_dtype(self) -> np.dtype[Any]:
        """Its NumPy dtype, which has no swapped form."""
        if self.endianness == "little":
            return super().to_native_dtype()
        raise ValueError("bfloat16: expected little-endian bytes, found big-endian")


class Float8E3M4(_ExtendedFloat):
    """`float8_e3m4`: 3 bits of exponent, 4 of mantissa, infinities."""

    dtype_cls = type(np.dtype("float8_e3m4"))
    _zarr_v3_name = "float8_e3m4"


class Float8E4M3B11FNUZ(_ExtendedFloat):
    """`float8_e4m3b11fnuz`: 4 and 3 bits, exponent bias 11; one NaN, no infinity, no -0."""

    dtype_cls = type(np.dtype("float8_e4m3b11fnuz"))
    _zarr_v3_name = "float8_e4m3b11fnuz"


class Float8E4M3FN(_ExtendedFloat):
    """`float8_e4m3fn`: 4 bits of exponent, 3 of mantissa; NaN, no infinity."""

    dtype_cls = type(np.dtype("float8_e4m3fn"))
    _zarr_v3_name = "float8_e4m3fn"


class Float8E4M3FNUZ(_ExtendedFloat):
    """`float8_e4m3fnuz`: 4 bits of exponent, 3 of mantissa; one NaN, no infinity, no -0."""

    dtype_cls = type(np.dtype("float8_e4m3fnuz"))
    _zarr_v3_name = "float8_e4m3fnuz"


class Float8E5M2(_ExtendedFloat):
    """`float8_e5m2`: 5 bits of exponent, 2 of mantissa, infinities."""

    dtype_cls = type(np.dtype("float8_e5m2"))
    _zarr_v3_name = "float8_e5m2"


class Float8E5M2FNUZ(_ExtendedFloat):
    """`float8_e5m2fnuz`: 5 bits of exponent, 2 of mantissa; one NaN, no infinity, no -0."""

    dtype_cls = type(np.dtype("float8_e5m2fnuz"))
    _zarr_v3_name = "float8_e5m2fnuz"


def _register() -> None:
    """Register what zarr-python does not know by now: two classes for one dtype would clash."""
    for name in __all__:
        data_type = globals()[name]
        try:
            data_type_registry.match_dtype(data_type.native())
        except ValueError:
            data_type_registry.register(data_type().to_json(3), data_type)


_register()
