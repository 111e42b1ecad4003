"""Patterns match whole names; what wildcards matched is carried over by a rename."""

import fnmatch

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxshard._patterns import first_match, matches, matches_any, renamed

quick = settings(derandomize=True, deadline=None, max_examples=100)
names = st.lists(st.text("ab.", min_size=1, max_size=3), min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("params/w", ["params/w"], ["params/w2", "aparams/w", "params/w/0", "params"]),
        ("params/*", ["params/w", "params/"], ["params/a/w", "params"]),
        ("params/**", ["params", "params/w", "params/a/w"], ["params2", "params2/w", "a/params"]),
        ("**/kernel", ["kernel", "a/kernel", "a/b/kernel"], ["akernel", "kernel/a"]),
        ("**", ["", "a", "a/b"], []),
        ("*", ["", "a"], ["a/b"]),
        ("a/**/z", ["a/b/z", "a/b/c/z"], ["a/b", "b/z"]),
        ("*_w", ["big_w", "_w"], ["big_w2", "a/big_w"]),
        ("{a,b}/w", ["a/w", "b/w"], ["c/w", "{a,b}/w", "a,b/w"]),
        ("{mu,nu}/**", ["mu", "nu/w/0"], ["nw"]),
        ("layers/{0,10}/w", ["layers/0/w", "layers/10/w"], ["layers/1/w", "layers/0,10/w"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a+", ["a+"], ["aa"]),
        ("(x)", ["(x)"], ["x"]),
        ("[ab]", ["[ab]"], ["a"]),
        ("a?", ["a?"], ["ab"]),
        ("", [""], ["a"]),
    ],
)
def test_a_pattern_matches(pattern, yes, no):
    assert [name for name in yes + no if matches(pattern, name)] == yes


def test_two_stars_in_the_middle_may_stand_for_nothing():
    assert matches("a/**/z", "a/z")


@quick
@given(names)
def test_a_name_without_wildcards_matches_itself_alone(name):
    assert matches(name, name)
    assert not matches(name, f"{name}/x")
    assert not matches(name, f"x{name}")


@quick
@given(st.text("ab*", max_size=5), st.text("ab", max_size=5))
def test_within_one_component_a_star_is_that_of_a_shell(pattern, name):
    if "**" not in pattern:
        assert matches(pattern, name) == fnmatch.fnmatchcase(name, pattern)


@quick
@given(names, names)
def test_everything_below_a_name_matches_it_with_two_stars(above, below):
    assert matches(f"{above}/**", f"{above}/{below}")
    assert matches(f"**/{below}", f"{above}/{below}")
    assert not matches(f"{above}/**", f"{above}x/{below}")


@pytest.mark.parametrize("pattern", ["{a", "a}", "{a{b,c}}", "}{"])
def test_unpaired_and_nested_braces_are_refused(pattern):
    with pytest.raises(ValueError, match="braces must be paired and must not nest\nhint: "):
        matches(pattern, "a")


def test_a_line_break_in_a_name_is_a_character_like_others():
    assert matches("a/**", "a/b\nc")
    assert not matches("a", "a\n")


def test_one_pattern_or_several():
    assert matches_any("a/*", "a/b")
    assert matches_any(["x", "a/*"], "a/b")
    assert not matches_any(["x", "y"], "a/b")
    assert not matches_any([], "a/b")


def test_the_first_rule_that_matches_decides():
    rules = [("a/w", 1), ("a/*", 2), ("**", 3)]
    assert [first_match(rules, n) for n in ("a/w", "a/b", "c")] == [1, 2, 3]
    assert first_match(rules[:2], "c") is None


@pytest.mark.parametrize(
    ("rename", "saved", "wanted"),
    [
        ({"a": "b"}, "a", "b"),
        ({"a": "b"}, "c", "c"),
        ({"a": "b"}, "a/x", "a/x"),
        ({"encoder/**": "backbone/**"}, "encoder/0/w", "backbone/0/w"),
        ({"encoder/**": "backbone/**"}, "encoder", "backbone"),
        ({"encoder/**": "**"}, "encoder/0/w", "0/w"),
        ({"**/kernel": "**/weight"}, "a/b/kernel", "a/b/weight"),
        ({"**/kernel": "**/weight"}, "kernel", "weight"),
        ({"layer_*/w": "layers/*/w"}, "layer_7/w", "layers/7/w"),
        ({"*/*": "*_*"}, "a/b", "a_b"),
        ({"a/*": "b/*", "**": "c/**"}, "a/x", "b/x"),
        ({"a/*": "b/*", "**": "c/**"}, "d/x", "c/d/x"),
        ({"params/**": "new"}, "params/w", "new"),
    ],
)
def test_a_rename(rename, saved, wanted):
    assert renamed(rename, saved) == wanted


@quick
@given(names, names)
def test_a_rename_of_what_lies_below_is_undone_by_its_inverse(name, other):
    there = renamed({"a/**": f"{other}/**"}, f"a/{name}")
    assert renamed({f"{other}/**": "a/**"}, there) == f"a/{name}"


def test_alternatives_in_a_rename_do_not_shift_the_wildcards():
    assert renamed({"{mu,nu}/*/w": "*/w"}, "mu/3/w") == "3/w"
