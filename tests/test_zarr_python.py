"""zarr-python reads every array of a checkpoint, bit for bit, and xarray takes those arrays."""

import importlib.metadata
import json
import math
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xarray
import zarr
from compat import make_v1
from support import bits, mesh, on, run_python
from zarr.dtype import DataTypeValidationError, data_type_registry

import jaxshard
from jaxshard import _dtypes, zarr_dtypes

NAMES = [n for n in _dtypes.names() if _dtypes.stored_dtype(n) == n and not hasattr(np, n)]
OPTIONS = {
    "a tile each": jaxshard.SaveOptions(pack_below=0),
    "many pieces": jaxshard.SaveOptions(pack_below=0, piece_bytes_max=64),
    "compressed": jaxshard.SaveOptions(pack_below=0, piece_bytes_max=64, compression="zstd"),
}


@pytest.fixture(scope="module", params=OPTIONS)
def checkpoint(request, tmp_path_factory):
    """A leaf of every kind, type and placement; every array a Zarr array."""
    path = tmp_path_factory.mktemp("zarr") / "ckpt"
    jaxshard.save(path, make_v1.tree(), options=OPTIONS[request.param])
    return jaxshard.open(path)


@pytest.fixture
def group(checkpoint):
    return zarr.open_group(checkpoint.zarr_root, mode="r")


def arrays(checkpoint):
    """Leaves that have a Zarr array of their own, by its path."""
    return {i.zarr_path: checkpoint[n] for n, i in checkpoint.leaves.items() if i.zarr_path}


# Reading ------------------------------------------------------------------------------------


def test_the_group_has_every_array_of_the_checkpoint_and_no_other(checkpoint, group):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        members = dict(group.members(max_depth=None))
    found = {path for path, member in members.items() if isinstance(member, zarr.Array)}
    assert found == set(arrays(checkpoint))
    assert len(found) > 50


def test_values_are_the_same_bit_for_bit(checkpoint, group):
    dtypes = set()
    for path, leaf in arrays(checkpoint).items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = group[path][...]
        wanted = leaf.read()
        if isinstance(wanted, str | bytes):
            wanted = np.frombuffer(wanted.encode() if isinstance(wanted, str) else wanted, "u1")
        name = wanted.dtype.name
        stored = _dtypes.to_stored(
            wanted, name, checkpoint.leaf_spec(leaf.info.name).layout.per_byte
        )
        assert (found.dtype, found.shape) == (stored.dtype, stored.shape), path
        assert bits(found) == bits(stored), path
        dtypes.add(name)
    assert dtypes >= {*make_v1.NATIVE, *make_v1.EXTENDED}


def test_a_part_of_a_sharded_bfloat16_array_is_read_alone(tmp_path):
    values = np.arange(4096, dtype=np.float32).reshape(64, 64).astype(ml_dtypes.bfloat16)
    import jax

    tree = {"w": jax.device_put(values, on(mesh((2, 4)), "a", "b"))}
    jaxshard.save(tmp_path / "c", tree, options=OPTIONS["a tile each"])
    root = Path(jaxshard.open(tmp_path / "c").zarr_root)
    found = zarr.open_array(root / "w", mode="r")
    assert found.shards is None
    assert found.chunks == (32, 16)
    (root / "w/c/1/3").unlink()
    assert bits(found[:32, 5:9]) == bits(values[:32, 5:9])


def test_packed_leaves_are_not_in_the_group(tmp_path):
    jaxshard.save(tmp_path / "c", {"small": np.zeros(3), "big": np.zeros(1 << 18)})
    checkpoint = jaxshard.open(tmp_path / "c")
    assert sorted(zarr.open_group(checkpoint.zarr_root, mode="r")) == ["big"]
    assert checkpoint.leaves["small"].zarr_path is None


# The data types -----------------------------------------------------------------------------


def test_every_type_that_is_stored_under_its_name_has_a_class():
    classes = [getattr(zarr_dtypes, name) for name in zarr_dtypes.__all__]
    assert sorted(c().to_json(3) for c in classes) == sorted(NAMES)


def test_every_class_is_an_entry_point_under_the_name_of_its_type():
    points = importlib.metadata.entry_points(group="zarr.data_type")
    ours = {p.name: p.load() for p in points if p.value.startswith("jaxshard.")}
    assert ours == {c().to_json(3): c for c in map(zarr_dtypes.__dict__.get, zarr_dtypes.__all__)}


def test_a_zarr_that_loads_entry_points_needs_no_import(tmp_path):
    """What zarr-python means to do, done here in its place."""
    tree = {"w": np.ones(3, ml_dtypes.bfloat16)}
    jaxshard.save(tmp_path / "c", tree, options=OPTIONS["a tile each"])
    root = jaxshard.open(tmp_path / "c").zarr_root
    code = f"""
import zarr
from zarr.dtype import data_type_registry
assert "bfloat16" not in data_type_registry.contents
data_type_registry._lazy_load()
print(zarr.open_group({root!r}, mode="r")["w"][:].tolist())
"""
    assert run_python(code).strip() == "[1.0, 1.0, 1.0]"


def test_the_module_imports_neither_jax_nor_tensorstore():
    code = "import sys, jaxshard.zarr_dtypes; print({'jax', 'tensorstore'} & set(sys.modules))"
    assert run_python(code).strip() == "set()"


