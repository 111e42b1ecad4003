"""Promise 4: what differs from `like` is an error that names every difference, unless asked for.

Also what asking looks like: `select`, `rename`, `cast`, `fill_missing`; and the reports of faults
that people met with other libraries (CASE n), where a load gave wrong values or none.
"""

import asyncio
import itertools
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from support import P, assert_same_leaf, assert_same_tree, bits, mesh, on, run_python

import jaxshard
from jaxshard import LeafMismatchError, LoadOptions, LoadReport, SaveOptions

FILES = SaveOptions(pack_below=0)


@pytest.fixture
def where(tmp_path) -> str:
    """A checkpoint's place in memory, of this test alone."""
    return f"memory://{tmp_path}"


def mismatches(path: Any, like: Any = None, **kwargs: Any) -> tuple[str, ...]:
    """The differences that a load finds; all of them are in the message."""
    with pytest.raises(LeafMismatchError, match=r"differences? between what was saved") as error:
        jaxshard.load(path, like, **kwargs)
    assert all(m in str(error.value) for m in error.value.mismatches)
    assert isinstance(error.value, ValueError)
    return error.value.mismatches


def loaded(path: Any, like: Any = None, **kwargs: Any) -> tuple[Any, LoadReport]:
    reports: list[LoadReport] = []
    tree = jaxshard.load(path, like, options=LoadOptions(on_report=reports.append), **kwargs)
    return tree, reports[0]


def struct(shape: tuple[int, ...], dtype: Any = jnp.float32, **kwargs: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, **kwargs)


# Kinds, dtypes, shapes ----------------------------------------------------------------------

VALUES = {
    "none": None,
    "bool": True,
    "int": 1,
    "float": 1.0,
    "complex": 1j,
    "str": "1",
    "bytes": b"1",
    "int32 scalar": np.int32(1),
    "int64 scalar": np.int64(1),
    "bool scalar": np.bool_(True),
    "int32 array": np.ones((), np.int32),
    "uint32 array": np.ones((), np.uint32),
    "float32 array": np.ones((), np.float32),
    "bool array": np.ones((), bool),
    "int32 of one": np.ones((1,), np.int32),
    "strong": jax.device_put(np.ones((), np.float32)),
    "weak": jnp.asarray(1.0),
    "threefry": jax.random.key(0, impl="threefry2x32"),
    "rbg": jax.random.key(0, impl="rbg"),
    "raw key": jax.random.PRNGKey(0),
    "keys": jax.random.split(jax.random.key(0, impl="threefry2x32"), 1),
}
# A NumPy array is as good as a jax.Array, and a traced Python number becomes a weak array.
ALIKE = {
    ("float32 array", "strong"),
    ("strong", "float32 array"),
    ("float32 array", "weak"),
    ("weak", "float32 array"),
    ("weak", "float"),
}


def test_every_pair_of_different_kinds_differs(where):
    """`bool` is no `int`, `1` is no `1.0`, a scalar is no 0-d array, `None` is nothing else."""
    pairs = list(itertools.permutations(VALUES, 2))
    jaxshard.save(where, {f"{a}>{b}": VALUES[a] for a, b in pairs})
    like = {f"{a}>{b}": VALUES[b] for a, b in pairs}
    found = mismatches(where, like)
    differing = [m.split("'")[1].replace("%3E", ">") for m in found]
    assert sorted(differing) == sorted(f"{a}>{b}" for a, b in pairs if (a, b) not in ALIKE)


def test_alike_pairs_load(where):
    for a, b in sorted(ALIKE):
        jaxshard.save(where, VALUES[a], overwrite=True)
        got = jaxshard.load(where, VALUES[b])
        assert float(got) == 1.0
        if b != "float":
            assert type(got) is type(VALUES[b])


def test_one_error_lists_all_differences_with_both_sides(where):
    saved = {
        "shape": jnp.zeros((2, 3)),
        "dtype": jnp.zeros(3, jnp.bfloat16),
        "weak": jnp.asarray(1.0),
        "key": jax.random.key(0, impl="threefry2x32"),
        "kind": 3,
        "none": None,
        "gone": jnp.zeros((4, 4)),
        "list": [1, 2],
        "params": {"kernel": np.zeros((5, 5), np.float32)},
        "same": 1,
    }
    like = {
        "shape": jnp.zeros((3, 2)),
        "dtype": jnp.zeros(3),
        "weak": jax.device_put(np.float32(1.0)),
        "key": jax.random.key(0, impl="rbg"),
        "kind": 3.0,
        "none": jnp.zeros(2),
        "new": jnp.zeros(7),
        "list": (1, 2),
        "params": {"kernal": np.zeros((5, 5), np.float32)},
        "same": 2,
    }
    jaxshard.save(where, saved)
    meant = "did you mean 'params/kernel', which only the checkpoint has?"
    assert set(mismatches(where, like)) == {
        f"'params/kernal': wanted float32[5,5], not in the checkpoint ({meant})",
        "'shape': saved float32[2,3], wanted float32[3,2]",
        "'dtype': saved bfloat16[3], wanted float32[3] (cast=True would convert)",
        "'weak': saved float32[] weak, wanted float32[] (weak types differ)",
        "'key': saved key<threefry2x32>[], wanted key<rbg>[]",
        "'kind': saved Python int, wanted Python float",
        "'none': saved None, wanted float32[2]",
        "'gone': saved float32[4,4], not in like",
        "'new': wanted float32[7], not in the checkpoint",
        "'list': saved a list, wanted a tuple",
        "'params/kernel': saved float32[5,5], not in like",
    }


