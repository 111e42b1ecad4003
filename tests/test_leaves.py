"""Promise 1: every kind of leaf comes back bit for bit, with `like` and without.

Leaves are saved in a pack and in files of their own, and loaded with themselves as `like`, with a
`jax.ShapeDtypeStruct` of each, and without `like`.
"""

import itertools
import math
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from support import P, assert_same_leaf, assert_same_tree, bits, mesh, on

import jaxshard
from jaxshard import SaveOptions, _dtypes

# What JAX has on CPU; the 6-bit floats exist in NumPy only.
NUMPY_DTYPES = _dtypes.names()
JAX_DTYPES = [name for name in NUMPY_DTYPES if not name.startswith("float6")]
PACK, FILES = SaveOptions(), SaveOptions(pack_below=0)
KEY_IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


def held(*names: str) -> list[str]:
    """Those of these dtypes that the installed ml_dtypes has: 1-bit ones came with 0.6."""
    return [name for name in names if name in _dtypes.names()]


@pytest.fixture(params=[PACK, FILES], ids=["pack", "files"])
def options(request: pytest.FixtureRequest) -> SaveOptions:
    return request.param


def random_values(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits: among floats that is every kind of NaN, both zeros and subnormals."""
    target = _dtypes.numpy_dtype(dtype)
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, math.prod(shape) * target.itemsize, np.uint8)
    if dtype == "bool":
        raw &= 1
    if _dtypes.bits(dtype) < 8:
        return (raw & ((1 << _dtypes.bits(dtype)) - 1)).view(target).reshape(shape)
    return raw.view(target).reshape(shape)


def is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def abstract(value: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        value.shape,
        value.dtype,
        sharding=value.sharding,
        weak_type=getattr(value, "weak_type", False),
    )


def assert_every_shard(got: jax.Array, want: jax.Array) -> None:
    """Each device holds its own part, replicas too; `np.asarray` would look at one of them only."""
    if is_key(want):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    whole = np.asarray(want)
    assert {s.device for s in got.addressable_shards} == {s.device for s in want.addressable_shards}
    for shard in got.addressable_shards:
        assert bits(shard.data) == bits(whole[shard.index]), shard.device


def assert_info(info: jaxshard.LeafInfo, leaf: Any) -> None:
    """What `open(path).leaves` says is what the leaf was."""
    if isinstance(leaf, jax.Array):
        assert info.kind == ("key" if is_key(leaf) else "array")
        assert info.container == "jax"
        assert info.key_impl == (str(jax.random.key_impl(leaf)) if is_key(leaf) else None)
        assert info.dtype == ("uint32" if is_key(leaf) else leaf.dtype.name)
        assert info.shape == leaf.shape
        assert info.weak_type == getattr(leaf, "weak_type", False)
        assert info.committed == leaf.committed
        assert info.memory_kind == leaf.sharding.memory_kind
        if isinstance(leaf.sharding, NamedSharding):
            assert info.mesh is not None
            assert dict(zip(info.mesh.names, info.mesh.sizes, strict=True)) == dict(
                leaf.sharding.mesh.shape
            )
            assert info.mesh.types == tuple(t.name for t in leaf.sharding.mesh.axis_types)
            assert P(*info.spec) == P(*tuple(leaf.sharding.spec)[: leaf.ndim])
        else:
            assert info.mesh is None
            assert info.spec is None
    elif isinstance(leaf, np.ndarray):
        assert (info.kind, info.container) == ("array", "numpy")
        assert (info.dtype, info.shape) == (leaf.dtype.name, leaf.shape)
    elif isinstance(leaf, np.generic):
        assert (info.kind, info.dtype) == ("numpy_scalar", leaf.dtype.name)
    else:
        assert info.kind == ("none" if leaf is None else type(leaf).__name__)


def assert_round_trips(path: Path, leaves: dict[str, Any], options: SaveOptions = PACK) -> None:
    """Save leaves; load them in every way; look at what the checkpoint says of them."""
    jaxshard.save(path, leaves, options=options)
    assert list(jaxshard.open(path)) == sorted(leaves)
    for name, info in jaxshard.open(path).leaves.items():
        assert info.name == name
        assert_info(info, leaves[name])
    with_like = jaxshard.load(path, leaves)
    assert_same_tree(with_like, leaves)
    structs = {n: abstract(x) if isinstance(x, jax.Array) else x for n, x in leaves.items()}
    with_structs = jaxshard.load(path, structs)
    plain = jaxshard.load(path)
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.Array):
            assert_every_shard(with_like[name], leaf)
            assert_same_leaf(plain[name], leaf if is_key(leaf) else np.asarray(leaf), name,
                             placement=False)  # fmt: skip
            got = with_structs[name]
            assert_same_leaf(got, leaf, name, placement=False)
            assert got.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
            assert got.sharding.memory_kind == leaf.sharding.memory_kind, name
            assert got.committed, name
            assert_every_shard(got, leaf)
        else:
            assert_same_leaf(plain[name], leaf, name)


# Element types ------------------------------------------------------------------------------


def test_every_dtype_of_a_sharded_jax_array_keeps_its_bits(tmp_path, options):
    sharding = on(mesh((2, 2)), "a", "b")
    with jax.enable_x64(True):
        leaves = {
            name: jax.device_put(random_values(name, (4, 24)), sharding) for name in JAX_DTYPES
        }
        assert {name: leaf.dtype.name for name, leaf in leaves.items()} == {
            name: name for name in JAX_DTYPES
        }
        assert_round_trips(tmp_path / "c", leaves, options)


def test_every_dtype_of_a_numpy_array_keeps_its_bits(tmp_path, options):
    leaves = {name: random_values(name, (3, 5)) for name in NUMPY_DTYPES}
    assert_round_trips(tmp_path / "c", leaves, options)


def test_every_dtype_of_a_numpy_scalar_keeps_its_type_and_bits(tmp_path):
    scalars = {name: random_values(name, (1,))[0] for name in NUMPY_DTYPES}
    assert {type(s).__name__ for s in scalars.values()} >= {"float32", "int4", "bfloat16"}
    assert_round_trips(tmp_path / "c", scalars)


def test_numpy_scalars_keep_type_and_value(tmp_path):
    """CASE 38: `np.float32(1.5)` as a leaf."""
    scalars = [np.float32(1.5), np.bool_(True), np.int64(-1), ml_dtypes.bfloat16(-0.0)]
    jaxshard.save(tmp_path / "c", scalars)
    for got in (jaxshard.load(tmp_path / "c"), jaxshard.load(tmp_path / "c", scalars)):
        assert [type(g) for g in got] == [type(s) for s in scalars]
        assert got[:3] == [1.5, True, -1]
        assert math.copysign(1, float(got[3])) == -1


def test_sub_byte_values_compare_equal_after_loading(tmp_path, options):
    """Not only the stored bits: the sign extension that NumPy compares by is right too."""
    dtypes = held("int4", "uint4", "int2", "uint2", "int1", "float4_e2m1fn")
    values = {d: np.arange(-8, 8).astype(_dtypes.numpy_dtype(d)).reshape(2, 8) for d in dtypes}
    tree = {"numpy": values, "jax": jax.tree.map(jax.device_put, values)}
    jaxshard.save(tmp_path / "c", tree, options=options)
    for got in (jaxshard.load(tmp_path / "c"), jaxshard.load(tmp_path / "c", tree)):
        for container, dtype in itertools.product(tree, dtypes):
            numbers = np.asarray(got[container][dtype]).astype(np.float32)
            assert numbers.tolist() == values[dtype].astype(np.float32).tolist(), dtype


PATTERNS = {
    "float16": [0x7E01, 0x7C01, 0xFC00, 0x8000, 0x0001],
    "bfloat16": [0x7FC1, 0x7F81, 0xFF80, 0x8000, 0x0001],
    "float32": [0x7FC12345, 0x7F800001, 0xFFC00000, 0x80000000, 1],
    "float64": [0x7FF8000012345678, 0x7FF0000000000001, 1 << 63, 1],
    "float8_e5m2": [0x7D, 0x7F, 0xFF, 0x80, 0x01],
}


def test_nan_payloads_negative_zeros_and_subnormals_survive(tmp_path, options):
    words = {d: np.array(p, f"u{_dtypes.numpy_dtype(d).itemsize}") for d, p in PATTERNS.items()}
    values = {dtype: word.view(_dtypes.numpy_dtype(dtype)) for dtype, word in words.items()}
    with jax.enable_x64(True):
        arrays = {dtype: jax.device_put(value) for dtype, value in values.items()}
        assert_round_trips(tmp_path / "jax", arrays, options)
        assert_round_trips(tmp_path / "numpy", values, options)
        got = jaxshard.load(tmp_path / "jax", arrays)
        found = {d: np.asarray(x).view(words[d].dtype).tolist() for d, x in got.items()}
    assert found == PATTERNS


# Shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool"])
def test_zero_dimensional_arrays_keep_their_shape(tmp_path, options, dtype):
    value = random_values(dtype, (), seed=3)
    leaves = {
        "one": jax.device_put(value),
        "all": jax.device_put(value, on(mesh((2, 4)))),
        "numpy": value,
    }
    assert_round_trips(tmp_path / "c", leaves, options)


EMPTY = [
    ((0,), ()),
    ((0,), ("a",)),
    ((0, 4), (None, "b")),
    ((0, 4), ("a", "b")),
    ((4, 0), ("a",)),
    ((2, 0, 3), ()),
    ((16, 0), (("a", "b"),)),
]


@pytest.mark.parametrize("dtype", ["float32", "uint2"])
def test_zero_size_arrays_are_saved_and_loaded(tmp_path, options, dtype):
    """CASE 3: also sharded; a LoRA of rank 0."""
    devices = mesh((2, 4))
    leaves = {
        f"{shape} {spec}": jax.device_put(random_values(dtype, shape), on(devices, *spec))
        for shape, spec in EMPTY
    }
    leaves |= {f"{shape}": random_values(dtype, shape) for shape, _ in EMPTY}
    assert_round_trips(tmp_path / "c", leaves, options)


def test_dimensions_of_prime_length(tmp_path, options):
    shapes = [(13, 17), (1, 7919), (26, 68), (100_003,), (13, 2, 20, 11)]
    devices = mesh((2, 2, 2))
    leaves = {}
    for shape in shapes:
        values = random_values("float32", shape)
        axes = [axis if n % 2 == 0 else None for n, axis in zip(shape, "abca", strict=False)]
        leaves[f"{shape}"] = jax.device_put(values, jax.devices()[0])
        leaves[f"{shape} sharded"] = jax.device_put(values, on(devices, *axes))
    assert_round_trips(tmp_path / "c", leaves, options)


def test_a_prime_matrix_of_several_tiles(tmp_path):
    """4 MiB, so that neither tiles nor pieces divide it."""
    values = random_values("float32", (5003, 211))
    assert_round_trips(tmp_path / "c", {"x": jax.device_put(values, jax.devices()[1])})
    assert jaxshard.open(tmp_path / "c").leaves["x"].tile_shape != values.shape


# Placement ----------------------------------------------------------------------------------


def test_weak_types_stay_weak(tmp_path, options):
    """CASE 36: a strong scalar would change the dtype of the first resumed step."""
    devices = mesh((2, 4))
    leaves = {
        "float": jnp.asarray(1.5),
        "int": jnp.asarray(3) * 1,
        "complex": jnp.asarray(1 + 2j),
        "vector": jax.jit(lambda: jnp.broadcast_to(1.0, (8,)))(),
        "replicated": jax.device_put(jnp.asarray(1.5), on(devices)),
        "sharded": jax.device_put(jnp.full((8, 2), 2.0), on(devices, "b")),
        "empty": jax.device_put(jnp.full((0,), 2), jax.devices()[2]),
    }
    assert all(leaf.weak_type for leaf in leaves.values())
    assert_round_trips(tmp_path / "c", leaves, options)
    got = jaxshard.load(tmp_path / "c", leaves)
    assert (got["float"] * jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16
    assert (got["int"] * jnp.ones((), jnp.int8)).dtype == jnp.int8


def test_a_loaded_state_does_not_make_the_step_compile_again(tmp_path):
    traces = []

    @jax.jit
    def step(scale, x):
        traces.append(1)
        return scale * x

    state = {"scale": jnp.asarray(0.5), "x": jnp.ones(8, jnp.bfloat16)}
    step(**state)
    jaxshard.save(tmp_path / "c", state)
    step(**jaxshard.load(tmp_path / "c", state))
    assert len(traces) == 1


def test_committedness_is_recorded_and_follows_like(tmp_path, options):
    free = jnp.arange(6.0)
    bound = jax.device_put(free, jax.devices()[0])
    assert (free.committed, bound.committed) == (False, True)
    leaves = {"free": free, "bound": bound}
    assert_round_trips(tmp_path / "c", leaves, options)
    swapped = jaxshard.load(tmp_path / "c", {"free": bound, "bound": free})
    assert (swapped["free"].committed, swapped["bound"].committed) == (True, False)


def test_an_uncommitted_loaded_array_still_moves_to_where_it_is_used(tmp_path):
    jaxshard.save(tmp_path / "c", {"x": jnp.arange(8.0)})
    loaded = jaxshard.load(tmp_path / "c", {"x": jnp.zeros(8)})["x"]
    other = jax.device_put(jnp.ones(8), jax.devices()[5])
    assert (loaded + other).devices() == {jax.devices()[5]}


def test_a_struct_without_sharding_gives_what_was_saved_uncommitted_back_so(tmp_path):
    free = jnp.arange(6.0)
    jaxshard.save(tmp_path / "c", [free, jax.device_put(free, jax.devices()[0])])
    struct = jax.ShapeDtypeStruct((6,), jnp.float32)
    got = jaxshard.load(tmp_path / "c", [struct, struct])
    assert [leaf.committed for leaf in got] == [False, True]
    assert [leaf.devices() for leaf in got] == [{jax.devices()[0]}] * 2


SPECS = [
    (),
    ("a",),
    (None, "b"),
    ("c", "a"),
    (("a", "b"),),
    (("b", "a"), "c"),
    ("c", ("b", "a")),
    (("a", "b", "c"),),
    (None, ("c", "a"), "b"),
    (None, None, "c"),
    ("b", None, ("c", "a")),
]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_every_named_sharding_comes_back(tmp_path, options, axis_type):
    devices = mesh((2, 2, 2), axis_types=(axis_type,) * 3)
    leaves = {
        f"{spec}": jax.device_put(random_values("float32", (8, 16, 4), seed), on(devices, *spec))
        for seed, spec in enumerate(SPECS)
    }
    assert_round_trips(tmp_path / "c", leaves, options)
    for name, got in jaxshard.load(tmp_path / "c", leaves).items():
        assert got.sharding == leaves[name].sharding, name
        assert got.aval.sharding == leaves[name].aval.sharding, name  # what Explicit code sees


def test_axes_of_both_types_in_one_mesh(tmp_path, options):
    devices = mesh((2, 4), axis_types=(AxisType.Explicit, AxisType.Auto))
    leaf = jax.device_put(random_values("bfloat16", (4, 8)), on(devices, "a", "b"))
    assert_round_trips(tmp_path / "c", {"x": leaf}, options)


def test_meshes_of_some_devices_in_any_order(tmp_path, options):
    orders = ["2367", "76543210", "5", "02461357"]
    leaves = {}
    for seed, order in enumerate(orders):
        devices = Mesh(np.array([jax.devices()[int(n)] for n in order]), ("a",))
        leaves[order] = jax.device_put(random_values("float32", (16, 3), seed), on(devices, "a"))
    assert_round_trips(tmp_path / "c", leaves, options)


def test_single_devices(tmp_path, options):
    leaves = {
        str(n): jax.device_put(random_values("int16", (5, 3), n), SingleDeviceSharding(device))
        for n, device in enumerate(jax.devices())
        if n in {0, 3, 7}
    }
    assert_round_trips(tmp_path / "c", leaves, options)
    got = jaxshard.load(tmp_path / "c", leaves)
    assert {name: leaf.devices() for name, leaf in got.items()} == {
        name: {jax.devices()[int(name)]} for name in leaves
    }


def test_memory_kinds_come_back(tmp_path, options):
    """CASE 6: optimizer state in pinned_host beside parameters on the device."""
    values = random_values("float32", (8, 4))
    leaves = {}
    for kind in ("device", "pinned_host", "unpinned_host"):
        single = SingleDeviceSharding(jax.devices()[3], memory_kind=kind)
        sharded = on(mesh((2, 4)), "a", "b", memory_kind=kind)
        leaves[f"{kind} single"] = jax.device_put(values, single)
        leaves[f"{kind} sharded"] = jax.device_put(values, sharded)
        leaves[f"{kind} int4"] = jax.device_put(random_values("int4", (4, 3)), single)
    assert_round_trips(tmp_path / "c", leaves, options)


# Keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", KEY_IMPLS)
def test_typed_keys_of_every_shape_and_sharding(tmp_path, options, impl):
    words = jax.random.key_data(jax.random.key(0, impl=impl)).size
    batch = jax.random.wrap_key_data(random_values("uint32", (4, 8, words)), impl=impl)
    leaves = {"one": jax.random.key(42, impl=impl), "batch": batch, "empty": batch[:, :0]}
    for spec in [("a",), (None, "b"), ("a", "b"), ()]:
        leaves[f"{spec}"] = jax.device_put(batch, on(mesh((2, 4)), *spec))
    assert_round_trips(tmp_path / "c", leaves, options)


@pytest.mark.parametrize("impl", KEY_IMPLS)
def test_a_loaded_key_draws_the_same_numbers(tmp_path, impl):
    key = jax.random.key(3, impl=impl)
    jaxshard.save(tmp_path / "c", key)
    for got in (jaxshard.load(tmp_path / "c"), jaxshard.load(tmp_path / "c", key)):
        assert bits(jax.random.bits(got, (5,))) == bits(jax.random.bits(key, (5,)))


def test_a_key_loads_by_its_own_implementation_whatever_the_default_is(tmp_path):
    key = jax.random.key(3, impl="threefry2x32")
    jaxshard.save(tmp_path / "c", key)
    with jax.default_prng_impl("rbg"):
        assert_same_leaf(jaxshard.load(tmp_path / "c"), key)
        assert_same_leaf(jaxshard.load(tmp_path / "c", key), key)


def test_raw_keys_are_arrays_of_uint32(tmp_path, options):
    leaves = {impl: jax.random.PRNGKey(5, impl=impl) for impl in KEY_IMPLS}
    assert {leaf.dtype.name for leaf in leaves.values()} == {"uint32"}
    assert_round_trips(tmp_path / "c", leaves, options)


# NumPy --------------------------------------------------------------------------------------

BASE = np.arange(60, dtype=np.int32).reshape(5, 12)
VIEWS = {
    "strided": BASE[::2, 1::3],
    "reversed": BASE[::-1, ::-1],
    "transposed": BASE.T,
    "fortran": np.asfortranarray(BASE),
    "broadcast": np.broadcast_to(np.float32(2.5), (3, 4)),
    "rows": np.broadcast_to(BASE[0], (3, 12)),
    "big-endian": BASE.astype(">i4"),
    "big-endian-strided": BASE.astype(">f8")[:, ::5],
    "big-endian-complex": BASE.astype(">c16").T,
    "big-endian-0d": np.array(7.5, ">f2"),
    "int4-strided": random_values("int4", (4, 9))[:, ::2],
    "uint2-transposed": random_values("uint2", (7, 5)).T,
}


def test_numpy_arrays_of_any_memory_order_and_byte_order(tmp_path, options):
    assert_round_trips(tmp_path / "c", VIEWS, options)
    for name, got in jaxshard.load(tmp_path / "c").items():
        assert np.array_equal(got, VIEWS[name]), name


def test_a_memory_mapped_array_comes_back_as_an_array(tmp_path, options):
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(6, 7))
    mapped[...] = random_values("float32", (6, 7))
    jaxshard.save(tmp_path / "c", {"x": mapped}, options=options)
    for got in (jaxshard.load(tmp_path / "c"), jaxshard.load(tmp_path / "c", {"x": mapped})):
        assert type(got["x"]) is np.ndarray
        assert_same_leaf(got["x"], np.array(mapped))


def test_a_read_only_array_is_saved_and_left_alone(tmp_path, options):
    leaf = random_values("float32", (6, 7))
    leaf.flags.writeable = False
    assert_round_trips(tmp_path / "c", {"x": leaf}, options)
    assert not leaf.flags.writeable


def test_loaded_numpy_arrays_can_be_changed_and_share_no_memory(tmp_path, options):
    tree = {name: random_values("float32", (16,), seed) for seed, name in enumerate("abc")}
    jaxshard.save(tmp_path / "c", tree, options=options)
    for got in (jaxshard.load(tmp_path / "c"), jaxshard.load(tmp_path / "c", tree)):
        for a, b in itertools.combinations(got.values(), 2):
            assert not np.shares_memory(a, b)
        for leaf in got.values():
            leaf.view(np.uint32)[...] += 1
    assert_same_tree(jaxshard.load(tmp_path / "c"), tree)


def test_the_container_follows_like(tmp_path, options):
    """NumPy onto JAX and JAX onto NumPy; the values are the same."""
    values = random_values("float32", (4, 8))
    tree = {"jax": jax.device_put(values, on(mesh((2, 4)), "a", "b")), "numpy": values}
    jaxshard.save(tmp_path / "c", tree, options=options)
    swapped = {"jax": tree["numpy"], "numpy": tree["jax"]}
    assert_same_tree(jaxshard.load(tmp_path / "c", swapped), swapped)


# Python values ------------------------------------------------------------------------------


def float_of(pattern: int) -> float:
    return struct.unpack(">d", pattern.to_bytes(8, "big"))[0]


PYTHON_VALUES = {
    "true": True,
    "false": False,
    "zero": 0,
    "minus-one": -1,
    "2^63": 2**63,
    "2^70": 2**70,
    "-2^70": -(2**70),
    "10^5000": 10**5000,
    "float": 0.1,
    "minus-zero": -0.0,
    "inf": math.inf,
    "minus-inf": -math.inf,
    "nan": math.nan,
    "nan-payload": float_of(0x7FF8000012345678),
    "negative-nan": float_of(0xFFF8000000000001),
    "subnormal": 5e-324,
    "complex": 1 - 2j,
    "complex-nan": complex(math.nan, -0.0),
    "complex-zeros": complex(-0.0, -0.0),
    "str": "hello",
    "str-empty": "",
    "str-unicode": 'ü€𝄞\0\n/%\\"',
    "str-surrogate": "a\ud800b",
    "str-4096": "x" * 4096,
    "str-4097": "x" * 4097,
    "str-long": "ü€" * 50_000,
    "str-long-surrogate": "\udc80" * 5000,
    "bytes": b"\x00\xff",
    "bytes-empty": b"",
    "bytes-4096": b"\xfe" * 4096,
    "bytes-4097": b"\xfe" * 4097,
    "bytes-long": bytes(range(256)) * 400,
    "none": None,
}


def test_python_values_keep_type_and_bits(tmp_path, options):
    assert_round_trips(tmp_path / "c", PYTHON_VALUES, options)
    checkpoint = jaxshard.open(tmp_path / "c")
    for name, value in PYTHON_VALUES.items():
        assert_same_leaf(checkpoint[name].read(), value, name)


def test_values_come_from_the_checkpoint_and_not_from_like(tmp_path):
    jaxshard.save(tmp_path / "c", {"n": 3, "s": "saved", "b": True, "f": 1.5, "z": np.int8(4)})
    like = {"n": 0, "s": "", "b": False, "f": 0.0, "z": np.int8(0)}
    assert jaxshard.load(tmp_path / "c", like) == {
        "n": 3, "s": "saved", "b": True, "f": 1.5, "z": 4,
    }  # fmt: skip


@pytest.mark.parametrize("tree", [{}, [], (), {"a": {}}, [[], ()], {"a": [{}, None]}, ({},)])
def test_empty_containers_keep_their_type(tmp_path, tree):
    jaxshard.save(tmp_path / "c", tree)
    for got in (jaxshard.load(tmp_path / "c"), jaxshard.load(tmp_path / "c", tree)):
        assert type(got) is type(tree)
        assert got == tree


# Sub-byte types over devices ----------------------------------------------------------------


def test_sub_byte_boxes_on_and_off_byte_edges(tmp_path, options):
    """On a byte edge elements are packed; a last axis of 8 times an odd number is not on one."""
    leaves = {
        f"{dtype} {n}": jax.device_put(random_values(dtype, (3, 4 * n)), on(mesh((4,)), None, "a"))
        for dtype in held("int4", "uint4", "int2", "uint2", "int1", "uint1")
        for n in (1, 3, 4, 5, 6, 8)
    }
    assert_round_trips(tmp_path / "c", leaves, options)


def test_sub_byte_arrays_load_onto_boxes_that_cut_bytes(tmp_path, options):
    """Saved whole, so packed; loaded in parts of any width, and the other way round."""
    cases = list(itertools.product(held("int4", "uint2", "uint1", "float4_e2m1fn"), [1, 7, 9, 40]))
    values = {f"{dtype} {n}": random_values(dtype, (8, n * 8)) for dtype, n in cases}
    sharding = on(mesh((8,)), None, "a")
    one = {name: jax.device_put(value) for name, value in values.items()}
    many = {name: jax.device_put(value, sharding) for name, value in values.items()}
    jaxshard.save(tmp_path / "c", {"one": one, "many": many}, options=options)
    like = {"one": many, "many": one}
    got = jaxshard.load(tmp_path / "c", like)
    assert_same_tree(got, like)
    for name, leaf in got["one"].items():
        assert_every_shard(leaf, many[name])


def test_sub_byte_rows_of_odd_length(tmp_path, options):
    shapes = [(7,), (3, 5), (3, 1), (2, 3, 11)]
    leaves = {
        f"{dtype} {shape}": random_values(dtype, shape)
        for dtype, shape in itertools.product(held("int4", "uint2", "uint1"), shapes)
    }
    assert_round_trips(tmp_path / "c", leaves, options)


def test_leaf_read_cuts_sub_byte_arrays_anywhere(tmp_path, options):
    values = random_values("int4", (5, 13))
    jaxshard.save(tmp_path / "c", {"x": values}, options=options)
    leaf = jaxshard.open(tmp_path / "c")["x"]
    for index in (np.s_[:, 3:6], np.s_[2, 1:], np.s_[..., ::3], np.s_[1:2, 4], np.s_[:, 5:5]):
        assert_same_leaf(leaf.read(index), np.asarray(values[index]), str(index))


# The same array twice -----------------------------------------------------------------------


def shared_trees() -> dict[str, Any]:
    array = jax.device_put(random_values("float32", (8, 16)), on(mesh((2, 4)), "a", "b"))
    return {
        "jax": array,
        "key": jax.random.split(jax.random.key(0), 4),
        "numpy": random_values("float32", (8, 16)),
    }


@pytest.mark.parametrize("kind", ["jax", "key", "numpy"])
def test_the_same_array_twice_is_stored_once_and_shared_again(tmp_path, options, kind):
    leaf = shared_trees()[kind]
    tree = {"a": leaf, "b": {"c": [leaf, leaf]}}
    report = jaxshard.save(tmp_path / "c", tree, options=options)
    checkpoint = jaxshard.open(tmp_path / "c")
    assert report.nbytes == checkpoint.nbytes == checkpoint.leaves["a"].nbytes
    assert [checkpoint.leaves[n].same_as for n in ("a", "b/c/0", "b/c/1")] == [None, "a", "a"]
    for got in (jaxshard.load(tmp_path / "c"), jaxshard.load(tmp_path / "c", tree)):
        assert got["a"] is got["b"]["c"][0]
        assert got["a"] is got["b"]["c"][1]
        assert bits(got["a"]) == bits(leaf)


def test_equal_arrays_that_are_not_the_same_stay_apart(tmp_path, options):
    tree = {"a": jnp.ones(5), "b": jnp.ones(5)}
    jaxshard.save(tmp_path / "c", tree, options=options)
    got = jaxshard.load(tmp_path / "c", tree)
    assert got["a"] is not got["b"]
    assert jaxshard.open(tmp_path / "c").leaves["b"].same_as is None


def test_a_shared_array_loads_onto_two_placements(tmp_path, options):
    leaf = shared_trees()["jax"]
    jaxshard.save(tmp_path / "c", {"a": leaf, "b": leaf}, options=options)
    like = {"a": jax.device_put(leaf, on(mesh((8,)), "a")), "b": np.asarray(leaf)}
    assert_same_tree(jaxshard.load(tmp_path / "c", like), like)


def test_two_saved_arrays_do_not_become_one_because_like_shares(tmp_path, options):
    saved = {"a": jnp.arange(4.0), "b": -jnp.arange(4.0)}
    jaxshard.save(tmp_path / "c", saved, options=options)
    zeros = jnp.zeros(4)
    assert_same_tree(jaxshard.load(tmp_path / "c", {"a": zeros, "b": zeros}), saved)


def test_a_shared_array_is_read_alone_by_its_second_name(tmp_path, options):
    leaf = shared_trees()["jax"]
    jaxshard.save(tmp_path / "c", {"a": leaf, "b": leaf}, options=options)
    got = jaxshard.load(tmp_path / "c", select="b")
    assert list(got) == ["b"]
    assert bits(got["b"]) == bits(leaf)
    assert bits(jaxshard.open(tmp_path / "c")["b"].read()) == bits(leaf)
