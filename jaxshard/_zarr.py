"""Zarr v3 metadata of leaves, groups and packs: the text of every `zarr.json`.

The texts follow from the manifest alone, so that no reader needs them; they are there for other
readers of Zarr. Pure.

Source: Zarr core specification v3, and its `sharding_indexed` and `crc32c` codecs.
Format: docs/format.md, "Arrays".
"""

import json
from typing import Any

from jaxshard._keypaths import ROOT_PATH
from jaxshard._spec import Layout, LeafSpec

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C = {"name": "crc32c"}


def array_metadata(leaf: LeafSpec, layout: Layout, compression: str | None) -> dict[str, Any]:
    """`zarr.json` of a leaf whose pieces are files."""
    inner: list[dict[str, Any]] = [_BYTES]
    if compression == "zstd":
        inner.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
    inner.append(_CRC32C)
    codecs = inner
    if layout.tile != layout.piece:
        codecs = [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(layout.tile),
                    "codecs": inner,
                    "index_codecs": [_BYTES, _CRC32C],
                    "index_location": "end",
                },
            }
        ]
    attributes: dict[str, Any] = {"leaf": leaf.name, "kind": leaf.kind, "dtype": leaf.dtype}
    if layout.dtype != leaf.dtype:
        attributes["elements_per_byte"] = layout.per_byte
        attributes["shape"] = list(leaf.array_shape or ())
    if leaf.key_impl is not None:
        attributes["key_impl"] = leaf.key_impl
    metadata = _array(layout.shape, layout.dtype, layout.piece, codecs, {"jaxshard": attributes})
    # xarray opens nothing without them, and no group where one name has two sizes.
    component = layout.path.rpartition("/")[2]
    metadata["dimension_names"] = [f"{component}.{axis}" for axis in range(len(layout.shape))]
    return metadata


def pack_metadata(segment_bytes: int, segments: int) -> dict[str, Any]:
    """`zarr.json` of the pack of one process: one axis of bytes, no codec that changes them."""
    return _array(
        (segment_bytes * segments,), "uint8", (max(1, segment_bytes),), [_BYTES], {"jaxshard": {}}
    )


def group_metadata() -> dict[str, Any]:
    """`zarr.json` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def to_bytes(metadata: dict[str, Any]) -> bytes:
    """Text of a `zarr.json`."""
    return json.dumps(metadata, indent=2, sort_keys=True).encode() + b"\n"


def group_paths(layouts: list[Layout]) -> list[str]:
    """Groups above the arrays of these leaves, the root group `""` first."""
    groups = {""}
    for layout in layouts:
        parts = layout.path.split("/")
        groups.update("/".join(parts[:i]) for i in range(1, len(parts)))
    return sorted(groups - {ROOT_PATH} if len(layouts) == 1 else groups)


def chunk_key(position: tuple[int, ...]) -> str:
    """Key of one chunk (a file) below its array: `c/0/3`, or `c` for a 0-d array."""
    return "/".join(["c", *map(str, position)])


def _array(
    shape: tuple[int, ...],
    dtype: str,
    chunk: tuple[int, ...],
    codecs: list[dict[str, Any]],
    attributes: dict[str, Any],
) -> dict[str, Any]:
    fill: Any = 0
    if dtype == "bool":
        fill = False
    elif dtype.startswith("complex"):
        fill = [0.0, 0.0]
    elif "float" in dtype:
        fill = 0.0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": codecs,
        "attributes": attributes,
    }
