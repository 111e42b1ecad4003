"""Promise 5: what was saved on any mesh loads on any other, bit for bit, and each tile once.

Also: where a leaf goes that `like` does not place, arrays that a step can donate, and how many
bytes are read.
"""

import contextlib
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from support import P, assert_same_leaf, assert_same_tree, bits, mesh, on

import jaxshard
from jaxshard import LoadOptions, LoadReport, SaveOptions, _fetch
from jaxshard._boxes import Box
from jaxshard._store import LocalStore

PACK, FILES = SaveOptions(), SaveOptions(pack_below=0)


def loaded(path: Any, like: Any = None, **kwargs: Any) -> tuple[Any, LoadReport]:
    reports: list[LoadReport] = []
    options = LoadOptions(on_report=reports.append, **kwargs.pop("options", {}))
    tree = jaxshard.load(path, like, options=options, **kwargs)
    return tree, reports[0]


def struct_of(value: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def assert_everywhere(got: jax.Array, want: np.ndarray, sharding: Any) -> None:
    """Placed as asked, and every device holds its own part of the values, replicas too."""
    assert got.sharding.is_equivalent_to(sharding, got.ndim)
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got = jax.random.key_data(got)
    indices = sharding.devices_indices_map(want.shape[: len(sharding.shard_shape(want.shape))])
    assert {s.device for s in got.addressable_shards} == set(indices)
    for shard in got.addressable_shards:
        assert bits(shard.data) == bits(want[shard.index]), shard.device


# Any mesh to any mesh -----------------------------------------------------------------------


def placements() -> dict[str, Any]:
    reverse = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b"))
    return {
        "2x4": on(mesh((2, 4)), "a", "b"),
        "4x2": on(mesh((4, 2)), "a", "b"),
        "2x4 swapped": on(mesh((2, 4)), "b", "a"),
        "2x4 rows over both": on(mesh((2, 4)), ("a", "b")),
        "2x4 columns over both": on(mesh((2, 4)), None, ("b", "a")),
        "2x4 partly replicated": on(mesh((2, 4)), "a"),
        "reversed devices": on(reverse, "a", "b"),
        "8 rows": on(mesh((8,)), "a"),
        "8 columns": on(mesh((8,)), None, "a"),
        "2x2x2": on(mesh((2, 2, 2)), ("c", "a"), "b"),
        "replicated": on(mesh((8,))),
        "3 of 8": on(Mesh(np.array(jax.devices()[2:5]), ("a",)), "a"),
        "1": on(mesh((1,)), "a"),
        "single": SingleDeviceSharding(jax.devices()[6]),
        "host": on(mesh((2, 4)), "b", memory_kind="pinned_host"),
    }


@pytest.mark.parametrize("options", [PACK, FILES], ids=["pack", "files"])
def test_every_placement_loads_on_every_other(tmp_path, options):
    """One leaf for each placement that was saved; all of them loaded on each of the others."""
    random = np.random.default_rng(0)
    values = {
        name: random.integers(0, 256, (24, 24 * 4), np.uint8).view(np.float32)
        for name in placements()
    }
    saved = {name: jax.device_put(values[name], where) for name, where in placements().items()}
    jaxshard.save(tmp_path / "c", saved, options=options)
    for to, sharding in placements().items():
        got = jaxshard.load(tmp_path / "c", {n: struct_of(x, sharding) for n, x in saved.items()})
        for name, leaf in got.items():
            assert_everywhere(leaf, values[name], sharding)
            assert leaf.committed, (name, to)


def test_types_of_all_sizes_load_on_other_meshes(tmp_path):
    """Bytes, sub-bytes, words of keys: where boxes lie in them is worked out apart."""
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (8, 48), np.uint8)
    leaves = {
        "bfloat16": raw.view(jnp.bfloat16),
        "int4": (raw & 15).view(jnp.int4),
        "uint2": (raw & 3).view(jnp.uint2),
        "bool": (raw & 1).view(bool),
        "float8": raw.view(jnp.float8_e5m2),
        "complex": raw.view(np.complex64),
    }
    for save, load in itertools.permutations(["2x4", "4x2", "8 rows", "replicated", "single"], 2):
        path = f"memory://{tmp_path}/{save}/{load}"
        there, here = placements()[save], placements()[load]
        wide = {n: x for n, x in leaves.items() if x.shape[1] % 4 == 0}
        jaxshard.save(path, {n: jax.device_put(x, there) for n, x in wide.items()})
        for name, got in jaxshard.load(
            path, {n: struct_of(x, here) for n, x in wide.items()}
        ).items():
            assert_everywhere(got, wide[name], here)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_load_on_other_meshes(tmp_path, impl):
    words = jax.random.key_data(jax.random.key(0, impl=impl)).size
    raw = np.random.default_rng(0).integers(0, 2**32, (8, 4, words), np.uint32)
    keys = jax.random.wrap_key_data(raw, impl=impl)
    for save, load in itertools.permutations(["2x4", "4x2", "replicated", "single"], 2):
        path = f"memory://{tmp_path}/{save}/{load}"
        there, here = placements()[save], placements()[load]
        jaxshard.save(path, jax.device_put(keys, there))
        got = jaxshard.load(path, struct_of(keys, here))
        assert_everywhere(got, raw, here)
        assert jax.random.key_impl(got) == impl