def test_the_error_says_where_and_what_to_do(where):
    jaxshard.save(where, {"x": 1})
    with pytest.raises(LeafMismatchError, match="hint: change like, or ask for") as error:
        jaxshard.load(where, {"x": 1.0})
    assert error.value.path in str(error.value)
    assert error.value.kind == "leaf-mismatch"
    assert "select=" in error.value.hint
    assert "rename=" in error.value.hint


@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (2, 3, 1), (6,), (2, 4), (0, 3)], ids=str)
def test_other_shapes_differ_even_of_equal_size(where, shape):
    jaxshard.save(where, {"x": jnp.zeros((2, 3))})
    (found,) = mismatches(where, {"x": struct(shape)})
    assert found.startswith("'x': saved float32[2,3], wanted float32[")


def test_abstract_leaves_are_as_strict_as_arrays(where):
    jaxshard.save(where, {"w": jnp.zeros(3), "k": jax.random.key(0, impl="rbg"), "n": 1})
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    like = {"w": struct((3,), weak_type=True), "k": key, "n": struct((), jnp.int32)}
    assert set(mismatches(where, like)) == {
        "'w': saved float32[3], wanted float32[3] weak (weak types differ)",
        "'k': saved key<rbg>[], wanted key<threefry2x32>[]",
        "'n': saved Python int, wanted int32[]",
    }


def test_a_traced_bool_loads_onto_a_python_bool(where):
    """As a traced `step=0` does: `jit` makes an array of each Python number."""
    fresh = {"done": False, "step": 0, "scale": 1.0}
    state = jax.jit(
        lambda s: {"done": s["done"] | True, "step": s["step"] + 1, "scale": s["scale"]}
    )(fresh)
    jaxshard.save(where, state)
    assert_same_tree(jaxshard.load(where, fresh), state)


def test_a_traced_number_of_another_kind_differs(where):
    jaxshard.save(where, {"i": jnp.asarray(3) * 1, "f": jnp.asarray(1.5)})
    found = mismatches(where, {"i": 0.0, "f": 0})
    assert len(found) == 2


def test_a_rbg_key_wanted_and_a_threefry_key_stored_differ(where):
    """CASE 37; in both directions, for batches, and never cast."""
    words = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
    keys = {
        impl: jax.random.wrap_key_data(np.zeros((4, n), np.uint32), impl=impl)
        for impl, n in words.items()
    }
    jaxshard.save(where, keys["threefry2x32"])
    for impl in ("rbg", "unsafe_rbg"):
        like = keys[impl]
        found = mismatches(where, like, cast=True)
        assert found == (f"'': saved key<threefry2x32>[4], wanted key<{impl}>[4]",)


def test_a_raw_key_is_no_typed_key(where):
    jaxshard.save(where, {"raw": jax.random.PRNGKey(0), "typed": jax.random.key(0)})
    found = mismatches(where, {"raw": jax.random.key(0), "typed": jax.random.PRNGKey(0)})
    assert set(found) == {
        "'raw': saved uint32[2], wanted key<threefry2x32>[]",
        "'typed': saved key<threefry2x32>[], wanted uint32[2]",
    }


def test_a_weak_scalar_comes_back_weak_and_a_strong_one_differs(where):
    """CASE 36."""
    weak, strong = jnp.asarray(1.5), jax.device_put(np.float32(1.5))
    jaxshard.save(where, weak)
    assert jaxshard.load(where, weak).weak_type
    assert mismatches(where, strong) == (
        "'': saved float32[] weak, wanted float32[] (weak types differ)",
    )


# Containers ---------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ([1, 2], (1, 2)),
        ((1, 2), [1, 2]),
        ({"x": [1]}, {"x": (1,)}),
        ({0: 1}, [1]),
        ([], ()),
        ({}, []),
        ({"x": {}}, {"x": None}),
        ({"x": {}}, {}),
        ({}, {"x": {}}),
        ({"x": []}, {"x": jnp.zeros(2)}),
        (Pair(1, 2), (1, 2)),
        ({"x": 1}, [1]),
        ({"x": 1}, 1),
        (1, {"x": 1}),
        ({1: 1}, {"1": 1, "x": 1}),
        ([1], [1, 2]),
        ([1, 2], [1]),
    ],
    ids=repr,
)
def test_another_structure_differs(where, saved, wanted):
    jaxshard.save(where, saved)
    assert len(mismatches(where, wanted)) >= 1


@pytest.mark.parametrize("asked", [{"select": "x/**"}, {"rename": {"old": "new"}}], ids=str)
def test_another_structure_differs_whatever_else_is_asked_for(where, asked):
    jaxshard.save(where, {"x": [1, 2], "old": 3})
    like = {"x": (1, 2), "new" if "rename" in asked else "old": 3}
    assert mismatches(where, like, **asked) == ("'x': saved a list, wanted a tuple",)


