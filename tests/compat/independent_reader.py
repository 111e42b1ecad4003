"""Read a jaxshard checkpoint of format version 1 with nothing but json and numpy.

Written from docs/format.md alone, to show that the page says all that a reader needs. It does not
compare checksums and digests (that takes crc32c and xxh3-128), and refuses zstd.
"""

import json

import numpy as np

ENTRY = np.dtype("<u4, <u4, <u8, <u8, <u8, V16")  # leaf, 0, tile, offset, length, digest


def read(path):
    """{name: value} of every leaf; element types that NumPy lacks as uint8 or uint16 bits."""
    manifest = json.loads(contents(f"{path}/manifest.json"))
    assert (manifest["a_format"], manifest["a_version"]) == ("jaxshard", 1)
    assert manifest["compression"] is None, "zstd is not in json and numpy"
    home, out, common = f"{path}/{manifest['attempt']}", {}, [*manifest["templates"], {}]
    leaves = [{**common[leaf.get("template", -1)], **leaf} for leaf in manifest["leaves"]]
    packs = {k: v for p in range(len(manifest["processes"])) for k, v in pack(home, p).items()}
    for number, leaf in enumerate(leaves):
        first = leaf.get("same_as", number)
        layout = leaves[first].get("layout")
        files = f"{home}/data/{leaves[first].get('path', leaves[first]['name'])}/c"
        raw = layout and stored(files, first, layout, packs)
        out[leaf["name"]] = value(leaf) if raw is None else array(leaf, layout["per_byte"], raw)
    return out


def contents(file):
    return np.fromfile(file, "u1").tobytes()


def element_type(name):
    """Little-endian; bits where NumPy does not know the type."""
    known = name if hasattr(np, name) else "u2" if name == "bfloat16" else "u1"
    return np.dtype(known).newbyteorder("<")


def pack(home, process):
    """{(leaf, tile): bytes} of the pack of a process, from its table."""
    table = contents(f"{home}/tables/{process // 256}/p{process:05d}.bin")
    assert table[:8] == b"JXSTABL1"
    pieces, tiles, entries, segment, _ = np.frombuffer(table, "<u8", 5, 16).tolist()
    found = np.frombuffer(table, ENTRY, entries, 56 + 24 * pieces + 16 * tiles).tolist()
    file = f"{home}/packs/{process:05d}/c/"
    return {
        (leaf, tile): contents(f"{file}{offset // segment}")[offset % segment :][:length]
        for leaf, _, tile, offset, length, _ in found
    }


def cells(shape, cell):
    """Position and slices of each cell of a grid, in C order."""
    for at in np.ndindex(*(-(-n // c) for n, c in zip(shape, cell, strict=True))):
        sides = zip(at, cell, shape, strict=True)
        yield at, tuple(slice(i * c, min(i * c + c, n)) for i, c, n in sides)


def stored(files, number, layout, packs):
    """The stored elements of a leaf."""
    shape, piece, tile = layout["shape"], layout["piece"], layout["tile"]
    out = np.zeros(shape, element_type(layout["dtype"]))
    for i, (_, where) in enumerate(cells(shape, tile) if layout["packed"] else ()):
        out[where] = np.frombuffer(packs[number, i], out.dtype).reshape(out[where].shape)
    for at, where in () if layout["packed"] else cells(shape, piece):
        data = contents("/".join([files, *map(str, at)]))
        whole, inside, index = np.zeros(piece, out.dtype), [*cells(piece, tile)], [[0, len(data)]]
        if piece != tile:
            start = len(data) - 4 - 16 * len(inside)
            index = np.frombuffer(data, "<u8", 2 * len(inside), start).reshape(-1, 2).tolist()
        for (offset, length), (_, part) in zip(index, inside, strict=True):
            if offset != 2**64 - 1:
                tile_bytes = data[offset : offset + length - 4]
                whole[part] = np.frombuffer(tile_bytes, out.dtype).reshape(tile)
        out[where] = whole[tuple(slice(0, s.stop - s.start) for s in where)]
    return out


def array(leaf, per_byte, raw):
    """Stored elements to elements: those that share bytes are taken apart, low bits first."""
    if per_byte > 1:
        n, width = leaf["shape"][-1], 8 // per_byte
        raw = raw[..., None] >> np.arange(0, 8, width, dtype="u1") & (2**width - 1)
        raw = raw.reshape(*leaf["shape"][:-1], -1)[..., :n]
    text = {"str": lambda: bytes(raw).decode("utf-8", "surrogatepass"), "bytes": lambda: bytes(raw)}
    return text.get(leaf["kind"], lambda: raw)()


def value(leaf):
    """A value that the manifest itself holds."""
    kind, text = leaf["kind"], leaf.get("value")
    if kind in ("float", "complex"):
        parts = np.frombuffer(bytes.fromhex(text), ">f8").tolist()
        return parts[0] if kind == "float" else complex(*parts)
    if kind == "numpy_scalar":
        return np.frombuffer(bytes.fromhex(text), element_type(leaf["dtype"]))[0]
    return int(text, 16) if kind == "int" else bytes.fromhex(text) if kind == "bytes" else text
