"""States of iterators become JSON and come back; what would need code is refused by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import bits, run_python

from jaxshard import FormatError, UnsupportedLeafError
from jaxshard._statejson import decode, decode_text, encode

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.just("$"))
STATES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=10,
)


def through(state: object) -> object:
    return decode_text(json.dumps(encode(state), allow_nan=False))


def same(a: object, b: object) -> bool:
    """Equal, with types: True is not 1."""
    return repr(a) == repr(b) or (type(a) is dict and a == b)


@given(STATES)
def test_a_state_comes_back(state):
    found = through(state)
    assert found == state
    assert type(found) is type(state)
    assert isinstance(state, dict) or same(found, state)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -0.0])
def test_floats_that_json_lacks_come_back(value):
    found = through([value])[0]
    assert bits(np.float64(found)) == bits(np.float64(value))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array(1.5, np.float16),
        np.zeros((0, 3), np.uint8),
        np.array([1, 2], ml_dtypes.bfloat16),
        np.array([True, False]),
        np.arange(12).reshape(3, 4).T,
    ],
)
def test_arrays_come_back(value):
    found = through({"a": value})["a"]
    assert isinstance(found, np.ndarray)
    assert (found.shape, found.dtype) == (value.shape, value.dtype.newbyteorder("="))
    assert bits(found) == bits(value)
    found[...] = 0  # and can be written to


def test_numpy_scalars_stay_scalars():
    found = through([np.int64(3), np.uint8(255), np.float32(0.1)])
    assert [type(x) for x in found] == [np.int64, np.uint8, np.float32]
    assert found == [3, 255, np.float32(0.1)]


def test_everything_that_cannot_be_stored_is_named_with_its_place():
    state = {"a": [1, object()], "b": {"c": {1, 2}}, "ok": 1, "d": np.array([None])}
    with pytest.raises(UnsupportedLeafError) as error:
        encode(state)
    text = str(error.value)
    assert "state['a'][1]: builtins.object" in text
    assert "state['b']['c']: builtins.set" in text
    assert "state['d']: a NumPy value of dtype object" in text
    assert "hint: " in text
    assert "'ok'" not in text


def test_a_state_without_end_is_refused():
    state: list[object] = []
    state.append(state)
    with pytest.raises(UnsupportedLeafError, match="nested deeper than"):
        encode(state)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"$": "pickle", "data": ""}',
        '{"$": "numpy", "dtype": "object", "shape": [1], "data": ""}',
        '{"$": "numpy", "dtype": "int32", "shape": [9], "data": "AAAA"}',
        '{"$": "numpy", "dtype": "int32", "shape": [1], "data": "AAAA!"}',
        '{"$": "bytes"}',
        '{"$": "dict", "items": [[[], 1]]}',
        '{"$": "dict", "items": 3}',
        '{"$": "float", "value": []}',
    ],
)
def test_text_of_no_state_is_refused(text):
    with pytest.raises(FormatError, match="state of an iterator"):
        decode_text(text)


def test_a_value_of_another_kind_is_refused():
    with pytest.raises(FormatError):
        decode({"$": ["unhashable"]})


def test_torch_tensors_come_back_as_such_only_where_torch_is():
    torch = pytest.importorskip("torch")
    encoded = encode({"rng": torch.arange(4, dtype=torch.uint8)})
    found = decode(encoded)["rng"]
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [0, 1, 2, 3]
    code = f"from jaxshard._statejson import decode; print(type(decode({encoded!r})['rng']))"
    assert run_python(code).strip() == "<class 'numpy.ndarray'>"
    with pytest.raises(UnsupportedLeafError, match=r"state\[0\]: a torch tensor of torch.bfloat16"):
        encode([torch.zeros(1, dtype=torch.bfloat16)])