def test_int_and_str_keys_of_one_text_differ(where):
    """`{1: x}` is not `{"1": x}`: the typed key counts, not its text."""
    jaxshard.save(where, {1: jnp.zeros(2)})
    assert len(mismatches(where, {"1": jnp.zeros(2)})) >= 1


def test_a_dict_in_another_order_is_the_same(where):
    jaxshard.save(where, {"a": 1, "b": 2})
    assert jaxshard.load(where, OrderedDict(b=0, a=0)) == OrderedDict(b=2, a=1)


# Nothing happens before all is well ---------------------------------------------------------


def test_a_mismatch_reads_no_data_and_leaves_like_alone(tmp_path):
    x = jnp.arange(8.0)
    jaxshard.save(tmp_path / "c", {"x": x, "y": jnp.ones(3)})
    for attempt in tmp_path.glob("c/a-*"):
        shutil.rmtree(attempt)  # whoever reads data now fails in another way
    like = {"x": x, "y": jnp.ones(4), "n": np.zeros(2)}
    with pytest.raises(LeafMismatchError, match="2 differences"):
        jaxshard.load(tmp_path / "c", like, options=LoadOptions(release_like=True))
    assert not x.is_deleted()
    assert not like["y"].is_deleted()


def test_load_gives_new_objects_and_never_writes_into_like(where):
    saved = {"np": np.arange(4), "jax": jnp.arange(4.0), "list": [1]}
    jaxshard.save(where, saved)
    like = {"np": np.zeros(4, np.int64), "jax": jnp.zeros(4), "list": [0]}
    kept = dict(like)
    got = jaxshard.load(where, like)
    assert like["np"].tolist() == [0, 0, 0, 0]
    assert like["list"] == [0]
    assert all(like[k] is kept[k] for k in kept)
    assert_same_tree(got, saved)


def test_a_module_that_does_not_fit_is_not_changed(where):
    jaxshard.save(where, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    like = nnx.Linear(2, 4, rngs=nnx.Rngs(1))
    before = nnx.to_pure_dict(nnx.state(like))
    assert len(mismatches(where, like)) == 2
    assert_same_tree(nnx.to_pure_dict(nnx.state(like)), before)


def test_all_unmatched_names_are_listed_both_ways(where):
    """CASE 32: not one at a time."""
    jaxshard.save(where, {f"saved{i}": i for i in range(30)})
    found = mismatches(where, {f"wanted{i}": i for i in range(30)})
    assert len(found) == 60


# select -------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path) -> tuple[Path, dict[str, Any]]:
    tree = {
        "params": {"w": jnp.arange(1000.0), "b": jnp.arange(3.0)},
        "opt": {"mu": {"w": jnp.ones(5000)}},
        "step": 7,
        "layers": [np.arange(4), np.arange(5)],
    }
    jaxshard.save(tmp_path / "c", tree, options=FILES)
    return tmp_path / "c", tree


def test_select_reads_no_byte_of_other_leaves(model):
    """CASE 16: the files of the others are gone, and nobody misses them."""
    path, tree = model
    root = Path(jaxshard.open(path).zarr_root)
    for name in ("opt", "layers", "params/b"):
        shutil.rmtree(root / name)
    got, report = loaded(path, select="params/w")
    assert list(got) == ["params"]
    assert got["params"]["w"].tolist() == tree["params"]["w"].tolist()
    assert report.bytes_needed == 4000
    assert 4000 <= report.bytes_read <= 4100


def test_select_reads_no_byte_of_other_leaves_in_a_pack(where, model):
    _, tree = model
    jaxshard.save(where, tree)
    _, report = loaded(where, select="{params,opt}/**")
    assert report.bytes_needed == 4000 + 12 + 20_000
    assert report.bytes_read - report.bytes_needed < 3 * 64  # padding between neighbours
    _, report = loaded(where, select="step")
    assert (report.bytes_needed, report.bytes_read) == (0, 0)


def test_select_without_like_keeps_the_nesting(model):
    path, tree = model
    got = jaxshard.load(path, select=["**/w", "layers/1", "step"])
    assert got["step"] == 7
    assert list(got["layers"]) == [1]  # a place in a list is kept as its number
    assert_same_tree(
        got,
        {
            "layers": {1: tree["layers"][1]},
            "opt": {"mu": {"w": np.ones(5000, np.float32)}},
            "params": {"w": np.arange(1000, dtype=np.float32)},
            "step": 7,
        },
    )


def test_select_with_like_leaves_the_others_untouched(model):
    path, tree = model
    like = jax.tree.map(lambda x: x * 0, tree)
    got = jaxshard.load(path, like, select="params/**")
    assert_same_tree(got["params"], tree["params"])
    assert got["opt"]["mu"]["w"] is like["opt"]["mu"]["w"]
    assert got["layers"][0] is like["layers"][0]
    assert got["step"] == 0


def test_leaves_that_are_not_selected_may_differ_or_be_absent(model):
    path, tree = model
    like = {"params": tree["params"], "opt": jnp.zeros(3), "new": "text"}
    got = jaxshard.load(path, like, select=["params/*"])
    assert_same_tree(got, like)
    assert got["opt"] is like["opt"]


def test_select_is_strict_about_what_it_selects(model):
    path, tree = model
    like = {"params": {"w": tree["params"]["w"], "another": jnp.ones(2)}, "step": 0}
    found = mismatches(path, like, select="params/**")
    assert {m.partition(" (did you mean")[0] for m in found} == {
        "'params/another': wanted float32[2], not in the checkpoint",
        "'params/b': saved float32[3], not in like",
    }


@pytest.mark.parametrize("with_like", [False, True])
def test_a_select_that_matches_nothing_is_an_error(model, with_like):
    """A slip of the pen must not give back `like` as if it had been loaded."""
    path, tree = model
    with pytest.raises(LeafMismatchError, match=r"matches no leaf.*params"):
        jaxshard.load(path, tree if with_like else None, select="parms/**")


def test_select_takes_any_iterable(model):
    path, tree = model
    assert jaxshard.load(path, select=iter(["step"])) == {"step": 7}
    got = jaxshard.load(path, jax.tree.map(lambda x: x * 0, tree), select=iter(["step"]))
    assert got["step"] == 7


class Loader:
    """An iterator with a state, as Grain's are."""

    def get_state(self) -> dict[str, int]:
        return {"at": 1}

    def set_state(self, state: dict[str, int]) -> None: ...


def test_an_iterator_in_like_that_is_not_selected_stays_untouched(where):
    """`select` says what is loaded; what is not cannot be in its way."""
    jaxshard.save(where, {"params": {"w": jnp.arange(3.0)}})
    data = Loader()
    got = jaxshard.load(where, {"params": {"w": jnp.zeros(3)}, "data": data}, select="params/**")
    assert got["data"] is data
    assert got["params"]["w"].tolist() == [0, 1, 2]


# rename -------------------------------------------------------------------------------------


def test_rename_with_like(where):
    saved = {"encoder": {"0": {"w": jnp.arange(3.0)}, "1": {"w": jnp.arange(4.0)}}, "head": 5}
    jaxshard.save(where, saved)
    like = {"backbone": {"0": {"w": jnp.zeros(3)}, "1": {"w": jnp.zeros(4)}}, "top": {"bias": 0}}
    got = jaxshard.load(where, like, rename={"encoder/**": "backbone/**", "head": "top/bias"})
    assert_same_tree(got, {"backbone": saved["encoder"], "top": {"bias": 5}})


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"a/*/w": "b/*/kernel"}, {"b/x/kernel", "b/y/kernel", "a/x/b"}),
        ({"**/w": "**/kernel"}, {"a/x/kernel", "a/y/kernel", "a/x/b"}),
        ({"a/*/*": "*/*"}, {"x/w", "x/b", "y/w"}),
        ({"a/x/*": "p/*", "a/**": "q/**"}, {"p/w", "p/b", "q/y/w"}),
        ({"a/{x,z}/w": "c/w"}, {"c/w", "a/x/b", "a/y/w"}),
        ({"nothing": "else"}, {"a/x/w", "a/x/b", "a/y/w"}),
    ],
    ids=str,
)
def test_rename_carries_wildcards_over(where, rename, names):
    jaxshard.save(where, {"a": {"x": {"w": 1, "b": 2}, "y": {"w": 3}}})
    jaxshard.save(f"{where}/renamed", jaxshard.load(where, rename=rename))
    assert set(jaxshard.open(f"{where}/renamed")) == names


