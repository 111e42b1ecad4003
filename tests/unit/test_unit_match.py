"""Every difference between what was saved and what is wanted is found and said in one sentence."""

import pytest

from jaxshard._match import is_traced_scalar, match, selected, wanted_names
from jaxshard._spec import LeafSpec, Node, TreeSpec


def array(name, dtype="float32", shape=(2,), container="jax", **more):
    fields = {"name": name, "dtype": dtype, "shape": shape, "array_shape": shape, **more}
    return LeafSpec(kind="array", container=container, **fields)


def key(name, impl="threefry2x32", shape=()):
    return LeafSpec(
        name=name, kind="key", container="jax", dtype="uint32", shape=shape,
        array_shape=(*shape, 2), key_impl=impl,
    )  # fmt: skip


def scalar(name, kind="int", **more):
    return LeafSpec(name=name, kind=kind, **more)


def flat(*leaves):
    keys = tuple(leaf.name for leaf in leaves)
    return TreeSpec(Node("dict", keys, tuple(range(len(leaves)))), leaves)


def problems(saved, like, **asked):
    return match(flat(*saved), flat(*like), **asked).problems


def test_equal_trees_pair_up_without_a_word():
    leaves = [array("a"), key("k"), scalar("n"), scalar("f", "function")]
    found = match(flat(*leaves), flat(*reversed(leaves)))
    assert found.problems == []
    assert sorted(found.pairs) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert found.missing == []


@pytest.mark.parametrize(
    ("saved", "like", "says"),
    [
        (array("a", shape=(2,)), array("a", shape=(3,)), "saved float32[2], wanted float32[3]"),
        (array("a", shape=()), array("a", shape=(1,)), "saved float32[], wanted float32[1]"),
        (
            array("a"),
            array("a", "bfloat16"),
            "saved float32[2], wanted bfloat16[2] (cast=True would convert)",
        ),
        (array("a"), array("a", "bool"), "saved float32[2], wanted bool[2] (never cast)"),
        (
            array("a", weak_type=True),
            array("a"),
            "saved float32[2] weak, wanted float32[2] (weak types differ)",
        ),
        (
            array("a"),
            array("a", weak_type=True),
            "saved float32[2], wanted float32[2] weak (weak types differ)",
        ),
        (
            key("a", "threefry2x32"),
            key("a", "rbg"),  # CASE 37
            "saved key<threefry2x32>[], wanted key<rbg>[]",
        ),
        (key("a"), key("a", shape=(2,)), "saved key<threefry2x32>[], wanted key<threefry2x32>[2]"),
        (key("a"), array("a", "uint32"), "saved key<threefry2x32>[], wanted uint32[2]"),
        (scalar("a"), scalar("a", "bool"), "saved Python int, wanted Python bool"),
        (scalar("a", "float"), scalar("a"), "saved Python float, wanted Python int"),
        (scalar("a", "none"), array("a"), "saved None, wanted float32[2]"),
        (scalar("a"), array("a", "int32", ()), "saved Python int, wanted int32[]"),
        (
            scalar("a", "numpy_scalar", dtype="float32"),
            scalar("a", "numpy_scalar", dtype="float64"),
            "saved numpy scalar float32, wanted numpy scalar float64",
        ),
        (scalar("a", "function"), scalar("a"), "saved a function, wanted Python int"),
    ],
)
def test_one_difference_is_one_sentence(saved, like, says):
    assert problems([saved], [like]) == [f"'a': {says}"]


def test_all_differences_are_said_at_once():
    saved = [array("a"), scalar("n"), array("only_saved"), key("k")]
    like = [array("a", shape=(9,)), scalar("n", "str"), array("only_like", "int8"), key("k", "rbg")]
    said = problems(saved, like)
    assert sorted(sentence.split(":")[0] for sentence in said) == [
        "'a'", "'k'", "'n'", "'only_like'", "'only_saved'",
    ]  # fmt: skip


def test_what_differs_is_not_paired():
    found = match(flat(array("a"), array("b")), flat(array("a", shape=(3,)), array("b")))
    assert found.pairs == [(1, 1)]


def test_a_missing_and_an_extra_leaf_of_like_names_are_brought_together():
    meant = "did you mean 'params/kernel_0', which only the checkpoint has?"
    assert problems([array("params/kernel_0")], [array("params/kernel")]) == [
        f"'params/kernel': wanted float32[2], not in the checkpoint ({meant})",
        "'params/kernel_0': saved float32[2], not in like",
    ]


def test_a_missing_leaf_far_from_all_others_gets_no_guess():
    assert problems([], [array("zzz")]) == ["'zzz': wanted float32[2], not in the checkpoint"]


# What may differ ----------------------------------------------------------------------------


@pytest.mark.parametrize("containers", [("jax", "numpy"), ("numpy", "jax"), ("numpy", "numpy")])
def test_the_container_may_differ_and_then_weak_types_do_not_matter(containers):
    saved = array("a", container=containers[0], weak_type=containers[0] == "jax")
    assert problems([saved], [array("a", container=containers[1])]) == []


def test_placement_may_differ():
    saved = array("a", spec=("x",), mesh=0, memory_kind="pinned_host", committed=True)
    assert problems([saved], [array("a")]) == []


def test_functions_may_be_missing_on_either_side():
    assert problems([scalar("f", "function")], []) == []
    assert problems([], [scalar("f", "function")]) == []


