"""Every element type keeps its bits on the way to bytes and back, packed or not."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from jaxshard import FormatError, _dtypes

quick = settings(derandomize=True, deadline=None, max_examples=60)
NAMES = _dtypes.names()
SUB_BYTE = [name for name in NAMES if _dtypes.bits(name) < 8]
PACKED = [name for name in NAMES if _dtypes.elements_per_byte(name) > 1]


def elements(name, shape, seed=0):
    """Elements of arbitrary bits, in the form in which ml_dtypes keeps them."""
    rng = np.random.default_rng(seed)
    dtype = _dtypes.numpy_dtype(name)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if name == "bool":
        raw &= 1
    width = _dtypes.bits(name)
    if width < 8:
        raw &= np.uint8((1 << width) - 1)
        if name.startswith("int"):
            raw = np.where(raw >> (width - 1), raw | np.uint8(256 - (1 << width)), raw)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_every_type_of_numpy_numbers_and_of_ml_dtypes_is_there():
    extended = {n for n in dir(ml_dtypes) if n.startswith(("int", "uint", "float", "bfloat"))}
    native = {np.dtype(c).name for c in "?bhilqBHILQefdFD"}
    assert extended | native == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_type_is_found_by_the_name_that_numpy_gives_it(name):
    assert _dtypes.numpy_dtype(name).name == name
    assert _dtypes.is_supported(_dtypes.numpy_dtype(name))


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_the_type(name):
    dtype = _dtypes.numpy_dtype(name)
    info = ml_dtypes.iinfo if "int" in name else ml_dtypes.finfo
    if name == "bool":
        assert _dtypes.bits(name) == 8
    elif name.startswith("complex"):
        assert _dtypes.bits(name) == 8 * dtype.itemsize
    else:
        assert _dtypes.bits(name) == info(dtype).bits


def test_packing_puts_as_many_as_fit_without_crossing_bytes():
    assert {n: _dtypes.elements_per_byte(n) for n in SUB_BYTE} == {
        n: {1: 8, 2: 4, 4: 2, 6: 1}[_dtypes.bits(n)] for n in SUB_BYTE
    }
    assert all(_dtypes.elements_per_byte(n) == 1 for n in NAMES if n not in SUB_BYTE)


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_type_is_a_byte_only_where_zarr_in_tensorstore_lacks_the_type(name):
    ts = pytest.importorskip("tensorstore")
    stored = _dtypes.stored_dtype(name)
    assert stored == ("uint8" if name in {*SUB_BYTE, "float8_e4m3", "float8_e8m0fnu"} else name)
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://x/",
        "dtype": stored,
        "schema": {"domain": {"shape": [1]}},
    }
    created = ts.open(spec, create=True, context=ts.Context()).result()
    assert created.dtype.numpy_dtype == _dtypes.numpy_dtype(stored)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_known_without_numpy(name):
    assert _dtypes.itemsize(name) == _dtypes.numpy_dtype(name).itemsize
    assert _dtypes.is_known(name)


def test_a_dtype_that_an_old_ml_dtypes_lacks_is_a_format_error(monkeypatch):
    table = {n: d for n, d in _dtypes._table().items() if n != "int4"}
    monkeypatch.setattr(_dtypes, "_table", lambda: table)
    assert _dtypes.is_known("int4")
    with pytest.raises(
        FormatError, match="found a version without it\nhint: pip install --upgrade"
    ):
        _dtypes.numpy_dtype("int4")


@pytest.mark.parametrize("name", ["float6", "float128", "object", "str", "int3", "V4"])
def test_an_unknown_name_is_a_key_error(name):
    with pytest.raises(KeyError, match=name):
        _dtypes.numpy_dtype(name)


@pytest.mark.parametrize(
    "dtype",
    [object, "U4", "S3", "V8", "datetime64[s]", "timedelta64[s]", [("a", "f4")], "longdouble"],
)
def test_other_dtypes_are_not_supported(dtype):
    assert not _dtypes.is_supported(np.dtype(dtype))


def test_byte_order_does_not_matter_for_support():
    assert _dtypes.is_supported(np.dtype(">f4"))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (3, 0), (2, 1, 9)])
@pytest.mark.parametrize("name", NAMES)
def test_elements_keep_their_bits(name, shape):
    values = elements(name, shape)
    per_byte = _dtypes.elements_per_byte(name) if shape else 1
    stored = _dtypes.to_stored(values, name, per_byte)
    assert stored.dtype == _dtypes.numpy_dtype(_dtypes.stored_dtype(name))
    back = _dtypes.from_stored(stored, name, per_byte, slice(0, shape[-1] if shape else None))
    assert same_bits(back, values)


@pytest.mark.parametrize("name", SUB_BYTE)
def test_unpacked_sub_byte_elements_have_a_byte_each_with_zeros_above(name):
    stored = _dtypes.to_stored(elements(name, (5, 3)), name, 1)
    assert stored.shape == (5, 3)
    assert not (stored >> _dtypes.bits(name)).any()
    assert same_bits(_dtypes.from_stored(stored, name, 1, slice(None)), elements(name, (5, 3)))


@quick
@given(st.sampled_from(PACKED), st.integers(1, 20), st.data())
def test_any_part_of_packed_elements_can_be_taken(name, n, data):
    values = elements(name, (2, n), seed=n)
    k = _dtypes.elements_per_byte(name)
    stored = _dtypes.to_stored(values, name, k)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    first = start // k
    cut = stored[:, first : -(-stop // k)]
    part = _dtypes.from_stored(cut, name, k, slice(start - first * k, stop - first * k))
    assert same_bits(part, values[:, start:stop])


def test_packing_is_low_bits_first_with_zeros_behind():
    values = np.array([1, -2, 3], ml_dtypes.int4)
    assert _dtypes.to_stored(values, "int4", 2).tolist() == [0xE1, 0x03]
    bits = np.array([1, 0, 1, 1, 0, 0, 0, 0, 1], ml_dtypes.uint1)
    assert _dtypes.to_stored(bits, "uint1", 8).tolist() == [0b00001101, 1]


def test_whole_byte_elements_are_not_copied():
    values = elements("float32", (4, 4))
    assert _dtypes.to_stored(values, "float32", 1) is values
    assert np.shares_memory(_dtypes.from_stored(values, "float32", 1, slice(None)), values)


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">u8", ">c16", ">f2"])
def test_a_foreign_byte_order_becomes_the_native_one_with_the_same_values(dtype):
    values = np.arange(4).astype(dtype)
    stored = _dtypes.to_stored(values, values.dtype.name, 1)
    assert stored.dtype.isnative
    assert np.array_equal(stored, values)


@pytest.mark.parametrize("name", SUB_BYTE)
def test_strided_and_fortran_arrays_are_taken_in_c_order(name):
    values = elements(name, (6, 8))
    k = _dtypes.elements_per_byte(name)
    for view in (values.T, values[::2, ::-1], np.asfortranarray(values)):
        packed = _dtypes.to_stored(view, name, k)
        back = _dtypes.from_stored(packed, name, k, slice(0, view.shape[-1]))
        assert same_bits(back, np.ascontiguousarray(view))