def test_rename_without_like_keeps_every_value(where):
    saved = {"a": {"x": np.arange(3), "y": jax.random.key(1)}, "b": "text"}
    jaxshard.save(where, saved)
    got = jaxshard.load(where, rename={"a/*": "c/d/*"})
    assert_same_tree(got, {"c": {"d": saved["a"]}, "b": "text"}, placement=False)


def test_rename_leaves_the_containers_of_others_alone(where):
    """One new name must not turn lists, tuples and int keys elsewhere into dicts of strings."""
    saved = {"old": 1, "list": [2, (3, 4)], "pair": Pair(5, 6), "int": {10: 7, 2: 8}, "empty": {}}
    jaxshard.save(where, saved)
    got = jaxshard.load(where, rename={"old": "new"})
    assert got.pop("new") == 1
    assert got == {k: v for k, v in saved.items() if k != "old"}


def test_select_sees_names_after_renaming(where):
    jaxshard.save(where, {"old": {"w": 1}, "other": 2})
    assert jaxshard.load(where, rename={"old/**": "new/**"}, select="new/**") == {"new": {"w": 1}}
    got = jaxshard.load(
        where, {"new": {"w": 0}, "more": 9}, rename={"old/**": "new/**"}, select="new/**"
    )
    assert got == {"new": {"w": 1}, "more": 9}


@pytest.mark.parametrize("with_like", [False, True])
@pytest.mark.parametrize(
    "rename",
    [{"a": "x", "b": "x"}, {"a": "c"}, {"a": "x/y", "b": "x"}, {"a": "x", "b": "x/y"}],
    ids=str,
)
def test_a_rename_that_would_lose_a_leaf_is_an_error(where, rename, with_like):
    """Two leaves of one name, or a leaf where the group of another one is."""
    jaxshard.save(where, {"a": 1, "b": 2, "c": 3})
    like = {"x": 0, "c": 0} if with_like else None
    with pytest.raises(LeafMismatchError, match=r"'[xc](/y)?'"):
        jaxshard.load(where, like, rename=rename)