@pytest.mark.parametrize("options", [PACK, FILES], ids=["pack", "files"])
def test_everything_loads_as_numpy_whatever_it_was_saved_on(tmp_path, options):
    values = np.random.default_rng(0).normal(size=(24, 24)).astype(np.float32)
    saved = {name: jax.device_put(values, where) for name, where in placements().items()}
    jaxshard.save(tmp_path / "c", saved, options=options)
    like = {name: np.zeros((24, 24), np.float32) for name in saved}
    for got in (jaxshard.load(tmp_path / "c"), jaxshard.load(tmp_path / "c", like)):
        for leaf in got.values():
            assert type(leaf) is np.ndarray
            assert_same_leaf(leaf, values)


@pytest.mark.parametrize("options", [PACK, FILES], ids=["pack", "files"])
def test_numpy_arrays_and_structs_load_on_a_mesh(tmp_path, options):
    values = np.random.default_rng(0).normal(size=(24, 24)).astype(np.float32)
    jaxshard.save(tmp_path / "c", dict.fromkeys(placements(), values), options=options)
    like = {name: struct_of(values, where) for name, where in placements().items()}
    for name, got in jaxshard.load(tmp_path / "c", like).items():
        assert_everywhere(got, values, placements()[name])


@pytest.mark.parametrize("shape", [(1201, 997), (1200, 1003), (7, 300_007)], ids=str)
def test_arrays_of_many_uneven_tiles_load_on_another_mesh(tmp_path, shape):
    """Prime sides: no tile edge falls on a box edge."""
    values = (
        np.random.default_rng(0).integers(0, 256, (*shape, 4), np.uint8).view(np.float32)[..., 0]
    )
    jaxshard.save(tmp_path / "c", {"x": values})
    places = [p for p in placements().values() if divides(p, shape)]
    assert len(places) >= 3
    for place in places:
        assert_everywhere(
            jaxshard.load(tmp_path / "c", {"x": struct_of(values, place)})["x"], values, place
        )


def divides(sharding: Any, shape: tuple[int, ...]) -> bool:
    with contextlib.suppress(ValueError):
        sharding.shard_shape(shape)
        return True
    return False


# Where a leaf goes --------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> tuple[str, dict[str, Any]]:
    """Leaves of a 2x4 mesh, of one device, and of none."""
    devices = mesh((2, 4))
    tree = {
        "w": jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), on(devices, "a", "b")),
        "b": jax.device_put(np.arange(8, dtype=np.float32), on(devices, ("a", "b"))),
        "single": jax.device_put(np.arange(8, dtype=np.float32), jax.devices()[3]),
        "numpy": np.arange(8, dtype=np.int32),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), on(devices, "b")),
        "n": 7,
    }
    jaxshard.save(f"memory://{tmp_path}", tree)
    return f"memory://{tmp_path}", tree


