"""The `zarr.json` texts are what TensorStore and zarr-python take for arrays and groups."""

import json

import numpy as np
import pytest
import tensorstore as ts
import zarr

from jaxshard import _dtypes, _zarr
from jaxshard._spec import Layout, LeafSpec

KNOWN_TO_ZARR_PYTHON = ["bool", "int8", "uint8", "int64", "float16", "float32", "float64",
                        "complex64", "complex128"]  # fmt: skip


def leaf(dtype="float32", shape=(8, 6), piece=(4, 6), tile=(2, 3), **more):
    per_byte = more.pop("per_byte", 1)
    layout = Layout("a/w", _dtypes.stored_dtype(dtype), per_byte, shape, piece, tile, packed=False)
    return LeafSpec(name="a/w", kind="array", dtype=dtype, shape=shape, layout=layout, **more)


def metadata(spec, compression=None):
    return _zarr.array_metadata(spec, spec.layout, compression)


def codec_names(codecs):
    return [c["name"] for c in codecs]


def test_a_piece_of_several_tiles_is_a_shard_with_its_index_at_the_end():
    text = metadata(leaf())
    assert text["chunk_grid"]["configuration"]["chunk_shape"] == [4, 6]
    (codec,) = text["codecs"]
    assert codec["name"] == "sharding_indexed"
    inside = codec["configuration"]
    assert inside["chunk_shape"] == [2, 3]
    assert (
        codec_names(inside["codecs"]) == codec_names(inside["index_codecs"]) == ["bytes", "crc32c"]
    )
    assert inside["index_location"] == "end"


def test_a_piece_of_one_tile_is_a_plain_chunk():
    text = metadata(leaf(tile=(4, 6)))
    assert codec_names(text["codecs"]) == ["bytes", "crc32c"]
    assert text["codecs"][0]["configuration"] == {"endian": "little"}


@pytest.mark.parametrize("tile", [(4, 6), (2, 3)])
def test_compression_stands_between_bytes_and_checksum(tile):
    codecs = metadata(leaf(tile=tile), "zstd")["codecs"]
    inner = codecs if tile == (4, 6) else codecs[0]["configuration"]["codecs"]
    assert codec_names(inner) == ["bytes", "zstd", "crc32c"]


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("bool", False), ("int8", 0), ("uint64", 0), ("float32", 0.0), ("bfloat16", 0.0),
     ("float8_e5m2", 0.0), ("complex64", [0.0, 0.0]), ("int4", 0), ("float4_e2m1fn", 0),
     ("float8_e4m3", 0)],
)  # fmt: skip
def test_the_fill_value_is_a_zero_of_the_stored_type(dtype, fill):
    found = metadata(leaf(dtype))["fill_value"]
    assert (found, type(found)) == (fill, type(fill))


def test_attributes_say_how_to_read_elements_that_zarr_does_not_know():
    spec = leaf("int4", (8, 6), array_shape=(8, 11), per_byte=2)
    assert metadata(spec)["attributes"] == {
        "jaxshard": {
            "leaf": "a/w", "kind": "array", "dtype": "int4", "elements_per_byte": 2,
            "shape": [8, 11],
        }
    }  # fmt: skip


def test_attributes_of_keys_name_their_implementation():
    spec = LeafSpec(
        name="rng", kind="key", dtype="uint32", key_impl="rbg", shape=(), array_shape=(4,)
    )
    layout = Layout("rng", "uint32", 1, (4,), (4,), (4,), packed=False)
    attributes = _zarr.array_metadata(spec, layout, None)["attributes"]["jaxshard"]
    assert attributes == {"leaf": "rng", "kind": "key", "dtype": "uint32", "key_impl": "rbg"}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("tile", [(4, 6), (2, 3)])
@pytest.mark.parametrize("dtype", _dtypes.names())
def test_tensorstore_takes_the_metadata_of_every_type(dtype, tile, compression):
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://a/",
        "metadata": metadata(leaf(dtype, tile=tile), compression),
    }
    array = ts.open(spec, create=True, context=ts.Context()).result()
    assert array.shape == (8, 6)
    assert array.chunk_layout.write_chunk.shape == (4, 6)
    assert array.chunk_layout.read_chunk.shape == tile


@pytest.mark.parametrize("shape", [(), (0, 4), (5,)])
def test_tensorstore_takes_odd_shapes(shape):
    cell = tuple(max(1, n) for n in shape)
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://a/",
        "metadata": metadata(leaf("int32", shape, cell, cell)),
    }
    assert ts.open(spec, create=True, context=ts.Context()).result().shape == shape


@pytest.mark.parametrize("tile", [(4, 6), (2, 3)])
@pytest.mark.parametrize("dtype", KNOWN_TO_ZARR_PYTHON)
def test_zarr_python_reads_and_writes_an_array_with_the_metadata(tmp_path, dtype, tile):
    (tmp_path / "zarr.json").write_bytes(_zarr.to_bytes(metadata(leaf(dtype, tile=tile))))
    values = np.arange(48).reshape(8, 6).astype(dtype)
    zarr.open_array(tmp_path, mode="r+")[...] = values
    found = zarr.open_array(tmp_path, mode="r")
    assert found.dtype == np.dtype(dtype)
    assert np.array_equal(found[...], values)
    assert (found.shards or found.chunks) == (4, 6)


def test_a_text_is_the_same_each_time_and_ends_with_a_line_break():
    text = _zarr.to_bytes(metadata(leaf()))
    assert text == _zarr.to_bytes(dict(reversed(metadata(leaf()).items())))
    assert text.endswith(b"}\n")
    assert json.loads(text) == metadata(leaf())


def test_a_pack_is_an_array_of_bytes_without_codecs_that_change_them(tmp_path):
    (tmp_path / "zarr.json").write_bytes(_zarr.to_bytes(_zarr.pack_metadata(64, 2)))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/0").write_bytes(bytes(range(64)))
    (tmp_path / "c/1").write_bytes(bytes(range(64, 128)))
    assert zarr.open_array(tmp_path, mode="r")[...].tolist() == list(range(128))


def test_an_empty_pack_is_an_array_without_elements(tmp_path):
    (tmp_path / "zarr.json").write_bytes(_zarr.to_bytes(_zarr.pack_metadata(0, 0)))
    assert zarr.open_array(tmp_path, mode="r").shape == (0,)


def test_a_group_is_a_group(tmp_path):
    (tmp_path / "zarr.json").write_bytes(_zarr.to_bytes(_zarr.group_metadata()))
    assert list(zarr.open_group(tmp_path, mode="r")) == []


def layouts(*paths):
    return [Layout(path, "int8", 1, (), (), (), packed=False) for path in paths]


@pytest.mark.parametrize(
    ("paths", "groups"),
    [
        ([], [""]),
        (["w"], [""]),
        (["a/b/w", "a/c", "d"], ["", "a", "a/b"]),
        (["%"], [""]),
    ],
)
def test_every_directory_above_an_array_is_a_group(paths, groups):
    assert _zarr.group_paths(layouts(*paths)) == groups


@pytest.mark.parametrize(("position", "key"), [((), "c"), ((0,), "c/0"), ((1, 12, 0), "c/1/12/0")])
def test_a_chunk_has_the_default_key(position, key):
    assert _zarr.chunk_key(position) == key