def test_a_class_that_zarr_has_of_its_own_is_left_in_place(monkeypatch):
    class Own(zarr_dtypes.BFloat16):
        """Somebody else's."""

    monkeypatch.setitem(data_type_registry.contents, "bfloat16", Own)
    zarr_dtypes._register()
    assert data_type_registry.contents["bfloat16"] is Own


@pytest.mark.parametrize("name", NAMES)
def test_zarr_writes_what_tensorstore_reads(tmp_path, name):
    import tensorstore

    values = make_v1.pattern(name, (5, 7))
    made = zarr.create_array(tmp_path / "a", shape=values.shape, chunks=(2, 7), dtype=values.dtype)
    made[...] = values
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/a"}}
    found = tensorstore.open(spec, read=True).result().read().result()
    assert (found.dtype, bits(found)) == (values.dtype, bits(values))
    assert bits(zarr.open_array(tmp_path / "a", mode="r")[...]) == bits(values)


@pytest.mark.parametrize("name", NAMES)
def test_a_fill_value_keeps_its_bits_in_json(name):
    dtype = np.dtype(name)
    zarr_type = data_type_registry.match_dtype(dtype)
    count = 1 << 8 * dtype.itemsize
    for value in np.arange(count, dtype=f"u{dtype.itemsize}").view(dtype)[:: max(1, count // 512)]:
        text = json.dumps(zarr_type.to_json_scalar(value, zarr_format=3), allow_nan=False)
        back = zarr_type.from_json_scalar(json.loads(text), zarr_format=3)
        assert back.tobytes() == value.tobytes(), text


@pytest.mark.parametrize(
    ("written", "raw"),
    [("NaN", "7fc0"), ("Infinity", "7f80"), ("-Infinity", "ff80"), ("0x7fc1", "7fc1"),
     (1.5, "3fc0"), (-0.0, "8000"), (3, "4040")],
)  # fmt: skip
def test_a_fill_value_is_read_as_the_specification_writes_it(written, raw):
    found = zarr_dtypes.BFloat16().from_json_scalar(written, zarr_format=3)
    assert found.tobytes()[::-1].hex() == raw


@pytest.mark.parametrize("value", ["one", None, [1], 1j])
def test_what_is_no_number_is_no_fill_value(value):
    with pytest.raises(TypeError, match="bfloat16: expected a number, found"):
        zarr_dtypes.BFloat16().cast_scalar(value)


def test_a_missing_chunk_is_the_fill_value(tmp_path):
    made = zarr.create_array(tmp_path / "a", shape=3, dtype="bfloat16", fill_value=math.nan)
    assert np.isnan(made[...].astype(np.float32)).all()


def test_other_types_and_versions_are_refused():
    with pytest.raises(DataTypeValidationError, match="expected bfloat16, found float32"):
        zarr_dtypes.BFloat16.from_native_dtype(np.dtype("float32"))
    with pytest.raises(DataTypeValidationError, match="expected 'bfloat16', found 'float16'"):
        zarr_dtypes.BFloat16.from_json("float16", zarr_format=3)
    with pytest.raises(DataTypeValidationError, match="expected one of Zarr v3"):
        zarr_dtypes.BFloat16.from_json("<V2", zarr_format=2)
    with pytest.raises(ValueError, match="expected Zarr v3, found v2"):
        zarr_dtypes.BFloat16().to_json(2)
    with pytest.raises(ValueError, match="expected little-endian bytes, found big-endian"):
        zarr_dtypes.BFloat16(endianness="big").to_native_dtype()


# Xarray -------------------------------------------------------------------------------------


@pytest.fixture
def flat(tmp_path):
    """The group of a checkpoint without nesting."""
    tree = {"w": np.arange(6.0).reshape(2, 3), "h": np.ones(3, ml_dtypes.bfloat16)}
    jaxshard.save(tmp_path / "c", tree, options=OPTIONS["a tile each"])
    return jaxshard.open(tmp_path / "c").zarr_root


def test_xarray_takes_the_arrays_of_the_group(flat):
    group = zarr.open_group(flat, mode="r")
    data = xarray.Dataset(
        {"w": (("in", "out"), group["w"][...]), "h": xarray.DataArray(group["h"], dims="out")}
    )
    assert data["w"].sum("in").values.tolist() == [3.0, 5.0, 7.0]
    assert data["h"].dtype == ml_dtypes.bfloat16
    assert dict(data.sizes) == {"in": 2, "out": 3}


def test_xarray_opens_the_group(flat):
    data = xarray.open_zarr(flat, consolidated=False)
    assert dict(data.sizes) == {"w.0": 2, "w.1": 3, "h.0": 3}
    assert data["w"].sum("w.0").values.tolist() == [3.0, 5.0, 7.0]
    assert data["h"].dtype == ml_dtypes.bfloat16


def test_xarray_opens_all_groups_as_a_tree(checkpoint):
    tree = xarray.open_datatree(checkpoint.zarr_root, engine="zarr", consolidated=False)
    found = {f"{node.path}/{name}".strip("/") for node in tree.subtree for name in node.data_vars}
    assert found == set(arrays(checkpoint))