def specs(tree: dict[str, Any]) -> dict[str, Any]:
    """The partition specs of the leaves that have one."""
    return {
        name: leaf.sharding.spec
        for name, leaf in tree.items()
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    }


SAVED_SPECS = {"w": P("a", "b"), "b": P(("a", "b")), "single": P(), "keys": P("b")}


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 8), (2, 2), (1, 1)])
def test_mesh_brings_the_saved_specs_to_another_mesh(saved, shape):
    """A leaf without a spec is replicated; what was NumPy stays NumPy."""
    path, tree = saved
    devices = mesh(shape)
    got = jaxshard.load(path, mesh=devices)
    assert specs(got) == SAVED_SPECS
    for name, leaf in got.items():
        if name in SAVED_SPECS:
            want = tree[name] if name != "keys" else jax.random.key_data(tree[name])
            assert_everywhere(leaf, np.asarray(want), NamedSharding(devices, SAVED_SPECS[name]))
            assert leaf.committed
    assert_same_leaf(got["numpy"], tree["numpy"])
    assert got["n"] == 7


def test_mesh_places_structs_without_sharding(saved):
    path, tree = saved
    like = {n: struct_of(x, None) if isinstance(x, jax.Array) else x for n, x in tree.items()}
    got = jaxshard.load(path, like, mesh=mesh((4, 2)))
    assert specs(got) == SAVED_SPECS
    assert got["w"].sharding.mesh == mesh((4, 2))
    assert_same_tree(got, tree, placement=False)


def test_the_sharding_of_like_goes_before_mesh_and_rules(saved):
    path, tree = saved
    like = {**tree, "w": struct_of(tree["w"], on(mesh((8,)), None, "a"))}
    got = jaxshard.load(path, like, mesh=mesh((4, 2)), rules=[("**", P("b"))])
    assert_same_tree(got, {**tree, "w": jax.device_put(np.asarray(tree["w"]), like["w"].sharding)})


def test_the_first_rule_that_matches_wins_and_the_others_keep_their_spec(saved):
    path, tree = saved
    rules = [("w", P(None, ("a", "b"))), ("{w,single}", P("a")), ("num*", P("b"))]
    got = jaxshard.load(path, mesh=mesh((4, 2)), rules=rules)
    assert specs(got) == {
        **SAVED_SPECS, "w": P(None, ("a", "b")), "single": P("a"), "numpy": P("b"),
    }  # fmt: skip
    for name in ("w", "single"):
        assert bits(got[name]) == bits(tree[name])


def test_rules_alone_place_on_the_current_mesh(saved):
    path, _ = saved
    with jax.set_mesh(mesh((2, 4))):
        got = jaxshard.load(path, rules=[("w", P("b", "a"))])
    assert got["w"].sharding == on(mesh((2, 4)), "b", "a")
    assert type(got["b"]) is np.ndarray  # neither mesh= nor a rule places it


def test_rules_apply_to_names_after_renaming(saved):
    path, _ = saved
    got = jaxshard.load(path, mesh=mesh((2, 4)), rename={"w": "x/w"}, rules=[("x/**", P("b"))])
    assert got["x"]["w"].sharding.spec == P("b")


