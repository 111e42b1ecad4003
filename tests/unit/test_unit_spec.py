"""Descriptions of leaves and trees: names, texts for people, and scalars that keep their bits."""

import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from jaxshard import _dtypes
from jaxshard._errors import FormatError
from jaxshard._spec import (
    Layout,
    LeafSpec,
    Node,
    child_keys,
    decode_value,
    encode_value,
    join,
    walk,
)

quick = settings(derandomize=True, deadline=None, max_examples=100)


def there_and_back(kind, value, dtype=None):
    encoded = json.loads(json.dumps(encode_value(kind, value), allow_nan=False))
    return decode_value(LeafSpec(name="x", kind=kind, dtype=dtype, value=encoded))


def float_bits(value):
    return np.float64(value).tobytes()


# Scalars ------------------------------------------------------------------------------------


@quick
@given(st.integers() | st.sampled_from([1 << 20_000, -(1 << 20_000)]))
@example(0)
@example(-1)
def test_an_int_of_any_size_comes_back(value):
    back = there_and_back("int", value)
    assert type(back) is int
    assert back == value


@quick
@given(st.floats())
@example(-0.0)
@example(math.inf)
@example(5e-324)
def test_a_float_keeps_its_bits(value):
    assert float_bits(there_and_back("float", value)) == float_bits(value)


@pytest.mark.parametrize("payload", [0x7FF8000000000001, 0xFFF8DEADBEEF0000])
def test_a_nan_keeps_its_payload(payload):
    value = np.uint64(payload).view(np.float64).item()
    assert np.float64(there_and_back("float", value)).view(np.uint64) == payload
    back = there_and_back("complex", complex(value, -0.0))
    assert np.float64(back.real).view(np.uint64) == payload


@quick
@given(st.complex_numbers())
def test_a_complex_keeps_its_bits(value):
    back = there_and_back("complex", value)
    assert type(back) is complex
    assert float_bits(back.real) + float_bits(back.imag) == float_bits(value.real) + float_bits(
        value.imag
    )


@quick
@given(st.text(st.characters()))
@example("\ud800 lone")
@example("\x00")
def test_a_str_comes_back(value):
    assert there_and_back("str", value) == value


@quick
@given(st.binary())
def test_bytes_come_back(value):
    assert there_and_back("bytes", value) == value


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_stays_a_bool(value):
    assert there_and_back("bool", value) is value


def test_none_comes_back():
    assert there_and_back("none", None) is None


@pytest.mark.parametrize("name", _dtypes.names())
def test_a_numpy_scalar_keeps_type_and_bits(name):
    dtype = _dtypes.numpy_dtype(name)
    value = np.ones((), np.uint8).astype(dtype)[()] if name != "int1" else dtype.type(-1)
    back = there_and_back("numpy_scalar", value, name)
    assert type(back) is type(value)
    assert back.tobytes() == value.tobytes()


def test_a_negative_numpy_scalar_of_foreign_byte_order_keeps_its_value():
    value = np.array([-1.5], ">f4")[0]
    assert there_and_back("numpy_scalar", value, "float32") == np.float32(-1.5)


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [
        ("bool", None, 1),
        ("bool", None, "true"),
        ("int", None, 7),
        ("int", None, "seven"),
        ("int", None, None),
        ("float", None, 1.5),
        ("float", None, "3ff0"),
        ("float", None, "zz" * 8),
        ("complex", None, "00" * 8),
        ("bytes", None, "f"),
        ("bytes", None, ["00"]),
        ("str", None, 1),
        ("numpy_scalar", "float32", "0000"),
        ("numpy_scalar", "float32", 0),
        ("numpy_scalar", None, "00"),
        ("numpy_scalar", "object", "00" * 8),
        ("array", "float32", None),
        ("key", None, None),
    ],
)
def test_a_value_that_is_not_of_its_kind_is_refused_by_name(kind, dtype, value):
    leaf = LeafSpec(name="a/b", kind=kind, dtype=dtype, value=value)
    with pytest.raises(FormatError, match=f"leaf 'a/b': expected the value of a {kind}, found"):
        decode_value(leaf)


def test_a_long_wrong_value_is_cut_in_the_message():
    with pytest.raises(FormatError, match=r"^.{1,200}$"):
        decode_value(LeafSpec(name="a", kind="int", value="z" * 10_000))


# Leaves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (LeafSpec(name="", kind="array", dtype="float32", shape=(4, 3)), "float32[4,3]"),
        (LeafSpec(name="", kind="array", dtype="int4"), "int4[]"),
        (LeafSpec(name="", kind="array", dtype="float32", weak_type=True), "float32[] weak"),
        (LeafSpec(name="", kind="key", key_impl="rbg", shape=(8,)), "key<rbg>[8]"),
        (LeafSpec(name="", kind="numpy_scalar", dtype="float32"), "numpy scalar float32"),
        (LeafSpec(name="", kind="int"), "Python int"),
        (LeafSpec(name="", kind="none"), "None"),
        (LeafSpec(name="", kind="function"), "a function"),
    ],
)
def test_a_leaf_is_described_in_a_few_words(leaf, text):
    assert leaf.describe() == text


def test_bytes_of_a_leaf_are_those_in_memory():
    key = LeafSpec(name="", kind="key", dtype="uint32", shape=(3,), array_shape=(3, 2))
    assert key.nbytes == 24
    int4 = LeafSpec(name="", kind="array", dtype="int4", shape=(3,), array_shape=(3,))
    assert int4.nbytes == 3
    assert LeafSpec(name="", kind="int", value="0x1").nbytes == 0


def test_bytes_of_a_layout_are_those_in_storage():
    layout = Layout("w", "uint8", 2, (3, 2), (3, 2), (3, 2), packed=False)
    assert (layout.itemsize, layout.nbytes) == (1, 6)
    assert layout._replace(dtype="bfloat16").nbytes == 12


# Trees --------------------------------------------------------------------------------------


def test_a_walk_names_containers_and_leaves_parents_first():
    inner = Node("list", (), (1, 2))
    root = Node("dict", ("a", "b/c", 3), (0, inner, Node("dict", (), ())))
    assert list(walk(root)) == [
        ("", root),
        ("a", 0),
        ("b%2Fc", inner),
        ("b%2Fc/0", 1),
        ("b%2Fc/1", 2),
        ("3", Node("dict", (), ())),
    ]


def test_a_bare_leaf_has_the_empty_name():
    assert list(walk(0)) == [("", 0)]


def test_a_walk_of_a_deep_tree_needs_no_deep_stack():
    tree = 0
    for _ in range(5_000):
        tree = Node("list", (), (tree,))
    assert sum(1 for _ in walk(tree)) == 5_001


@pytest.mark.parametrize("kind", ["list", "tuple", "items"])
def test_children_of_sequences_are_numbered(kind):
    assert child_keys(Node(kind, (), (5, 6))) == (0, 1)


def test_children_of_mappings_have_their_keys():
    assert child_keys(Node("dict", ("a", 1), (0, 1))) == ("a", 1)


def test_names_join_with_a_slash():
    assert (join("", "a"), join("a", "b")) == ("a", "a/b")