# cast ---------------------------------------------------------------------------------------


def cast(where: str, saved: Any, wanted: Any) -> Any:
    jaxshard.save(where, {"x": saved}, overwrite=True)
    like = jax.ShapeDtypeStruct(np.shape(saved), wanted)
    return jaxshard.load(where, {"x": like}, cast=True)["x"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, ml_dtypes.float8_e4m3fn])
def test_cast_rounds_among_floats_as_astype_does(where, dtype):
    random = np.random.default_rng(0)
    values = random.normal(size=200_000).astype(np.float32) * 10.0 ** random.integers(
        -9, 9, 200_000
    )
    values = np.concatenate([values, [np.nan, np.inf, -np.inf, -0.0]]).astype(np.float32)
    got = cast(where, values, dtype)
    with np.errstate(all="ignore"):
        assert_same_leaf(np.asarray(got), values.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cast_widens_floats_exactly(where, dtype):
    values = np.arange(-8, 8, dtype=np.float32).astype(jnp.bfloat16) / 3
    jaxshard.save(where, values)
    got = jaxshard.load(where, np.zeros(16, dtype), cast=True)
    assert_same_leaf(got, values.astype(dtype))


def test_cast_goes_with_the_sharding_of_like(where):
    values = np.arange(64, dtype=np.float32).reshape(8, 8) / 7
    jaxshard.save(where, jax.device_put(values, on(mesh((4, 2)), "a", "b")))
    like = struct((8, 8), jnp.bfloat16, sharding=on(mesh((2, 4)), "b", "a"))
    got, report = loaded(where, like, cast=True)
    assert got.sharding == like.sharding
    assert bits(got) == bits(values.astype(jnp.bfloat16))
    assert report.cast == ("",)


def test_the_report_names_what_was_cast(where):
    jaxshard.save(where, {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32), "n": 1})
    like = {"a": np.ones(2, np.float16), "b": np.ones(2, np.float32), "n": 1}
    assert loaded(where, like, cast=True)[1].cast == ("a",)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([16777216, -16777216, 0], np.int32), np.float32),
        (np.array([127, -128], np.int32), np.int8),
        (np.array([7, -8], np.int8), ml_dtypes.int4),
        (np.array([3, 0], np.uint8), ml_dtypes.uint2),
        (np.array([7, -8], ml_dtypes.int4), np.float32),
        (np.array([1.0, -0.0, 255.0], np.float32), np.uint8),
        (np.array([2.0, 256.0], jnp.bfloat16), np.int32),
        (np.array([2**31 - 1, 0], np.int64), np.int32),
        (np.array([2048.0], np.float16), np.int16),
        (np.array([256, 0], np.int32), jnp.bfloat16),
    ],
    ids=lambda v: getattr(v, "name", None) or getattr(v, "__name__", None) or str(v.dtype),
)
def test_cast_with_integers_keeps_every_value(where, values, dtype):
    got = cast(where, values, dtype)
    assert got.dtype == dtype
    assert np.asarray(got).astype(np.float64).tolist() == values.astype(np.float64).tolist()


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([16777217], np.int32), np.float32),  # CASES 19 and 39
        (np.array([1000.7], np.float32), np.int8),  # CASE 39
        (np.array([1.5], np.float32), np.int32),
        (np.array([128], np.int32), np.int8),
        (np.array([-1], np.int32), np.uint32),
        (np.array([np.nan], np.float32), np.int32),
        (np.array([np.inf], np.float32), np.int32),
        (np.array([2**31], np.float32), np.int32),
        (np.array([8], np.int8), ml_dtypes.int4),
        (np.array([257], np.int32), jnp.bfloat16),
        (np.array([65536], np.int32), np.float16),
        (np.array([2**32], np.int64), np.int32),
        (np.array([2**32 - 1], np.uint32), np.int32),
    ],
    ids=lambda v: getattr(v, "name", None) or getattr(v, "__name__", None) or str(v),
)
def test_cast_refuses_what_integers_would_lose(where, values, dtype):
    """CASES 19 and 39: never another value without a word."""
    values = np.concatenate([np.ones(99, values.dtype), values])
    with pytest.raises(LeafMismatchError, match=r"'x': 1 values are not representable in .*"):
        cast(where, values, dtype)


def test_cast_at_the_edges_of_64_bits(where):
    with jax.enable_x64(True):
        assert cast(where, np.array([2**53, -(2**63)]), np.float64).tolist() == [2**53, -(2**63)]
        assert cast(where, np.array([2.0**62]), np.int64).tolist() == [2**62]
        for values, dtype in [
            (np.array([2**53 + 1]), np.float64),
            (np.array([2**63 - 1]), np.float64),
            (np.array([2.0**63]), np.int64),
            (np.array([2**63], np.uint64), np.int64),
            (np.array([-1]), np.uint64),
        ]:
            with pytest.raises(LeafMismatchError, match="1 values are not representable"):
                cast(where, values, dtype)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([True, False]), np.int32),
        (np.array([1, 0], np.int32), np.bool_),
        (np.array([True]), np.float32),
        (np.array([1.0], np.float32), np.bool_),
        (np.array([1 + 1j], np.complex64), np.float32),
    ],
    ids=lambda v: str(getattr(v, "dtype", v)),
)
def test_bool_and_complex_are_never_cast_away(where, values, dtype):
    with pytest.raises(LeafMismatchError, match=r"'x': .*never"):
        cast(where, values, dtype)


