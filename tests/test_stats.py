"""`stats` against NumPy and exact fractions: every dtype, any block size, nothing overflows."""

import math
import tracemalloc
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard
from jaxshard import LeafMismatchError, SaveOptions, _dtypes, _stats

NAMES = _dtypes.names()
INTEGERS = [n for n in NAMES if n.lstrip("u").startswith("int")]
FLOATS = [n for n in NAMES if "float" in n]
FILES = SaveOptions(pack_below=0)


def of(tmp_path, value, **save):
    """Statistics of a checkpoint with one leaf."""
    jaxshard.save(tmp_path / "ckpt", {"x": value}, **save)
    (leaf,) = jaxshard.stats(tmp_path / "ckpt").leaves
    return leaf


def any_bits(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of any bits, so that floats have NaNs and infinities of every kind."""
    width = _dtypes.bits(name)
    raw = np.random.default_rng(7).integers(0, 256, (*shape, max(1, width // 8)), np.uint8)
    stored = raw & np.uint8((1 << min(8, width)) - 1)
    if name == "bool":
        return (stored[..., 0] & 1).astype(bool)
    if name in {"int1", "int2", "int4"}:  # in memory they are sign-extended
        return (
            (stored[..., 0] - (1 << (width - 1))).astype(np.int8).astype(_dtypes.numpy_dtype(name))
        )
    return stored.view(_dtypes.numpy_dtype(name)).reshape(shape)


@pytest.mark.parametrize("options", [SaveOptions(), FILES], ids=["packed", "filed"])
@pytest.mark.parametrize("name", [*INTEGERS, "bool"])
def test_integers_are_exact(tmp_path, name, options):
    values = any_bits(name, (37, 11))
    exact = [int(v) for v in values.reshape(-1).tolist()]
    leaf = of(tmp_path, values, options=options)
    assert (leaf.dtype, leaf.shape, leaf.size) == (name, (37, 11), 407)
    assert (leaf.min, leaf.max) == (min(exact), max(exact))
    assert leaf.mean == float(Fraction(sum(exact), len(exact)))
    assert leaf.norm == pytest.approx(math.sqrt(sum(v * v for v in exact)), rel=1e-14)
    assert (leaf.nans, leaf.infs) == (0, 0)


@pytest.mark.parametrize("name", ["int64", "uint64"])
def test_sums_of_the_largest_integers_are_exact(tmp_path, name):
    top = int(np.iinfo(name).max)
    leaf = of(tmp_path, np.array([top] * 1000 + [top - 1], name))
    assert (leaf.min, leaf.max) == (top - 1, top)
    assert leaf.mean == float(Fraction(1001 * top - 1, 1001))


@pytest.mark.parametrize("options", [SaveOptions(), FILES], ids=["packed", "filed"])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_agree_with_numpy_and_what_is_not_finite_is_counted(tmp_path, name, options):
    values = any_bits(name, (64, 33))
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    leaf = of(tmp_path, values, options=options)
    assert (leaf.dtype, leaf.size) == (name, wide.size)
    assert (leaf.nans, leaf.infs) == (np.isnan(wide).sum(), np.isinf(wide).sum())
    assert (leaf.min, leaf.max) == (finite.min(), finite.max())
    exact = [Fraction(v) for v in finite.tolist()]
    size = float(sum(map(abs, exact)) / len(exact))  # large numbers of both signs cancel
    assert leaf.mean == pytest.approx(float(sum(exact) / len(exact)), abs=1e-14 * size)
    square = sum(v * v for v in exact)
    assert Fraction(leaf.norm) ** 2 / square == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex_numbers_are_measured_by_absolute_value(tmp_path, name):
    values = np.array([3 + 4j, 1j, -2, complex(math.nan, 1), complex(1, math.inf)], name)
    leaf = of(tmp_path, values)
    assert (leaf.min, leaf.max, leaf.mean) == (1, 5, (1 + 5j) / 3)
    assert leaf.norm == pytest.approx(math.sqrt(25 + 1 + 4))
    assert (leaf.nans, leaf.infs, leaf.size) == (1, 1, 5)


@pytest.mark.parametrize(
    ("values", "mean", "norm"),
    [
        ([1.5e308, 1.5e308, 1.5e308], 1.5e308, math.inf),
        ([1e308, -1e308], 0.0, math.sqrt(2) * 1e308),
        ([3e200, 4e200], 3.5e200, 5e200),
        ([3e-200, 4e-200], 3.5e-200, 5e-200),
        ([3 * 5e-324, 4 * 5e-324], 4 * 5e-324, 5 * 5e-324),
    ],
)
def test_neither_mean_nor_norm_overflows_or_underflows_on_its_way(tmp_path, values, mean, norm):
    leaf = of(tmp_path, np.array(values))
    assert leaf.mean == pytest.approx(mean, rel=1e-15, abs=0)
    assert leaf.norm == pytest.approx(norm, rel=1e-15, abs=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "uint64", "complex64", "bool"])
def test_blocks_do_not_matter(tmp_path, monkeypatch, dtype):
    values = np.random.default_rng(1).integers(0, 2, (40, 50)).astype(_dtypes.numpy_dtype(dtype))
    whole = of(tmp_path, values, options=FILES)
    monkeypatch.setattr(_stats, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(_stats, "_CHUNK", 7)
    (parts,) = jaxshard.stats(tmp_path / "ckpt").leaves
    assert parts.norm == pytest.approx(whole.norm, rel=1e-14)
    assert parts._replace(norm=0, mean=0) == whole._replace(norm=0, mean=0)
    assert parts.mean == pytest.approx(whole.mean, rel=1e-14)


@pytest.mark.parametrize("values", [np.zeros((0, 3)), np.zeros((2, 0), np.int8)])
def test_nothing_has_no_minimum(tmp_path, values):
    leaf = of(tmp_path, values)
    assert (leaf.size, leaf.min, leaf.max, leaf.mean, leaf.norm) == (0, None, None, None, 0.0)


def test_only_nans_have_no_minimum(tmp_path):
    leaf = of(tmp_path, jnp.full((3,), jnp.nan))
    assert (leaf.min, leaf.max, leaf.mean, leaf.norm, leaf.nans) == (None, None, None, 0.0, 3)
    assert not leaf.finite


def test_python_numbers_are_leaves_of_one_element(tmp_path):
    tree = {"big": 10**400, "flag": True, "rate": 1e-3, "z": 3 + 4j, "lost": math.nan, "n": -3}
    tree["scalar"] = np.float32(0.5)
    jaxshard.save(tmp_path / "ckpt", tree)
    found = {leaf.name: leaf for leaf in jaxshard.stats(tmp_path / "ckpt").leaves}
    assert found["big"].max == 10**400
    assert (found["big"].mean, found["big"].norm) == (math.inf, math.inf)
    assert (found["flag"].min, found["flag"].dtype) == (1, "bool")
    assert (found["rate"].mean, found["rate"].dtype) == (1e-3, "float")
    assert (found["z"].mean, found["z"].max) == (3 + 4j, 5.0)
    assert found["lost"].nans == 1
    assert (found["n"].min, found["n"].norm) == (-3, 3.0)
    assert (found["scalar"].mean, found["scalar"].dtype) == (0.5, "float32")
    assert all(leaf.size == 1 for leaf in found.values())


def test_keys_texts_and_none_are_left_out(tmp_path):
    tree = {"key": jax.random.key(0), "s": "x" * 9000, "b": b"x", "none": None, "w": np.ones(2)}
    jaxshard.save(tmp_path / "ckpt", tree)
    assert [leaf.name for leaf in jaxshard.stats(tmp_path / "ckpt").leaves] == ["w"]


def test_a_shared_array_is_read_once_and_reported_under_each_name(tmp_path):
    shared = jnp.arange(6.0)
    jaxshard.save(tmp_path / "ckpt", {"a": shared, "b": shared})
    report = jaxshard.stats(tmp_path / "ckpt")
    a, b = report.leaves
    assert (a.name, b.name) == ("a", "b")
    assert a[1:] == b[1:]
    assert report.nbytes == 24


def test_select_takes_patterns_and_refuses_dead_ones(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"p": {"w": np.ones(2), "b": np.ones(2)}, "q": np.ones(2)})
    assert [x.name for x in jaxshard.stats(tmp_path / "ckpt", select="p/**").leaves] == [
        "p/b",
        "p/w",
    ]
    with pytest.raises(
        LeafMismatchError, match=r"select 'p' matches no leaf; did you mean 'p/\*\*'"
    ):
        jaxshard.stats(tmp_path / "ckpt", select=["q", "p"])


def test_progress_counts_the_bytes_of_all_that_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_stats, "_BLOCK_BYTES", 1 << 10)
    tree = {"w": np.ones((64, 64), np.float32), "n": 3, "i": np.ones(10, np.int8)}
    jaxshard.save(tmp_path / "ckpt", tree, options=FILES)
    seen: list[tuple[int, int]] = []
    jaxshard.stats(tmp_path / "ckpt", on_progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {64 * 64 * 4 + 10}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1]


def test_damage_is_an_error_that_names_the_leaf(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones(5000)}, options=FILES)
    (file,) = (tmp_path / "ckpt").glob("a-*/data/w/c/0")
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)
    with pytest.raises(jaxshard.CorruptionError, match="leaf 'w'"):
        jaxshard.stats(tmp_path / "ckpt")


def test_memory_is_bounded_inside_one_large_leaf(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones((150, 1 << 20), np.int8)}, options=FILES)
    tracemalloc.start()
    try:
        jaxshard.stats(tmp_path / "ckpt")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_the_text_of_a_report_has_every_leaf(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.array([1.0, np.nan]), "n": 2})
    text = str(jaxshard.stats(tmp_path / "ckpt"))
    assert "w  min 1.0, max 1.0, mean 1.0, norm 1.0, 1 NaN, 0 infinite" in text
    assert "n  min 2, max 2, mean 2.0, norm 2.0" in text
