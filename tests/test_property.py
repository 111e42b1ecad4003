"""Any tree, saved from any mesh in any layout, comes back on any other mesh bit for bit."""

import collections
import dataclasses
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from covering import covers_exactly_once
from hypothesis import HealthCheck, given, settings
from support import assert_same_leaf, bits, mesh, on, run_python

import jaxshard
from jaxshard import _dtypes, _saving
from jaxshard._boxes import Box
from jaxshard._plan import tile_lattice
from jaxshard._store import open_store

MESHES = [(1,), (2,), (3,), (5,), (8,), (2, 4), (4, 2), (3, 2), (2, 2, 2)]
Point = collections.namedtuple("Point", ["x", "y"])  # noqa: PYI024
numbers = itertools.count()


def of_jax() -> set[str]:
    """Element types that a jax.Array can have here."""
    found = set()
    for name in _dtypes.names():
        zeros = np.zeros(8, _dtypes.numpy_dtype(name))
        try:
            if jax.device_put(zeros).dtype == zeros.dtype:
                found.add(name)
        except (TypeError, RuntimeError):  # 64-bit types are cut, 6-bit ones unknown
            pass
    return found


OF_JAX = of_jax()


# Trees as plans: what to save, and onto what to load -----------------------------------------


@dataclasses.dataclass(frozen=True)
class Array:
    """An array to be; `source` and `target` are (mesh, spec), or None for NumPy."""

    dtype: str
    shape: tuple[int, ...]
    source: Any
    target: Any
    seed: int

    def values(self) -> np.ndarray:
        """Arbitrary bits."""
        dtype, width = _dtypes.numpy_dtype(self.dtype), _dtypes.bits(self.dtype)
        rng = np.random.default_rng(self.seed)
        raw = rng.integers(0, 256, (*self.shape, dtype.itemsize), np.uint8)
        if self.dtype == "bool":
            raw &= 1
        elif width < 8:
            raw &= np.uint8((1 << width) - 1)
            if self.dtype.startswith("int"):  # kept sign-extended in memory
                raw = np.where(raw >> (width - 1), raw | np.uint8(256 - (1 << width)), raw)
        return np.ascontiguousarray(raw).view(dtype).reshape(self.shape)

    def placed(self, where: Any) -> Any:
        """The values in NumPy or on a mesh."""
        return self.values() if where is None else jax.device_put(self.values(), sharding(where))

    def like(self) -> Any:
        """What says where to load it."""
        if self.target is None:
            return np.zeros(self.shape, _dtypes.numpy_dtype(self.dtype))
        dtype = _dtypes.numpy_dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding(self.target))


def sharding(where):
    return on(mesh(MESHES[where[0]]), *where[1])


def build(tree, leaf):
    """The tree with `leaf` applied to its arrays; `jax.tree.map` refuses keys of mixed types."""
    if isinstance(tree, Array):
        return leaf(tree)
    if isinstance(tree, dict):
        return {key: build(value, leaf) for key, value in tree.items()}
    if isinstance(tree, Point):
        return Point(*(build(value, leaf) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(build(value, leaf) for value in tree)
    return tree


def assert_same(got, want, *, placed):
    """The same containers and leaves; named tuples by field names if `placed` is false."""
    if isinstance(want, dict):
        assert sorted(map(repr, got)) == sorted(map(repr, want))
        for key in want:
            assert_same(got[key], want[key], placed=placed)
    elif isinstance(want, list | tuple):
        fields = getattr(want, "_fields", None)
        if placed or fields is None:
            assert type(got) is type(want)
        assert getattr(got, "_fields", None) == fields
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b, placed=placed)
    elif placed:
        assert_same_leaf(got, want)
    elif isinstance(want, np.ndarray):
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape, bits(got)) == (want.dtype, want.shape, bits(want))
    else:
        assert_same_leaf(got, want)


@st.composite
def placements(draw, rank):
    """(mesh, spec) and into how many parts it cuts each axis."""
    which = draw(st.integers(0, len(MESHES) - 1))
    spec: list[tuple[str, ...]] = [()] * rank
    parts = [1] * rank
    for axis, size in zip("abc", MESHES[which], strict=False):
        at = draw(st.integers(-1, rank - 1))
        if at >= 0:
            spec[at] += (axis,)
            parts[at] *= size
    return (which, tuple(axes or None for axes in spec)), parts


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(_dtypes.names()))
    rank = draw(st.integers(0, 4))
    source, cut = draw(placements(rank))
    target, wanted = draw(placements(rank))
    side = st.sampled_from([0, 1, 1, 2, 3, 5, 7, 11] if rank <= 2 else [1, 1, 2, 3])
    shape = tuple(draw(side) * math.lcm(a, b) for a, b in zip(cut, wanted, strict=True))
    if dtype not in OF_JAX or draw(st.integers(0, 3)) == 0:
        source = None
    if dtype not in OF_JAX or draw(st.integers(0, 3)) == 0:
        target = None
    return Array(dtype, shape, source, target, draw(st.integers(0, 99)))


values = st.one_of(
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(["x" * 5000, b"\xff" * 5000]),
)
keys = st.one_of(
    st.sampled_from(["w", "W", "kernel", "a/b", "a.b", "", "é", "1", "__x", "zarr.json"]),
    st.integers(-1, 10),
    st.none(),
    st.booleans(),
    st.tuples(st.integers(0, 2), st.text(max_size=1)),
)
trees = st.recursive(
    arrays() | arrays() | values,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
    ),
    max_leaves=6,
)
save_options = st.builds(
    jaxshard.SaveOptions,
    pack_below=st.sampled_from([0, 100, 1 << 20, 1 << 40]),
    piece_bytes_max=st.sampled_from([1, 64, 500, 64 << 20]),
    compression=st.sampled_from([None, None, "zstd"]),
    host_bytes_max=st.sampled_from([None, 1, 1000, 1 << 20]),
    snapshot=st.sampled_from(["auto", "copy"]),
)
load_options = st.builds(
    jaxshard.LoadOptions,
    host_bytes_max=st.sampled_from([1, 100, 4000, 1 << 20, 256 << 20]),
    io_mode=st.sampled_from(["auto", "memmap", "pread"]),
    donatable=st.booleans(),
)