def test_without_cast_an_exact_conversion_is_an_error_too(where):
    """CASE 19: an int32 counter onto a float32 template."""
    jaxshard.save(where, {"count": jnp.asarray(16777217, jnp.int32)})
    assert mismatches(where, {"count": jax.device_put(np.float32(0))}) == (
        "'count': saved int32[], wanted float32[] (cast=True would convert)",
    )


def test_all_failed_casts_are_in_one_error(where):
    jaxshard.save(where, {"a": np.array([1.5]), "b": np.array([2.5]), "c": np.array([3.0])})
    like = {name: np.zeros(1, np.int64) for name in "abc"}
    assert {m.split(":")[0] for m in mismatches(where, like, cast=True)} == {"'a'", "'b'"}


def test_cast_changes_neither_shape_nor_kind_nor_key(where):
    saved = {"shape": np.zeros(3), "kind": 1, "scalar": np.float64(1), "key": jax.random.key(0)}
    jaxshard.save(where, saved)
    like = {
        "shape": np.zeros(4, np.float32),
        "kind": 1.0,
        "scalar": np.zeros((), np.float64),
        "key": jax.random.key(0, impl="rbg"),
    }
    assert len(mismatches(where, like, cast=True)) == 4


def test_cast_of_an_array_that_is_shared(where):
    x = jnp.arange(5.0)
    jaxshard.save(where, {"a": x, "b": x})
    like = {"a": struct((5,), jnp.bfloat16), "b": struct((5,))}
    got = jaxshard.load(where, like, cast=True)
    assert_same_leaf(got["a"], x.astype(jnp.bfloat16))
    assert_same_leaf(got["b"], x)


# fill_missing -------------------------------------------------------------------------------


def test_fill_missing_keeps_values_of_like_and_reports_them(where):
    jaxshard.save(where, {"w": jnp.ones(3), "step": 4})
    like = {"w": jnp.zeros(3), "step": 0, "ema": {"w": jnp.full(3, 9.0)}, "new": None}
    got, report = loaded(where, like, fill_missing=True)
    assert got["ema"]["w"] is like["ema"]["w"]
    assert (got["step"], got["new"]) == (4, None)
    assert got["w"].tolist() == [1, 1, 1]
    assert sorted(report.filled) == ["ema/w", "new"]
    assert loaded(where, {"w": jnp.zeros(3), "step": 0}, fill_missing=True)[1].filled == ()


def test_fill_missing_has_nothing_to_keep_of_an_abstract_leaf(where):
    jaxshard.save(where, {"w": jnp.ones(3)})
    like = {"w": struct((3,)), "ema": struct((3,)), "v": struct((2,))}
    assert set(mismatches(where, like, fill_missing=True)) == {
        "'ema': missing, and like is abstract: no value to keep",
        "'v': missing, and like is abstract: no value to keep",
    }


def test_fill_missing_fills_nothing_else(where):
    """Extra leaves, shapes and kinds still differ."""
    jaxshard.save(where, {"w": jnp.ones(3), "extra": 1})
    found = mismatches(where, {"w": jnp.ones(4), "new": 2}, fill_missing=True)
    assert set(found) == {
        "'w': saved float32[3], wanted float32[4]",
        "'extra': saved Python int, not in like",
    }


def test_fill_missing_does_not_release_what_it_keeps(where):
    jaxshard.save(where, {"w": jnp.ones(3)})
    like = {"w": jnp.zeros(3), "ema": jnp.full(3, 9.0)}
    options = LoadOptions(release_like=True)
    got = jaxshard.load(where, like, fill_missing=True, options=options)
    assert like["w"].is_deleted()
    assert got["ema"].tolist() == [9, 9, 9]


def test_fill_missing_of_a_module(where):
    jaxshard.save(where, {"kernel": jnp.ones((2, 3))})
    like = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    got, report = loaded(where, like, fill_missing=True)
    assert report.filled == ("bias",)
    assert got.kernel.get_value().tolist() == np.ones((2, 3)).tolist()
    assert got.bias.get_value().tolist() == like.bias.get_value().tolist()


@pytest.mark.parametrize("extra_was_saved", [False, True])
def test_one_call_loads_checkpoints_with_and_without_an_extra_subtree(where, extra_was_saved):
    """CASE 15: `last_batch`, a new field."""
    state = {"params": {"w": jnp.arange(3.0)}, "last_batch": {"x": jnp.ones(2)}}
    saved = state if extra_was_saved else {"params": state["params"]}
    jaxshard.save(where, saved)
    like = {"params": {"w": jnp.zeros(3)}, "last_batch": {"x": jnp.zeros(2)}}
    got = jaxshard.load(where, like, fill_missing=True)
    assert_same_tree(got, {**like, **saved})
    smaller = jaxshard.load(where, {"params": like["params"]}, select="params/**")
    assert_same_tree(smaller, {"params": state["params"]})


# Placement that does not fit ----------------------------------------------------------------


