"""Conversions round among floats, and to or from integers are exact or refused."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings

from jaxshard import _dtypes
from jaxshard._cast import convert

quick = settings(derandomize=True, deadline=None, max_examples=100)
INTS = [n for n in _dtypes.names() if n.lstrip("u").startswith("int")]
FLOATS = [n for n in _dtypes.names() if "float" in n]
COMPLEX = ["complex64", "complex128"]
REFUSED = "values are not representable in"


def bounds(name):
    info = ml_dtypes.iinfo(_dtypes.numpy_dtype(name))
    return int(info.min), int(info.max)


# Float to float -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_float_to_float_rounds_as_numpy_and_ml_dtypes_do(source, target):
    values = np.array([1.0, 1.5, 3.14159, 2.0, 0.1], _dtypes.numpy_dtype(source))
    found = convert(values, target)
    wanted = values.astype(np.float64).astype(_dtypes.numpy_dtype(target))
    assert found.dtype == wanted.dtype
    assert found.tobytes() == wanted.tobytes()


def test_float_to_float_is_to_nearest_even():
    halves = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)  # halfway between two bfloat16
    assert convert(halves, "bfloat16").astype(float).tolist() == [1.0, 1.015625]


@pytest.mark.parametrize("target", ["complex64", "complex128"])
def test_real_becomes_complex_and_complex_changes_width(target):
    assert np.array_equal(convert(np.array([1.5, -2.0]), target), [1.5, -2.0])
    assert np.array_equal(convert(np.array([1.5 - 2j], np.complex64), target), [1.5 - 2j])


def test_a_float_beyond_the_target_overflows_without_a_warning():
    assert convert(np.array([1e300]), "float32").tolist() == [np.inf]


# Never --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["int8", "uint1", "float32", "bfloat16", "complex64"])
def test_bool_is_never_converted(target):
    with pytest.raises(ValueError, match=f"bool is never converted to {target}"):
        convert(np.array([True]), target)
    with pytest.raises(ValueError, match=f"{target} is never converted to bool"):
        convert(np.zeros(1, _dtypes.numpy_dtype(target)), "bool")


@pytest.mark.parametrize("target", ["float32", "bfloat16", "int32", "uint4", "int64"])
@pytest.mark.parametrize("source", COMPLEX)
def test_complex_is_never_converted_to_real(source, target):
    with pytest.raises(ValueError, match=f"{source} is never converted to {target}"):
        convert(np.array([1 + 0j], source), target)


# Integers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", INTS)
@pytest.mark.parametrize("source", INTS)
def test_an_integer_is_taken_exactly_or_refused(source, target):
    (low, high), (least, most) = bounds(source), bounds(target)
    some = sorted({low, high, 0, max(low, min(1, high)), least, most, least - 1, most + 1})
    for number in [n for n in some if low <= n <= high]:
        values = np.array([number], np.int64 if number < 0 else np.uint64)
        values = values.astype(_dtypes.numpy_dtype(source))
        if least <= number <= most:
            found = convert(values, target)
            assert found.dtype == _dtypes.numpy_dtype(target)
            assert [int(v) for v in found] == [number]
        else:
            with pytest.raises(ValueError, match=f"1 {REFUSED} {target}, the first: {number}"):
                convert(values, target)


@pytest.mark.parametrize("target", INTS)
@pytest.mark.parametrize("source", FLOATS)
def test_a_float_that_is_a_whole_number_in_range_becomes_that_number(source, target):
    dtype = _dtypes.numpy_dtype(source)
    low, high = bounds(target)
    with np.errstate(all="ignore"):
        all_values = np.array([0.0, 1.0, -1.0, 2.0, 4.0, -8.0, 96.0], dtype).astype(float)
    finite = all_values[np.isfinite(all_values)]
    whole = np.array([v for v in finite if low <= v <= high and v == int(v)], dtype)
    found = convert(whole, target)
    assert [int(v) for v in found] == [int(v) for v in whole.astype(float)]


@pytest.mark.parametrize("value", [0.5, -0.25, np.nan, np.inf, -np.inf, 1e30, -129.0, 128.0])
def test_a_float_that_is_no_integer_of_the_target_is_refused(value):
    # CASE 39: 1000.7 became -24.
    with pytest.raises(ValueError, match=f"1 {REFUSED} int8, the first: "):
        convert(np.array([3.0, value, -4.0]), "int8")


@pytest.mark.parametrize(
    ("source", "value", "target"),
    [
        ("float64", 2.0**63, "int64"),
        ("float64", 2.0**64, "uint64"),
        ("float32", 2.0**63, "int64"),
        ("float32", 2.0**31, "int32"),
        ("float64", -(2.0**63) - 2048, "int64"),
        ("float64", -1.0, "uint64"),
        ("bfloat16", 256.0, "uint8"),
    ],
)
def test_a_float_just_beyond_the_last_integer_is_refused(source, value, target):
    values = np.array([value], _dtypes.numpy_dtype(source))
    with pytest.raises(ValueError, match=REFUSED):
        convert(values, target)


@pytest.mark.parametrize(
    ("value", "target"),
    [
        (2.0**63 - 1024, "int64"),
        (-(2.0**63), "int64"),
        (2.0**64 - 2048, "uint64"),
        (255.0, "uint8"),
    ],
)
def test_a_float_that_is_the_last_integer_is_taken(value, target):
    assert int(convert(np.array([value]), target)[0]) == int(value)


@pytest.mark.parametrize("target", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 17, 257, 2049, 16_777_217, 2**53 + 1])
def test_an_integer_becomes_a_float_only_if_that_is_exactly_it(number, target):
    # CASE 39: 16777217 became 16777216.
    dtype = _dtypes.numpy_dtype(target)
    with np.errstate(all="ignore"):
        rounded = np.array([number], np.int64).astype(dtype)
        back = complex(rounded.astype(np.complex128)[0])
    if back == number and back.real.is_integer() and int(back.real) == number:
        found = convert(np.array([number], np.int64), target)
        assert found.tobytes() == rounded.tobytes()
    else:
        with pytest.raises(ValueError, match=f"1 {REFUSED} {target}, the first: {number}"):
            convert(np.array([number], np.int64), target)


@quick
@given(st.integers(-(2**63), 2**63 - 1))
@example(16_777_217)
@example(2**63 - 1)
def test_any_int64_to_float32_and_back_is_itself_or_refused(number):
    try:
        there = convert(np.array([number]), "float32")
    except ValueError:
        assert float(np.float32(number)) != number or int(np.float32(number)) != number
    else:
        assert int(convert(there, "int64")[0]) == number


def test_all_values_that_do_not_fit_are_counted_also_in_a_large_array():
    values = np.zeros((500, 400), np.int32)
    values[0, 7] = 300
    values[499, 399] = -300
    with pytest.raises(ValueError, match=f"^2 {REFUSED} int8, the first: 300$"):
        convert(values, "int8")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3), (70_000,)])
def test_the_shape_stays(shape):
    assert convert(np.ones(shape, np.int32), "float32").shape == shape
    assert convert(np.ones(shape, np.float32), "int8").shape == shape
    assert convert(np.ones(shape, np.float32), "bfloat16").shape == shape


def test_strided_values_are_taken_in_order():
    values = np.arange(12, dtype=np.int64).reshape(3, 4).T[::-1]
    assert np.array_equal(convert(values, "int8"), values)