def keep_few_pieces(tree, options):
    """A budget of one byte for a file would make thousands of them."""
    found: list[Array] = []
    build(tree, found.append)
    largest = max((a.values().nbytes for a in found), default=0)
    if largest > 300 * options.piece_bytes_max:
        return dataclasses.replace(options, piece_bytes_max=max(1, largest // 100))
    return options


# Promises -----------------------------------------------------------------------------------


def check_there_and_back(tree, save, load, asynchronous, in_memory):
    source = build(tree, lambda a: a.placed(a.source))
    with tempfile.TemporaryDirectory() as directory:
        local = str(Path(directory) / "ckpt")
        path = f"memory://property/{next(numbers)}" if in_memory else local
        if asynchronous:
            jaxshard.save_async(path, source, options=save).wait()
        else:
            jaxshard.save(path, source, options=save)
        report = jaxshard.verify(path)
        assert report.ok, report
        assert report.leftovers == ()
        got = jaxshard.load(path, build(tree, Array.like), options=load)
        assert_same(got, build(tree, lambda a: a.placed(a.target)), placed=True)
        assert_same(jaxshard.load(path), build(tree, Array.values), placed=False)
        if in_memory:
            open_store(path).remove_tree("")


def check_plan(tree, options):
    source = build(tree, lambda a: a.placed(a.source))
    job = _saving.prepare(
        open_store(f"memory://property/{next(numbers)}"),
        source,
        metadata=None,
        overwrite=False,
        options=options,
    )
    for number, leaf in enumerate(job.tree.leaves):
        boxes = [p.box for p in job.plan.each_piece(job.tree.leaves) if p.leaf == number]
        tiles = job.plan.entries["tile"][job.plan.entries["leaf"] == number].tolist()
        if leaf.layout is None:
            assert not boxes
            assert not tiles
        else:
            boxes += [tile_lattice(leaf.layout).box(tile) for tile in tiles]
            assert covers_exactly_once(boxes, Box.whole(leaf.layout.shape))


def check_parts(array, options, data):
    """Any basic index of any leaf is what NumPy gives."""
    path = f"memory://property/{next(numbers)}"
    jaxshard.save(path, array.placed(array.source), options=options)
    leaf = jaxshard.open(path)[""]
    wanted = array.values()
    for _ in range(3):
        index = []
        for n in array.shape[: data.draw(st.integers(0, len(array.shape)))]:
            a, b = data.draw(st.integers(-n - 1, n + 1)), data.draw(st.integers(-n - 1, n + 1))
            step = data.draw(st.integers(1, 3))
            index.append(
                data.draw(st.integers(-n, n - 1)) if n and step == 3 else slice(a, b, step)
            )
        got, want = leaf.read(tuple(index)), wanted[tuple(index)]
        assert (got.dtype, got.shape, bits(got)) == (want.dtype, want.shape, bits(want)), index
    open_store(path).remove_tree("")


def bounded(examples):
    return settings(
        derandomize=True,
        deadline=None,
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


FORMS = [pytest.param(60, id="short"), pytest.param(1000, id="long", marks=pytest.mark.soak)]


@pytest.mark.parametrize("examples", FORMS)
def test_any_tree_from_any_mesh_onto_any_mesh_is_bitwise_the_same(examples):
    @bounded(examples)
    @given(trees, save_options, load_options, st.booleans(), st.booleans())
    def prove(tree, save, load, asynchronous, in_memory):
        check_there_and_back(tree, keep_few_pieces(tree, save), load, asynchronous, in_memory)

    prove()


@pytest.mark.parametrize("examples", FORMS)
def test_the_plan_of_any_tree_covers_every_byte_once(examples):
    @bounded(examples)
    @given(trees, save_options)
    def prove(tree, save):
        check_plan(tree, keep_few_pieces(tree, save))

    prove()


@pytest.mark.parametrize("examples", FORMS)
def test_any_part_of_any_array_is_what_numpy_gives(examples):
    @bounded(examples)
    @given(arrays(), save_options, st.data())
    def prove(array, save, data):
        check_parts(array, keep_few_pieces(array, save), data)

    prove()


def test_a_budget_below_what_is_to_be_copied_never_stalls():
    # Found by the long form: snapshot and writer waited for each other, for ever.
    code = """
import itertools
import jax.numpy as jnp, numpy as np, jaxshard
tree = {"numpy": [np.zeros(100)] * 4, "int4": [jnp.zeros(999, jnp.int4) for _ in range(4)]}
cases = itertools.product([0, 1 << 20], [1, 1000, 1700, 5000], ["auto", "copy"])
for number, (pack_below, host_bytes_max, snapshot) in enumerate(cases):
    options = jaxshard.SaveOptions(
        pack_below=pack_below, host_bytes_max=host_bytes_max, snapshot=snapshot
    )
    jaxshard.save_async(f"memory://{number}", tree, options=options).wait()
    assert jaxshard.verify(f"memory://{number}").ok
print("done", number + 1)
"""
    assert run_python(code, timeout_s=60).strip() == "done 16"