@pytest.fixture
def sharded(where) -> str:
    """Leaves saved on a 2x4 mesh."""
    devices = mesh((2, 4))
    jaxshard.save(
        where,
        {
            "w": jax.device_put(np.zeros((8, 8), np.float32), on(devices, "a", "b")),
            "b": jax.device_put(np.zeros(8, np.float32), on(devices, "b")),
            "r": jax.device_put(np.zeros(6, np.float32), on(devices)),
            "n": 3,
        },
    )
    return where


def test_saved_axes_that_the_mesh_lacks_are_all_named(sharded):
    assert set(mismatches(sharded, mesh=mesh((2, 4), ("a", "x")))) == {
        "'w': the saved spec has the axis 'b', which the mesh lacks (it has: a, x)",
        "'b': the saved spec has the axis 'b', which the mesh lacks (it has: a, x)",
    }


def test_axes_of_a_rule_that_the_mesh_lacks(sharded):
    (found,) = mismatches(sharded, mesh=mesh((2, 4)), rules=[("w", P("data"))])
    assert found == "'w': the rule has the axis 'data', which the mesh lacks (it has: a, b)"


def test_a_dimension_that_the_mesh_does_not_divide(sharded):
    found = mismatches(sharded, mesh=mesh((2, 4)), rules=[("r", P("b")), ("w", P("a", "b"))])
    assert len(found) == 1
    assert found[0].startswith("'r': saved float32[6] does not fit the wanted sharding: ")
    assert "6" in found[0]


def test_a_spec_of_more_axes_than_the_leaf_has(sharded):
    (found,) = mismatches(sharded, mesh=mesh((2, 4)), rules=[("b", P("a", "b"))])
    assert found.startswith("'b': ")


def test_a_rule_without_a_mesh(sharded):
    (found,) = mismatches(sharded, rules=[("w", P("a"))])
    assert found == (
        "'w': a rule gives a PartitionSpec, but there is no mesh (mesh=, or jax.set_mesh)"
    )


def abstract_like() -> dict[str, Any]:
    """What `jax.eval_shape` gives inside `jax.set_mesh`."""
    with jax.set_mesh(mesh((2, 4))):
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), P("a", "b"))
        return {"w": struct((8, 8), sharding=sharding)}


def test_an_abstract_mesh_without_a_mesh(sharded):
    (found,) = mismatches(sharded, abstract_like(), select="w")
    assert found == (
        "'w': like is on an abstract mesh {'a': 2, 'b': 4}, but there is no mesh "
        "(mesh=, or jax.set_mesh)"
    )


@pytest.mark.parametrize("other", [((4, 2), ("a", "b")), ((2, 4), ("a", "c")), ((8,), ("a",))])
def test_an_abstract_mesh_with_another_mesh(sharded, other):
    """Names and sizes must agree."""
    devices = mesh(*other)
    want = f"like is on an abstract mesh {{'a': 2, 'b': 4}}, but the mesh is {dict(devices.shape)}"
    assert mismatches(sharded, abstract_like(), select="w", mesh=devices) == (f"'w': {want}",)
    with jax.set_mesh(devices):
        assert mismatches(sharded, abstract_like(), select="w") == (f"'w': {want}",)


def test_an_abstract_mesh_with_its_mesh(sharded):
    got = jaxshard.load(sharded, abstract_like(), select="w", mesh=mesh((2, 4)))["w"]
    assert got.sharding == on(mesh((2, 4)), "a", "b")


def test_64_bit_leaves_with_x64_off_are_named_and_never_cut(where):
    """JAX would silently make 32 bits of them."""
    with jax.enable_x64(True):
        tree = {"f": jnp.ones(3), "i": jnp.ones(3, jnp.int64), "g": jnp.ones(3, jnp.float32)}
        jaxshard.save(where, tree)
    like = {"f": struct((3,), np.float64), "i": struct((3,), np.int64), "g": struct((3,))}
    want = {
        "'f': saved float64[3], but 64-bit types are off (jax_enable_x64=True keeps it)",
        "'i': saved int64[3], but 64-bit types are off (jax_enable_x64=True keeps it)",
    }
    assert set(mismatches(where, like)) == want
    assert set(mismatches(where, mesh=mesh((2, 4)))) == want
    assert jaxshard.load(where)["f"].dtype == np.float64
    assert (
        jaxshard.load(where, {**like, "f": np.zeros(3), "i": np.zeros(3, int)})["i"].dtype == "i8"
    )
    with jax.enable_x64(True):
        assert_same_tree(jaxshard.load(where, tree), tree)


def test_64_bit_leaves_load_as_32_bits_when_asked(where):
    with jax.enable_x64(True):
        jaxshard.save(where, {"x": jnp.arange(3.0)})
    got = jaxshard.load(where, {"x": struct((3,))}, cast=True)["x"]
    assert_same_leaf(got, jnp.arange(3, dtype=jnp.float32), placement=False)


def test_differences_of_all_sorts_are_in_one_error(sharded):
    """Names, shapes and placements together."""
    like = {
        "w": struct((8, 8), sharding=on(mesh((2, 4)), "a")),
        "b": struct((9,)),
        "x": 1,
        "r": abstract_like()["w"].update(shape=(6,), sharding=None),
        "n": 3.0,
    }
    found = mismatches(sharded, like, mesh=mesh((4,), ("a",)), rules=[("r", P("a"))])
    assert {m.split(":")[0] for m in found} == {"'b'", "'x'", "'n'", "'r'"}