def test_structs_go_to_the_current_mesh_with_the_saved_spec(saved):
    path, tree = saved
    like = {"w": struct_of(tree["w"], None)}
    with jax.set_mesh(mesh((4, 2))):
        got = jaxshard.load(path, like, select="w")["w"]
    assert_everywhere(got, np.asarray(tree["w"]), on(mesh((4, 2)), "a", "b"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_structs_go_to_the_mesh_of_a_with_statement(saved):
    path, tree = saved
    with mesh((4, 2)):
        got = jaxshard.load(path, {"w": struct_of(tree["w"], None)}, select="w")["w"]
    assert_everywhere(got, np.asarray(tree["w"]), on(mesh((4, 2)), "a", "b"))


def test_mesh_goes_before_the_current_mesh(saved):
    path, tree = saved
    with jax.set_mesh(mesh((2, 4))):
        got = jaxshard.load(path, {"w": struct_of(tree["w"], None)}, select="w", mesh=mesh((8, 1)))
    assert got["w"].sharding == on(mesh((8, 1)), "a", "b")


def test_without_any_mesh_a_struct_goes_to_the_default_device(saved):
    path, tree = saved
    like = {"w": struct_of(tree["w"], None)}
    assert jaxshard.load(path, like, select="w")["w"].devices() == {jax.devices()[0]}
    with jax.default_device(jax.devices()[4]):
        got = jaxshard.load(path, like, select="w")["w"]
    assert got.devices() == {jax.devices()[4]}
    assert bits(got) == bits(tree["w"])


def abstract_specs(devices: Mesh, tree: Any) -> Any:
    """`jax.eval_shape` under `jax.set_mesh`: specs on an AbstractMesh."""
    with jax.set_mesh(devices):
        there = NamedSharding(jax.sharding.get_abstract_mesh(), P("b", "a"))
        return jax.tree.map(lambda x: struct_of(x, there), tree)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_spec_on_an_abstract_mesh_goes_to_the_concrete_one(saved, axis_type):
    path, tree = saved
    devices = mesh((4, 2), axis_types=(axis_type,) * 2)
    like = {"w": abstract_specs(devices, tree["w"])}
    with jax.set_mesh(devices):
        within = jaxshard.load(path, like, select="w")["w"]
    given = jaxshard.load(path, like, select="w", mesh=devices)["w"]
    for got in (within, given):
        assert got.sharding == NamedSharding(devices, P("b", "a"))
        assert_everywhere(got, np.asarray(tree["w"]), NamedSharding(devices, P("b", "a")))


CONTEXTS = {
    "set_mesh": lambda: jax.set_mesh(mesh((2, 4))),
    "set_mesh explicit": lambda: jax.set_mesh(mesh((8,), axis_types=(AxisType.Explicit,))),
    "with mesh": lambda: mesh((2, 4)),
    "default_device": lambda: jax.default_device(jax.devices()[5]),
    "enable_x64": lambda: jax.enable_x64(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "checking_leaks": jax.checking_leaks,
    "debug_nans": lambda: jax.debug_nans(True),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "disable_jit": jax.disable_jit,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CONTEXTS)
def test_save_and_load_give_the_same_in_every_context(tmp_path, name):
    """Host-side work is NumPy, so no mesh, guard or flag around it changes anything."""
    explicit = mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    tree = {
        "auto": jax.device_put(np.full((8, 8), np.nan, np.float32), on(mesh((4, 2)), "a", "b")),
        "explicit": jax.device_put(np.ones((8, 8), np.float32), on(explicit, "y", "x")),
        "single": jax.device_put(np.ones(3, np.int8), jax.devices()[3]),
        "free": jnp.arange(5),
        "weak": jnp.asarray(1.5),
        "key": jax.random.key(0),
        "int4": jax.device_put(np.arange(8).astype(jnp.int4), on(explicit, "x")),
        "host": jax.device_put(np.ones(4), on(mesh((4, 2)), "a", memory_kind="pinned_host")),
    }
    path = f"memory://{tmp_path}"
    with CONTEXTS[name]():
        jaxshard.save(path, tree)
        within = jaxshard.load(path, tree)
        donatable = jaxshard.load(path, tree, options=LoadOptions(donatable=True))
    assert_same_tree(within, tree)
    assert_same_tree(donatable, tree)
    assert_same_tree(jaxshard.load(path, tree), tree)


def test_a_load_inside_jit_gives_values_and_not_tracers(tmp_path):
    """For example in a function that makes the state, and is traced."""
    tree = {"x": jnp.arange(3.0), "weak": jnp.asarray(1.5), "key": jax.random.key(3)}
    jaxshard.save(f"memory://{tmp_path}", tree)
    found = []

    @jax.jit
    def step(y):
        found.append(jaxshard.load(f"memory://{tmp_path}", tree))
        found.append(jaxshard.load(f"memory://{tmp_path}", mesh=mesh((2, 4))))
        return y

    step(jnp.ones(2))
    leaves = jax.tree.leaves(found)
    assert len(leaves) == 6
    assert not [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
    assert_same_tree(found[0], tree)


# Donation -----------------------------------------------------------------------------------


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def donate(tree: Any) -> tuple[Any, Any]:
    """Where the buffers were, and where they are after a step that may take them over."""
    before = jax.tree.map(pointers, tree)
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    after = jax.block_until_ready(step(tree))
    assert all(x.is_deleted() for x in jax.tree.leaves(tree))
    return before, jax.tree.map(pointers, after)


@pytest.mark.parametrize("options", [PACK, FILES], ids=["pack", "files"])
def test_donatable_arrays_give_their_buffers_to_the_next_step(tmp_path, options):
    """CASE 7: else the first resumed step takes twice the memory. All shards of all leaves."""
    devices = mesh((2, 4))
    places = {"sharded": ("a", "b"), "rows": (("a", "b"),), "partly": ("b",), "replicated": ()}
    tree = {
        name: jax.device_put(np.full((512, 512), i, np.float32), on(devices, *spec))
        for i, (name, spec) in enumerate(places.items())
    }
    jaxshard.save(tmp_path / "c", tree, options=options)
    got = jaxshard.load(tmp_path / "c", tree, options=LoadOptions(donatable=True))
    assert_same_tree(got, tree)
    before, after = donate(got)
    assert after == before
    assert len({p for shards in before.values() for p in shards}) == 8 * len(tree)


def test_donatable_arrays_of_one_device_and_of_host_memory(tmp_path):
    single = jax.device_put(np.ones((256, 256), np.float32), jax.devices()[2])
    jaxshard.save(tmp_path / "c", {"x": single})
    got = jaxshard.load(tmp_path / "c", {"x": single}, options=LoadOptions(donatable=True))
    before, after = donate(got)
    assert after == before


def test_donating_a_loaded_array_does_not_change_the_checkpoint_or_its_twin(tmp_path):
    """Buffers that were read into, or mapped from a file, are nobody else's."""
    value = jax.device_put(np.arange(1 << 16, dtype=np.float32), on(mesh((8,)), "a"))
    jaxshard.save(tmp_path / "c", {"x": value}, options=FILES)
    for options in (LoadOptions(), LoadOptions(donatable=True), LoadOptions(io_mode="memmap")):
        first = jaxshard.load(tmp_path / "c", {"x": value}, options=options)
        second = jaxshard.load(tmp_path / "c", {"x": value}, options=options)
        donate(first)
        assert_same_leaf(second["x"], value)
        assert jaxshard.verify(tmp_path / "c").ok


def test_a_shared_array_is_donated_once(tmp_path):
    value = jax.device_put(np.ones((256, 256), np.float32), on(mesh((8,)), "a"))
    jaxshard.save(tmp_path / "c", {"a": value, "b": value})
    got = jaxshard.load(
        tmp_path / "c", {"a": value, "b": value}, options=LoadOptions(donatable=True)
    )
    assert got["a"] is got["b"]
    before, after = donate({"a": got["a"]})
    assert after == before


def test_release_like_frees_the_leaves_that_are_replaced(tmp_path):
    devices = mesh((8,))
    tree = {
        "w": jax.device_put(np.arange(64, dtype=np.float32), on(devices, "a")),
        "key": jax.random.key(3),
        "numpy": np.arange(4),
        "n": 3,
    }
    want = {"w": bits(tree["w"]), "key": bits(tree["key"])}
    jaxshard.save(tmp_path / "c", tree)
    got = jaxshard.load(tmp_path / "c", tree, options=LoadOptions(release_like=True))
    assert tree["w"].is_deleted()
    assert tree["key"].is_deleted()
    assert {name: bits(got[name]) for name in want} == want
    assert got["w"].sharding == on(devices, "a")
    assert tree["numpy"].tolist() == [0, 1, 2, 3]


def test_release_like_keeps_what_is_not_loaded(tmp_path):
    tree = {"a": jnp.arange(3.0), "b": jnp.arange(4.0)}
    jaxshard.save(tmp_path / "c", tree)
    got = jaxshard.load(tmp_path / "c", tree, select="a", options=LoadOptions(release_like=True))
    assert tree["a"].is_deleted()
    assert got["b"] is tree["b"]
    assert got["b"].tolist() == [0, 1, 2, 3]


def test_release_like_of_an_array_that_is_also_kept(tmp_path):
    """The same array under a name that is loaded and under one that is not."""
    jaxshard.save(tmp_path / "c", {"a": jnp.arange(3.0), "b": jnp.arange(3.0)})
    x = jnp.zeros(3)
    got = jaxshard.load(
        tmp_path / "c", {"a": x, "b": x}, select="a", options=LoadOptions(release_like=True)
    )
    assert got["a"].tolist() == [0, 1, 2]
    assert got["b"].tolist() == [0, 0, 0]


def test_without_release_like_the_old_state_stays(tmp_path):
    tree = {"w": jnp.arange(64.0)}
    jaxshard.save(tmp_path / "c", tree)
    got = jaxshard.load(tmp_path / "c", tree)
    assert not tree["w"].is_deleted()
    assert pointers(got["w"]) != pointers(tree["w"])


# Bytes read ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, np.ndarray]:
    """64 MiB on a 2x4 mesh."""
    values = np.arange(4096 * 4096, dtype=np.float32).reshape(4096, 4096)
    path = tmp_path_factory.mktemp("large") / "c"
    jaxshard.save(path, {"x": jax.device_put(values, on(mesh((2, 4)), "a", "b"))})
    return path, values


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((2, 4), ("a", "b")),
        ((4, 2), ("a", "b")),
        ((1, 8), ("a", "b")),  # columns only
        ((8, 1), ("a", "b")),  # rows only
        ((2, 4), ("b", "a")),
        ((8,), ()),
        ((1,), ()),
    ],
    ids=str,
)
def test_a_load_reads_each_tile_once(large, shape, spec):
    """At most 1.1 times what is needed where edges fall on tiles; replicas are read once."""
    path, values = large
    sharding = on(mesh(shape), *spec)
    got, report = loaded(path, {"x": struct_of(values, sharding)})
    assert report.bytes_needed == values.nbytes
    assert report.bytes_needed <= report.bytes_read <= 1.1 * report.bytes_needed
    for shard in got["x"].addressable_shards:
        assert np.array_equal(np.asarray(shard.data), values[shard.index])


def traffic(path: Path, box: Box) -> _fetch.Traffic:
    """What a process reads that holds one box of the only leaf."""
    source = jaxshard.open(path).source
    return _fetch.fetch(source, [_fetch.Want(0, [box], lambda _: None)])


def test_a_process_that_holds_a_part_reads_only_that(large):
    """One row of eight, one column of four, one tile: within 1.1 times; half a tile: the tile."""
    path, _ = large
    height, width = jaxshard.open(path).leaves["x"].tile_shape
    assert (4096 % height, 4096 % width) == (0, 0)
    for box in (
        Box((512, 0), (512, 4096)),
        Box((0, 1024), (4096, 1024)),
        Box((0, 0), (height, width)),
    ):
        read = traffic(path, box)
        assert read.bytes_needed == box.size * 4
        assert read.bytes_needed <= read.bytes_read <= 1.1 * read.bytes_needed, box
    column = traffic(path, Box((0, 512), (4096, 512)))
    assert column.bytes_read <= 2.2 * column.bytes_needed


def test_a_finer_mesh_reads_what_it_needs_of_every_size(tmp_path):
    """Saved coarse, loaded fine: row-wise, column-wise, and both."""
    for size in (512, 1024, 2048):
        values = np.ones((size, size), np.float32)
        path = tmp_path / f"{size}"
        jaxshard.save(path, {"x": jax.device_put(values, on(mesh((2,)), "a"))})
        for spec in [(("a", "b"),), (None, ("a", "b")), ("a", "b"), ("b", "a")]:
            sharding = on(mesh((2, 4)), *spec)
            _, report = loaded(path, {"x": struct_of(values, sharding)})
            assert report.bytes_read <= 1.1 * report.bytes_needed, (size, spec)


def test_bytes_needed_counts_replicas_once(tmp_path):
    values = np.ones((512, 512), np.float32)
    jaxshard.save(tmp_path / "c", {"x": values}, options=FILES)
    for spec in [(), ("a",), (None, "b")]:
        _, report = loaded(tmp_path / "c", {"x": struct_of(values, on(mesh((2, 4)), *spec))})
        assert report.bytes_needed == values.nbytes


class Reads:
    """Counts what is asked of local stores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: Counter[str] = Counter()
        for method in ("read", "read_range", "size", "walk", "entries"):
            monkeypatch.setattr(LocalStore, method, self.counted(method))

    def counted(self, method: str) -> Any:
        real = getattr(LocalStore, method)

        def call(store: LocalStore, key: str = "", *args: Any) -> Any:
            self.names[f"{method} {key}".strip()] += 1
            return real(store, *([key] if key else []), *args)

        return call


def test_open_reads_one_file(large, monkeypatch):
    path, _ = large
    reads = Reads(monkeypatch)
    checkpoint = jaxshard.open(path)
    assert checkpoint.nbytes == 4096 * 4096 * 4
    assert checkpoint.leaves["x"].shape == (4096, 4096)
    assert "4096" in str(checkpoint)
    assert dict(reads.names) == {"read manifest.json": 1}


def test_open_needs_nothing_but_the_manifest(tmp_path):
    jaxshard.save(tmp_path / "c", {"x": jnp.arange(3.0), "n": 7, "s": "text"}, metadata={"k": 1})
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "manifest.json").write_bytes((tmp_path / "c" / "manifest.json").read_bytes())
    checkpoint = jaxshard.open(alone)
    assert checkpoint.leaves["x"].shape == (3,)
    assert checkpoint.metadata == {"k": 1}
    assert (checkpoint["n"].read(), checkpoint["s"].read()) == (7, "text")
    assert jaxshard.load(alone, select="{n,s}") == {"n": 7, "s": "text"}


def test_a_load_lists_nothing_and_reads_manifest_and_table_once(large, monkeypatch):
    path, values = large
    reads = Reads(monkeypatch)
    jaxshard.load(path, {"x": struct_of(values, on(mesh((8,)), "a"))})
    assert not [n for n in reads.names if n.startswith(("walk", "entries"))]
    opened = [n for n in reads.names.elements() if n.startswith("read ")]
    assert [n.rpartition("/")[2] for n in opened] == ["read manifest.json", "p00000.bin"]


@pytest.mark.parametrize("io_mode", ["auto", "memmap", "pread"])
@pytest.mark.parametrize("host_bytes_max", [256 << 20, 8 << 20, 1])
def test_every_way_of_reading_gives_the_same_bits(large, io_mode, host_bytes_max):
    path, values = large
    sharding = on(mesh((4, 2)), "b", "a")
    options = {"io_mode": io_mode, "host_bytes_max": host_bytes_max}
    got, report = loaded(path, {"x": struct_of(values, sharding)}, options=options)
    assert report.bytes_read <= 1.1 * report.bytes_needed
    for shard in got["x"].addressable_shards:
        assert np.array_equal(np.asarray(shard.data), values[shard.index])


def awkward(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape).astype(dtype)


@pytest.mark.parametrize("piece_bytes_max", [64 << 20, 6000])
def test_tiles_are_read_from_where_the_writer_put_them(tmp_path, monkeypatch, piece_bytes_max):
    monkeypatch.setattr("jaxshard._grid.TILE_BYTES", 500)
    shapes = [(), (0, 3), (1,), (7, 5), (100, 103), (64, 48), (31, 8, 9), (24, 16, 24)]
    values = {f"{d}{s}": awkward(d, s) for d in ("int16", "float32", "complex128") for s in shapes}
    options = SaveOptions(pack_below=0, piece_bytes_max=piece_bytes_max)
    saved = {n: jax.device_put(v) if v.dtype != "complex128" else v for n, v in values.items()}
    for name in ("int16(64, 48)", "float32(24, 16, 24)"):
        saved[name] = jax.device_put(values[name], on(mesh((2, 4)), "a", "b"))
    jaxshard.save(tmp_path / "c", saved, options=options)
    monkeypatch.setattr("jaxshard._tensors.read_box", None)  # by TensorStore
    got = jaxshard.load(tmp_path / "c")
    checkpoint = jaxshard.open(tmp_path / "c")
    for name, value in values.items():
        assert np.array_equal(got[name], value), name
        middle = tuple(slice(n // 3, -n // 4) for n in value.shape)
        assert np.array_equal(checkpoint[name].read(middle), value[middle]), name


@pytest.mark.parametrize("piece_bytes_max", [64 << 20, 6000])
def test_files_are_those_that_tensorstore_writes(tmp_path, monkeypatch, piece_bytes_max):
    monkeypatch.setattr("jaxshard._grid.TILE_BYTES", 500)
    shapes = [(), (0, 3), (1,), (7, 5), (100, 103), (64, 48), (31, 8, 9), (24, 16, 24)]
    values = {f"{d}{s}": awkward(d, s) for d in ("int16", "float32", "complex128") for s in shapes}
    values["column"] = awkward("float32", (90, 70)).T
    values["bfloat16"] = jax.device_put(awkward("bfloat16", (66, 40)), on(mesh((2, 4)), "a", "b"))
    values["int4"] = jnp.asarray(awkward("int8", (50, 37)) % 8, jnp.int4)
    options = SaveOptions(pack_below=0, piece_bytes_max=piece_bytes_max)
    found = []
    for straight in (True, False):
        monkeypatch.setattr("jaxshard._piecefile.IS_FAST", straight)
        path = tmp_path / str(straight)
        jaxshard.save(path, values, options=options)
        (data,) = path.glob("a-*/data")
        files = [file for file in data.rglob("*") if file.is_file()]
        found.append({str(file.relative_to(data)): file.read_bytes() for file in files})
    assert len(found[0]) > 40
    assert found[0] == found[1]


def test_tiles_that_another_writer_put_in_another_order_are_found(tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr")
    monkeypatch.setattr("jaxshard._grid.TILE_BYTES", 512)
    value = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    jaxshard.save(tmp_path / "c", {"x": value}, options=SaveOptions(pack_below=0))
    array_dir = next((tmp_path / "c").glob("a-*/data/x"))
    file = array_dir / "c" / "0" / "0"
    before = file.read_bytes()
    zarr.open_array(array_dir, mode="r+")[...] = value
    after = file.read_bytes()
    assert before != after
    assert len(before) == len(after)
    assert np.array_equal(jaxshard.load(tmp_path / "c")["x"], value)
    assert jaxshard.verify(tmp_path / "c").ok


@pytest.mark.parametrize(
    "index",
    [
        np.s_[...],
        np.s_[5],
        np.s_[100:300, 7],
        np.s_[::700, 1000:1010],
        np.s_[4095, 4095],
        np.s_[:0],
    ],
    ids=str,
)
def test_leaf_read_gives_any_part(large, index):
    path, values = large
    got = jaxshard.open(path)["x"].read(index)
    assert got.shape == values[index].shape
    assert np.array_equal(got, values[index])


@pytest.mark.parametrize("options", [PACK, FILES], ids=["pack", "files"])
@pytest.mark.parametrize("seed", range(4))
def test_meshes_with_their_devices_in_any_order(tmp_path, options, seed):
    shuffled = np.random.default_rng(seed).permutation(jax.devices())
    saving = Mesh(shuffled.reshape(2, 4), ("a", "b"))
    loading = Mesh(shuffled[::-1][:6].reshape(3, 2), ("a", "b"))
    value = np.arange(24 * 24, dtype=np.int32).reshape(24, 24)
    specs = [("a", "b"), ("b", "a"), (("b", "a"),), (None, "b"), ()]
    jaxshard.save(
        tmp_path / "c",
        {str(spec): jax.device_put(value, on(saving, *spec)) for spec in specs},
        options=options,
    )
    wanted = {str(spec): struct_of(value, on(loading, *spec)) for spec in specs}
    for like in (wanted, {n: struct_of(value, on(saving)) for n in wanted}):
        for name, got in jaxshard.load(tmp_path / "c", like).items():
            assert_everywhere(got, value, like[name].sharding)
