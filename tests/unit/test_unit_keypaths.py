"""Keys become components of names and storage paths one to one, and come back with their types."""

import json
import math
import re

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from jaxshard._errors import FormatError
from jaxshard._keypaths import (
    components,
    escape,
    from_json,
    is_safe_path,
    is_storable_key,
    key_text,
    sort_key,
    storage_paths,
    to_json,
    unescape,
)

quick = settings(derandomize=True, deadline=None, max_examples=80)

texts = st.text(st.characters(), max_size=8) | st.text("aA/%._~ é\ud800\x00", max_size=6)
scalars = (
    texts
    | st.integers(-3, 3)
    | st.integers()
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.binary(max_size=4)
    | st.sampled_from(["1", "True", "None", "1.0", "b'a'", "(1)", "('a','b')", "int~1", "%int~1"])
)
keys = st.recursive(scalars, lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=4)
siblings = st.lists(keys, max_size=8).map(lambda ks: list(dict.fromkeys(ks)))


# Escaping -----------------------------------------------------------------------------------


@quick
@given(texts)
@example("")
@example("%")
@example("%41")
@example("..")
@example("__init__")
@example("zarr.json")
@example("a/b\\c")
@example("Ω\udcff")
def test_unescape_gives_back_what_was_escaped(text):
    assert unescape(escape(text)) == text


@quick
@given(st.sets(texts, max_size=12))
def test_escape_is_one_to_one(different):
    assert len({escape(text) for text in different}) == len(different)


@quick
@given(texts)
def test_an_escaped_text_is_one_safe_component(text):
    escaped = escape(text)
    assert re.fullmatch(r"[A-Za-z0-9 _\-.+=@,()'!#$&;^~%]+", escaped)
    assert is_safe_path(escaped)
    assert not escaped.startswith("__")
    assert escaped not in {".", "..", "zarr.json"}


@pytest.mark.parametrize(
    ("text", "component"),
    [
        ("kernel", "kernel"),
        ("a.b", "a.b"),
        ("a/b", "a%2Fb"),
        ("", "%"),
        ("100%", "100%25"),
        ("*", "%2A"),
        ("..", "%2E."),
        ("zarr.json", "%7Aarr.json"),
        ("__x", "%5F_x"),
        ("ü", "%C3%BC"),
    ],
)
def test_names_read_as_the_documentation_says(text, component):
    assert escape(text) == component


@pytest.mark.parametrize("text", ["zarr.json", "ZARR.JSON", "Zarr.json"])
def test_a_name_of_zarr_is_escaped_also_where_case_does_not_count(text):
    assert storage_paths([escape(text)])[0].casefold() != "zarr.json"


# Components ---------------------------------------------------------------------------------


@quick
@given(siblings)
def test_the_components_of_siblings_are_all_different(keys):
    names = components(keys)
    assert len(set(names)) == len(keys)
    assert all(name and "/" not in name for name in names)


def test_a_number_and_its_text_side_by_side_are_told_apart_by_type():
    assert components([1, "1", None, "None", (1,), "(1)"]) == [
        "%int~1", "1", "%NoneType~None", "None", "%tuple~(1)", "(1)",
    ]  # fmt: skip


def test_a_number_alone_is_written_as_it_is():
    assert components([1, "a", (2, "b")]) == ["1", "a", "(2,'b')"]


def test_dots_and_slashes_in_keys_never_meet_the_separator():
    # CASE 35: Orbax gave one value for both.
    names = ["a/b", *components(["a.b", "a/b"])]
    assert names == ["a/b", "a.b", "a%2Fb"]


def test_texts_of_tuples_tell_strings_from_numbers():
    assert key_text((1, "1", b"1", None, (True,))) == "(1,'1',b'1',None,(True))"


# Storage paths ------------------------------------------------------------------------------


path_parts = st.text("abAB%._", min_size=1, max_size=3) | st.sampled_from(
    ["x" * 201, "X" * 201, "x" * 200, "y" * 350]
)
names_of_a_tree = st.sets(st.lists(path_parts.map(escape), min_size=1, max_size=6).map(tuple)).map(
    lambda paths: sorted(
        "/".join(p) for p in paths if not any(q[: len(p)] == p and q != p for q in paths)
    )
)


@quick
@given(names_of_a_tree)
def test_storage_paths_are_unique_even_where_case_does_not_count(names):
    paths = storage_paths(names)
    assert len({path.casefold() for path in paths}) == len(names)