# Reported faults of other libraries ---------------------------------------------------------


def test_a_checkpoint_of_eight_devices_is_read_on_one(tmp_path):
    """CASE 4: inspected and loaded as NumPy."""
    devices = mesh((2, 4))
    tree = {
        "w": jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), on(devices, "a", "b")),
        "k": jax.device_put(jax.random.split(jax.random.key(0), 8), on(devices, "b")),
        "h": jax.device_put(np.arange(8), on(devices, "a", memory_kind="pinned_host")),
    }
    jaxshard.save(tmp_path / "c", tree, options=FILES)
    print_all = f"""
import jax, jax.numpy as jnp, numpy as np, jaxshard
path = {str(tmp_path / "c")!r}
assert jax.device_count() == 1
ckpt = jaxshard.open(path)
assert ckpt.leaves["w"].mesh.sizes == (2, 4)
assert ckpt["w"].read(np.s_[3]).tolist() == list(range(24, 32))
plain = jaxshard.load(path)
assert type(plain["w"]) is np.ndarray and np.array_equal(plain["w"].ravel(), np.arange(64.))
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plain)
got = jaxshard.load(path, like)
assert got["w"].devices() == {{jax.devices()[0]}}
assert (jax.random.bits(got["k"][7]) == {int(jax.random.bits(tree["k"][7]))})
print(got["h"].tolist())
"""
    assert run_python(print_all, devices=1).strip() == str(list(range(8)))


def test_a_mix_of_sharded_replicated_and_unplaced_leaves(where):
    """CASE 5: with `like`, abstract, by rules and by the saved specs."""
    devices = mesh((2, 4))
    tree = {
        "sharded": jax.device_put(np.arange(16.0, dtype=np.float32), on(devices, "b")),
        "replicated": jax.device_put(np.arange(3.0, dtype=np.float32), on(devices)),
        "single": jax.device_put(np.arange(4.0, dtype=np.float32), jax.devices()[2]),
        "free": jnp.arange(5.0),
        "numpy": np.arange(6),
        "int": 7,
    }
    jaxshard.save(where, tree)
    assert_same_tree(jaxshard.load(where, tree), tree)
    placed = jaxshard.load(where, mesh=devices)
    assert placed["sharded"].sharding == tree["sharded"].sharding
    assert placed["single"].sharding == placed["free"].sharding == on(devices)
    assert type(placed["numpy"]) is np.ndarray
    half = {k: struct(v.shape, v.dtype) if isinstance(v, jax.Array) else v for k, v in tree.items()}
    half["sharded"] = struct((16,), sharding=on(devices, "a"))
    got = jaxshard.load(where, half)
    assert got["sharded"].sharding == on(devices, "a")
    assert_same_tree(got, tree, placement=False)


def test_a_tree_of_mixed_memory_kinds(where):
    """CASE 6: optimizer state in pinned_host, onto itself and onto the device."""
    devices = mesh((2, 4))
    values = np.arange(8, dtype=np.float32)
    tree = {
        "param": jax.device_put(values, on(devices, "b")),
        "moment": jax.device_put(values + 1, on(devices, "b", memory_kind="pinned_host")),
        "count": jax.device_put(
            np.int32(1), SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        ),
    }
    jaxshard.save(where, tree)
    assert_same_tree(jaxshard.load(where, tree), tree)
    assert jaxshard.load(where, mesh=devices)["moment"].sharding.memory_kind == "pinned_host"
    swapped = {**tree, "param": tree["moment"], "moment": tree["param"]}
    got = jaxshard.load(where, swapped)
    assert got["moment"].sharding.memory_kind == "device"
    assert bits(got["moment"]) == bits(values + 1)


def test_a_float_counter_in_the_optimizer_goes_on(where):
    """CASE 14: the next bias correction uses N + 1."""
    tx = optax.adam(0.1)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    state = (state[0]._replace(count=jnp.asarray(3.0, jnp.float32)), *state[1:])
    jaxshard.save(where, state)
    got = jaxshard.load(where, state)
    assert (got[0].count.dtype, float(got[0].count)) == (jnp.float32, 3.0)
    grads = {"w": jnp.full(3, 0.5)}
    assert_same_tree(tx.update(grads, got), tx.update(grads, state))


def test_every_call_works_inside_a_running_event_loop(tmp_path):
    """CASE 34: a notebook, a web server."""

    async def main() -> Any:
        tree = {"x": jax.device_put(np.arange(16.0, dtype=np.float32), on(mesh((8,)), "a"))}
        jaxshard.save(tmp_path / "a", tree, options=FILES)
        pending = jaxshard.save_async(tmp_path / "b", tree)
        await asyncio.sleep(0)
        pending.wait(60)
        assert jaxshard.verify(tmp_path / "b").ok
        assert jaxshard.diff(tmp_path / "a", tmp_path / "b").identical
        assert jaxshard.open(tmp_path / "a")["x"].read(np.s_[3]) == 3.0
        assert_same_tree(jaxshard.load(tmp_path / "b", tree), tree)
        return jaxshard.load(tmp_path / "a")["x"].tolist()

    assert asyncio.run(main()) == np.arange(16.0).tolist()