@pytest.mark.parametrize(
    ("dtype", "kind", "fits"),
    [
        ("int32", "int", True),
        ("uint8", "int", True),
        ("float32", "float", True),
        ("complex64", "complex", True),
        ("bool", "bool", True),
        ("float32", "int", False),
        ("int32", "bool", False),
        ("int32", "float", False),
        ("bool", "int", False),
        ("int32", "str", False),
    ],
)
def test_a_weak_0d_array_fits_the_python_number_that_jit_made_it_of(dtype, kind, fits):
    saved = array("a", dtype, (), weak_type=True)
    assert is_traced_scalar(saved, scalar("a", kind)) is fits
    assert (problems([saved], [scalar("a", kind)]) == []) is fits


@pytest.mark.parametrize("change", [{"weak_type": False}, {"shape": (1,)}])
def test_other_arrays_do_not_fit_a_python_number(change):
    saved = array("a", "int32", **{"shape": (), "weak_type": True, **change})
    assert not is_traced_scalar(saved, scalar("a", "int"))


# What is asked for --------------------------------------------------------------------------


def test_cast_takes_other_dtypes():
    saved, like = [array("a"), array("b")], [array("a", "bfloat16"), array("b")]
    found = match(flat(*saved), flat(*like), cast=True)
    assert (found.problems, found.pairs) == ([], [(0, 0), (1, 1)])


def test_cast_takes_other_weak_types_but_no_other_shapes_and_no_bool():
    assert problems([array("a", weak_type=True)], [array("a")], cast=True) == []
    assert problems([array("a")], [array("a", shape=(3,))], cast=True) != []
    assert problems([array("a", "bool")], [array("a", "int8")], cast=True) != []
    assert problems([key("a")], [array("a", "uint32")], cast=True) != []


def test_fill_missing_keeps_what_the_checkpoint_lacks():
    found = match(flat(array("a")), flat(array("a"), array("new")), fill_missing=True)
    assert (found.problems, found.missing) == ([], [1])


def test_fill_missing_does_not_hide_what_only_the_checkpoint_has():
    assert problems([array("old")], [], fill_missing=True) == [
        "'old': saved float32[2], not in like"
    ]


def test_select_leaves_the_rest_of_both_sides_alone():
    saved = [array("params/w"), array("opt/mu"), array("old")]
    like = [array("params/w"), array("opt/mu", "int8"), array("new")]
    found = match(flat(*saved), flat(*like), select="params/**")
    assert (found.problems, found.pairs) == ([], [(0, 0)])


@pytest.mark.parametrize("select", ["a", ["a"], ("a",), iter(["a"])])
def test_select_is_a_pattern_or_several(select):
    assert match(flat(array("a"), array("b")), flat(array("a")), select=select).pairs == [(0, 0)]


def test_select_is_applied_to_names_after_renaming():
    saved, like = [array("enc/w"), array("x")], [array("backbone/w")]
    found = match(flat(*saved), flat(*like), select="backbone/*", rename={"enc/**": "backbone/**"})
    assert (found.problems, found.pairs) == ([], [(0, 0)])


def test_two_leaves_renamed_to_one_name_are_a_problem():
    said = problems([array("a"), array("b")], [array("c")], rename={"a": "c", "b": "c"})
    assert said == ["'c': rename gives this name to more than one leaf"]


def test_wanted_names_are_those_after_renaming():
    tree = flat(array("a"), array("b"))
    assert wanted_names(tree, {"a": "z"}) == ["z", "b"]
    assert wanted_names(tree, None) == ["a", "b"]


def test_selected_without_patterns_is_everything():
    assert selected(["a", "b"], None) == {"a", "b"}
    assert selected(["a", "b"], []) == set()


# Containers ---------------------------------------------------------------------------------


def nested(kind, *, keys=(), leaves=1, class_name=None):
    inner = Node(kind, keys, tuple(range(leaves)), class_name)
    root = Node("dict", ("x",), (inner,))
    names = keys or tuple(map(str, range(leaves)))
    return TreeSpec(root, tuple(array(f"x/{n}") for n in names))


@pytest.mark.parametrize(
    ("saved", "like", "says"),
    [
        ("list", "tuple", ["'x': saved a list, wanted a tuple"]),
        ("tuple", "list", ["'x': saved a tuple, wanted a list"]),
        ("items", "list", ["'x': saved a sequence, wanted a list"]),
        ("list", "list", []),
    ],
)
def test_sequences_of_another_kind_are_a_difference(saved, like, says):
    assert match(nested(saved), nested(like)).problems == says


@pytest.mark.parametrize("saved", ["dict", "object", "namedtuple"])
@pytest.mark.parametrize("like", ["dict", "object", "namedtuple"])
def test_containers_with_named_children_load_into_each_other(saved, like):
    # A module, its State and its pure dict have the same names.
    assert match(nested(saved, keys=("w",)), nested(like, keys=("w",))).problems == []


def test_a_list_where_a_dict_with_numbers_was_is_a_difference():
    saved = nested("dict", keys=(0,))
    assert match(saved, nested("list")).problems == ["'x': saved a mapping, wanted a list"]


def test_a_class_of_another_name_is_no_difference():
    saved = nested("object", keys=("w",), class_name="a.Old")
    assert match(saved, nested("object", keys=("w",), class_name="b.New")).problems == []


def test_empty_containers_count():
    empty, nothing = nested("list", leaves=0), TreeSpec(Node("dict", (), ()), ())
    assert match(empty, nothing).problems == ["'x': saved an empty list, not in like"]
    assert match(nothing, empty).problems == ["'x': wanted an empty list, not in the checkpoint"]
    assert match(nothing, empty, fill_missing=True).problems == []
    assert match(empty, empty).problems == []


def test_an_empty_container_where_a_leaf_was_is_one_problem_not_two():
    leaf = TreeSpec(Node("dict", ("x",), (0,)), (array("x"),))
    said = match(leaf, nested("dict", leaves=0)).problems
    assert len(said) == 1
    assert said[0].startswith("'x': ")