@quick
@given(names_of_a_tree)
def test_no_array_lies_inside_another_one_even_where_case_does_not_count(names):
    folded = {path.casefold() for path in storage_paths(names)}
    above = {"/".join(p.split("/")[:i]) for p in folded for i in range(1, p.count("/") + 1)}
    assert not folded & above


@quick
@given(names_of_a_tree)
def test_storage_paths_stay_within_the_limits_of_file_systems(names):
    for path in storage_paths(names):
        assert is_safe_path(path)
        assert len(path) <= 900
        assert all(len(part) <= 200 for part in path.split("/"))


def test_a_path_that_is_too_long_as_a_whole_becomes_one_component():
    names = ["/".join(["x" * 200] * 5), "/".join(["x" * 200] * 4 + ["y"])]
    long, short = storage_paths(names)
    assert short == names[1]
    assert re.fullmatch(r"x{100}%~[0-9a-f]{16}", long)


def test_a_name_that_needs_no_change_is_its_own_path():
    names = ["params/dense/kernel", "params/dense/bias", "opt/0/mu/w", "a%2Fb"]
    assert storage_paths(names) == names


def test_a_bare_leaf_has_a_path_of_its_own():
    assert storage_paths([""]) == ["%"]


def test_names_that_differ_by_case_alone_get_a_hash_at_the_component_that_differs():
    first, second, third = storage_paths(["Layer/w", "layer/w", "other/w"])
    assert re.fullmatch(r"Layer%~[0-9a-f]{16}/w(%~[0-9a-f]{16})?", first)
    assert re.fullmatch(r"layer%~[0-9a-f]{16}/w(%~[0-9a-f]{16})?", second)
    assert third == "other/w"


def test_storage_paths_do_not_depend_on_the_order_of_names():
    names = ["A/b", "a/b", "x" * 300, "y/" * 400 + "z"]
    assert storage_paths(names[::-1]) == storage_paths(names)[::-1]


def test_many_deep_names_get_their_paths_quickly():
    names = [f"layers/{i}/block/{j}/w" for i in range(1000) for j in range(20)]
    assert storage_paths(names) == names


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\\..\\b", "a\0b", "../../etc"]
)
def test_a_path_that_leaves_its_directory_is_not_safe(path):
    assert not is_safe_path(path)


# JSON ---------------------------------------------------------------------------------------


@quick
@given(keys)
@example(float("inf"))
@example(-0.0)
@example(10**30)
@example(())
def test_a_key_comes_back_from_json_with_its_type(key):
    back = from_json(json.loads(json.dumps(to_json(key))))
    assert (type(back), repr(back)) == (type(key), repr(key))


@quick
@given(keys, keys)
def test_different_keys_have_different_json(a, b):
    if repr(a) != repr(b):
        assert json.dumps(to_json(a)) != json.dumps(to_json(b))


@pytest.mark.parametrize(
    "value",
    [
        True, None, 1.5, [], {}, {"int": 1}, {"bool": 1}, {"bool": "x"}, {"none": 0}, {"float": 1},
        {"bytes": 1}, {"tuple": {}}, {"tuple": [None]}, {"bool": True, "none": None},
        {"class": "os.system"},
    ],
)  # fmt: skip
def test_a_key_of_no_known_form_is_refused(value):
    with pytest.raises(FormatError, match="expected a dict key, found"):
        from_json(value)


@pytest.mark.parametrize("key", [object(), [1], {1: 2}, {1}, 1j, range(3)])
def test_other_keys_have_no_json(key):
    with pytest.raises(TypeError, match="is no dict key that can be stored"):
        to_json(key)


@pytest.mark.parametrize(
    "key",
    [math.nan, (1, math.nan), (math.nan,), object(), frozenset(), 1j, type("S", (str,), {})("")],
)
def test_keys_that_would_not_come_back_are_not_storable(key):
    assert not is_storable_key(key)


@quick
@given(keys)
def test_every_other_key_is_storable(key):
    assert is_storable_key(key)


# Order --------------------------------------------------------------------------------------


@quick
@given(siblings)
def test_keys_of_mixed_types_have_one_order(keys):
    ordered = sorted(keys, key=sort_key)
    backwards = ordered[::-1]
    assert sorted(backwards, key=sort_key) == ordered


def test_numbers_sort_by_value():
    # CASE 2: layer 10 comes after layer 2.
    assert sorted([10, "b", 2, "a", None], key=sort_key) == [None, 2, 10, "a", "b"]
