"""docs/format.md says all that a reader needs, and what it says is so, byte for byte."""

import ast
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
import zarr
from compat import independent_reader, make_v1
from support import REPOSITORY, assert_same_leaf, assert_same_tree, mesh, on, spelled_out
from zarr.dtype import data_type_registry

import jaxshard
from jaxshard import _dtypes, _trees
from jaxshard._boxes import Lattice

PAGE = (REPOSITORY / "docs/format.md").read_text()
V1 = REPOSITORY / "tests/compat/v1"
READER = REPOSITORY / "tests/compat/independent_reader.py"
OPTIONS = {
    "packed and filed": make_v1.OPTIONS,
    "filed": jaxshard.SaveOptions(pack_below=0, piece_bytes_max=400),
    "packed": jaxshard.SaveOptions(pack_below=1 << 40, piece_bytes_max=400),
    "small pack files": jaxshard.SaveOptions(pack_below=1 << 40, host_bytes_max=2000),
    "default": jaxshard.SaveOptions(),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Paths of one tree with a leaf of every kind, by how it was saved."""
    root = tmp_path_factory.mktemp("format")
    for name, options in OPTIONS.items():
        jaxshard.save(root / name, make_v1.tree(), options=options)
    return root


@pytest.fixture(params=OPTIONS)
def path(request, saved):
    return saved / request.param


def attempt(path: Path) -> Path:
    return path / json.loads((path / "manifest.json").read_text())["attempt"]


def leaves(path: Path) -> dict:
    body = spelled_out(json.loads((path / "manifest.json").read_text()))
    return {leaf["name"]: leaf for leaf in body["leaves"]}


def assert_equal(found, wanted, name):
    """A value of the reader, and of jaxshard; arrays as bits where NumPy lacks the type."""
    if isinstance(wanted, np.ndarray | np.generic):
        assert found.shape == wanted.shape, name
        assert found.dtype.itemsize == wanted.dtype.itemsize, name
        assert found.tobytes() == masked(wanted).tobytes(), name
    else:
        assert type(found) is type(wanted), name
        assert repr(found) == repr(wanted), name


def masked(values):
    """Elements with the bits above their width cleared."""
    width = _dtypes.bits(values.dtype.name)
    raw = np.asarray(values).view(np.uint8) if width < 8 else np.asarray(values)
    return raw & np.uint8((1 << width) - 1) if width < 8 else raw


# The independent reader ---------------------------------------------------------------------


def test_the_reader_needs_only_json_and_numpy_and_under_100_lines():
    text = READER.read_text()
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert sorted(ast.unparse(n) for n in imports) == ["import json", "import numpy as np"]
    assert len(text.splitlines()) < 100


def test_the_reader_agrees_with_jaxshard_on_every_leaf(path):
    found = independent_reader.read(path)
    checkpoint = jaxshard.open(path)
    assert list(found) == list(checkpoint)
    for name, leaf in checkpoint.items():
        wanted = leaf.read()
        if leaf.info.kind == "numpy_scalar" and _dtypes.bits(leaf.dtype) < 8:
            wanted = masked(wanted)
            found[name] = found[name] & (2 ** _dtypes.bits(leaf.dtype) - 1)
        assert_equal(found[name], wanted, name)


@pytest.mark.parametrize("compression", ["zstd"])
def test_the_reader_says_that_it_cannot_undo_compression(tmp_path, compression):
    options = jaxshard.SaveOptions(compression=compression)
    jaxshard.save(tmp_path / "ckpt", {"w": np.zeros(3)}, options=options)
    with pytest.raises(AssertionError, match="zstd is not in json and numpy"):
        independent_reader.read(tmp_path / "ckpt")


def test_the_trees_have_what_makes_reading_hard(saved):
    layouts = [
        leaf["layout"] for leaf in leaves(saved / "packed and filed").values() if "layout" in leaf
    ]
    filed = [layout for layout in layouts if not layout["packed"]]
    assert len(filed) not in {0, len(layouts)}
    assert any(layout["tile"] != layout["piece"] for layout in filed)
    assert any(layout["tile"] == layout["piece"] != layout["shape"] for layout in filed)
    assert any(layout["per_byte"] > 1 for layout in layouts)
    int4 = [layout for layout in layouts if layout["path"].startswith("placed/int4")]
    assert {layout["per_byte"] for layout in int4} == {1, 2}
    sides = [zip(layout["shape"], layout["tile"], strict=True) for layout in filed]
    assert any(n % t for pairs in sides for n, t in pairs)
    assert any("same_as" in leaf for leaf in leaves(saved / "packed").values())
    assert len(list((attempt(saved / "small pack files") / "packs/00000/c").iterdir())) > 1


# Zarr ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_zarr_reads_every_array_whose_type_it_knows(tmp_path, compression):
    options = jaxshard.SaveOptions(pack_below=0, piece_bytes_max=400, compression=compression)
    jaxshard.save(tmp_path / "ckpt", make_v1.tree(), options=options)
    checkpoint = jaxshard.open(tmp_path / "ckpt")
    group = zarr.open_group(checkpoint.zarr_root, mode="r")
    read = set()
    for name, info in checkpoint.leaves.items():
        known = info.dtype is not None and hasattr(np, info.dtype)
        if info.zarr_path is None or not known or info.kind in {"str", "bytes"}:
            continue
        found = group[info.zarr_path][...]
        wanted = checkpoint[name].read()
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        assert found.tobytes() == wanted.tobytes(), name
        read.add(info.dtype)
    assert read >= {*make_v1.NATIVE}


def test_zarr_gives_carriers_with_an_attribute_that_says_how_to_unpack_them(saved):
    checkpoint = jaxshard.open(saved / "filed")
    group = zarr.open_group(checkpoint.zarr_root, mode="r")
    seen = set()
    for name, info in checkpoint.leaves.items():
        if info.zarr_path is None or _dtypes.stored_dtype(info.dtype) == info.dtype:
            continue
        array = group[info.zarr_path]
        says = array.attrs["jaxshard"]
        raw, k = array[...], says["elements_per_byte"]
        width = 8 // k
        values = raw[..., None] >> np.arange(0, 8, width, dtype=np.uint8) & (2**width - 1)
        values = values.reshape(*raw.shape[:-1], -1)[..., : says["shape"][-1]]
        assert values.tobytes() == masked(checkpoint[name].read()).tobytes(), name
        assert (says["dtype"], says["leaf"]) == (info.dtype, name)
        seen.add(info.dtype)
    assert seen >= {"int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3"}


def test_zarr_sees_0d_and_empty_arrays(tmp_path):
    tree = {"0d": np.array(2.5), "empty": np.zeros((0, 4)), "key": jax.random.key(3)}
    jaxshard.save(tmp_path / "ckpt", tree, options=jaxshard.SaveOptions(pack_below=0))
    group = zarr.open_group(jaxshard.open(tmp_path / "ckpt").zarr_root, mode="r")
    assert group["0d"][...] == 2.5
    assert group["empty"].shape == (0, 4)
    assert group["key"][...].tolist() == [0, 3]
    assert sorted(group) == ["0d", "empty", "key"]


def test_a_type_that_zarr_lacks_does_not_close_the_rest_of_the_tree(saved, monkeypatch):
    monkeypatch.delitem(data_type_registry.contents, "bfloat16", raising=False)
    checkpoint = jaxshard.open(saved / "filed")
    group = zarr.open_group(checkpoint.zarr_root, mode="r")
    with pytest.raises((ValueError, TypeError, KeyError), match="bfloat16"):
        group["every numpy type/bfloat16"]
    assert group["every numpy type/float16"].shape == (3, 5)


def test_a_missing_chunk_is_damage_and_never_zeros(tmp_path):
    jaxshard.save(tmp_path / "c", {"w": np.zeros(3)}, options=jaxshard.SaveOptions(pack_below=0))
    (attempt(tmp_path / "c") / "data/w/c/0").unlink()
    with pytest.raises(jaxshard.CorruptionError, match="expected to exist, found nothing"):
        jaxshard.load(tmp_path / "c")


def test_a_pack_is_a_zarr_array_of_bytes(saved):
    home = attempt(saved / "small pack files")
    files = sorted((home / "packs/00000/c").iterdir(), key=lambda p: int(p.name))
    assert zarr.open_array(home / "packs/00000", mode="r")[...].tobytes() == b"".join(
        p.read_bytes() for p in files
    )


# Version 1 ----------------------------------------------------------------------------------


def test_version_1_loads_onto_what_was_saved():
    found, wanted = jaxshard.load(V1, make_v1.tree()), make_v1.tree()
    names, wanted_names = found.pop("names"), wanted.pop("names")  # JAX cannot sort its keys
    assert_same_tree(found, wanted)
    assert list(names) == list(wanted_names)
    for key, value in wanted_names.items():
        assert_same_leaf(names[key], value, key)


def test_version_1_is_sound():
    report = jaxshard.verify(V1)
    assert report.ok, report
    assert report.leftovers == ()


def plain(value):
    """A leaf as the reader gives it."""
    if isinstance(value, jax.Array):
        key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(value) if key else value)
    return None if callable(value) and not isinstance(value, np.generic) else value


def test_version_1_is_read_by_the_independent_reader():
    found, flat = independent_reader.read(V1), _trees.flatten(make_v1.tree())
    assert list(found) == [leaf.name for leaf in flat.spec.leaves]
    for leaf, value in zip(flat.spec.leaves, flat.values, strict=True):
        assert_equal(found[leaf.name], plain(value), leaf.name)


def test_version_1_names_its_leaves_as_ever():
    names = set(jaxshard.open(V1))
    assert names >= {
        "every numpy type/int4", "scalars/bool", "keys/1", "python/14", "containers/nu/1/kernel",
        "containers/nu/2/1/0", "names/%int~1", "names/1", "names/a%2Fb", "names/a.b", "names/%",
        "names/(1,'x')", "names/None", "names/b'%5Cxff'", "names/0.5", "shapes/0d", "function",
    }  # fmt: skip


def test_version_1_has_a_leaf_of_every_kind():
    kinds = {info.kind for info in jaxshard.open(V1).leaves.values()}
    assert kinds == {
        "array", "key", "numpy_scalar", "bool", "int", "float", "complex", "str", "bytes", "none",
        "function",
    }  # fmt: skip
    dtypes = {info.dtype for info in jaxshard.open(V1).leaves.values()}
    assert dtypes >= {*make_v1.NATIVE, *make_v1.EXTENDED}


def test_version_1_is_what_is_written_today(tmp_path):
    jaxshard.save(tmp_path / "ckpt", make_v1.tree(), options=make_v1.OPTIONS)
    report = jaxshard.diff(V1, tmp_path / "ckpt")
    assert report.identical, report


def test_version_1_is_small_enough_for_git():
    assert sum(p.stat().st_size for p in V1.rglob("*") if p.is_file()) < 100_000


# What the page says of the layout ------------------------------------------------------------


def files(path: Path) -> set[str]:
    home = attempt(path).name
    found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    return {name.replace(home, "ATTEMPT") for name in found}


def test_the_files_are_those_of_the_page(tmp_path):
    tree = {"params": {"kernel": np.zeros((4, 4)), "bias": np.zeros(2)}, "n": 1}
    options = jaxshard.SaveOptions(pack_below=100, piece_bytes_max=100)
    jaxshard.save(tmp_path / "filed", tree, options=jaxshard.SaveOptions(pack_below=20))
    jaxshard.save(tmp_path / "packed", tree, options=options)
    assert files(tmp_path / "filed") == {
        "manifest.json",
        "ATTEMPT/data/zarr.json",
        "ATTEMPT/data/params/zarr.json",
        "ATTEMPT/data/params/kernel/zarr.json",
        "ATTEMPT/data/params/kernel/c/0/0",
        "ATTEMPT/packs/00000/zarr.json",
        "ATTEMPT/packs/00000/c/0",
        "ATTEMPT/tables/0/p00000.bin",
    }
    assert files(tmp_path / "packed") == {
        "manifest.json",
        "ATTEMPT/data/zarr.json",
        "ATTEMPT/packs/00000/zarr.json",
        "ATTEMPT/packs/00000/c/0",
        "ATTEMPT/tables/0/p00000.bin",
    }


def table_of(heading: str) -> set[str]:
    """Names in the first column of the table below a text of the page."""
    rows = PAGE[PAGE.index(heading) :].split("\n\n")[1].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_manifest_has_the_keys_of_the_page(path):
    manifest = json.loads((path / "manifest.json").read_text())
    optional = {"reused", "thinned_to"}
    described = {*table_of("A reader MUST check it before"), "xxh3_128"}
    assert set(manifest) | optional == described


def described_fields() -> set[str]:
    section = PAGE[PAGE.index("**A leaf** has") : PAGE.index("Kinds and their")]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    return {"name", "kind", "array_shape", *named}


def test_a_leaf_has_no_field_that_the_page_does_not_describe(path):
    used = {field for leaf in leaves(path).values() for field in leaf}
    assert used <= described_fields()


def test_a_layout_has_the_fields_of_the_page(path):
    described = re.search(r"\| `layout` \| (.*) \|", PAGE)[1]
    for leaf in leaves(path).values():
        assert all(f"`{field}`" in described for field in leaf.get("layout", ()))


@pytest.mark.parametrize("text", ["kind", "type"])
def test_kinds_and_node_types_are_those_of_the_page(path, text):
    found = {leaf["kind"] for leaf in leaves(path).values()}
    if text == "type":
        tree = (path / "manifest.json").read_text()
        found = set(re.findall(r'"type":"(\w+)"', tree))
        assert found == {"dict", "list", "tuple", "namedtuple", "object", "items"}
    assert all(f"`{name}`" in PAGE for name in found)


def test_the_manifest_ends_with_the_digest_of_the_text_before_it(path):
    text = (path / "manifest.json").read_bytes()
    body, _, end = text.rpartition(b',"xxh3_128":"')
    assert end == xxhash.xxh3_128(body + b"}").hexdigest().encode() + b'"}\n'


def test_the_manifest_names_the_digest_of_the_table(path):
    (record,) = json.loads((path / "manifest.json").read_text())["processes"]
    table = (attempt(path) / "tables/0/p00000.bin").read_bytes()
    assert record == {
        "table_bytes": len(table),
        "table_xxh3_128": xxhash.xxh3_128(table).hexdigest(),
        "iterators": None,
    }


def tiles_of(path: Path, leaf: dict, elements) -> list[tuple[int, bytes]]:
    """(number, digest) of each tile of the stored elements, as the page defines them."""
    lattice = Lattice(tuple(leaf["layout"]["shape"]), tuple(leaf["layout"]["tile"]))
    parts = (np.ascontiguousarray(elements[lattice.box(i).slices]) for i in range(lattice.size))
    return [(i, xxhash.xxh3_128(part.tobytes()).digest()) for i, part in enumerate(parts)]


def test_the_digest_of_a_leaf_is_that_of_the_page(path):
    home, packs = attempt(path), independent_reader.pack(attempt(path), 0)
    for number, leaf in enumerate(leaves(path).values()):
        if "layout" not in leaf:
            continue
        files = f"{home}/data/{leaf['layout']['path']}/c"
        stored = independent_reader.stored(files, number, leaf["layout"], packs)
        total = sum(
            xxhash.xxh3_128_intdigest(i.to_bytes(8, "little") + digest)
            for i, digest in tiles_of(path, leaf, stored)
        )
        assert leaf["digest"] == f"{total % 2**128:032x}", leaf["name"]


def test_the_table_has_every_tile_with_its_digest_in_the_order_of_the_page(path):
    data = (attempt(path) / "tables/0/p00000.bin").read_bytes()
    pieces, tiles, entries, segment, segments = np.frombuffer(data, "<u8", 5, 16).tolist()
    rows = np.frombuffer(data, "<u4, <u4, <u8, <u8", pieces, 56).tolist()
    digests = np.frombuffer(data, "V16", tiles, 56 + 24 * pieces)
    found = np.frombuffer(data, independent_reader.ENTRY, entries, 56 + 24 * pieces + 16 * tiles)
    assert [row[:1] + row[2:3] for row in rows] == sorted(row[:1] + row[2:3] for row in rows)
    assert sum(row[1] for row in rows) == tiles == len(digests)
    offsets = [entry[3] for entry in found.tolist()]
    assert offsets == sorted(offsets)
    assert all(offset % 64 == 0 for offset in offsets)
    packs = list((attempt(path) / "packs").rglob("c/*"))
    assert [p.stat().st_size for p in packs] == [segment] * segments
    assert len(data) == 56 + 24 * pieces + 16 * tiles + 48 * entries


def test_the_table_knows_the_length_of_every_file(path):
    data = (attempt(path) / "tables/0/p00000.bin").read_bytes()
    rows = np.frombuffer(data, "<u4, <u4, <u8, <u8", int.from_bytes(data[16:24], "little"), 56)
    named = list(leaves(path).values())
    for leaf, count, piece, length in rows.tolist():
        layout = named[leaf]["layout"]
        grid = Lattice(tuple(layout["shape"]), tuple(layout["piece"]))
        place = "/".join(["c", *map(str, grid.position(piece))])
        file = attempt(path) / "data" / layout["path"] / place
        assert file.stat().st_size == length
        tiles = Lattice(tuple(layout["shape"]), tuple(layout["tile"]))
        assert count == len(list(tiles.touching(grid.box(piece))))


def test_bytes_between_the_tiles_of_a_pack_are_zero(saved):
    home = attempt(saved / "packed")
    data = bytearray((home / "packs/00000/c/0").read_bytes())
    table = (home / "tables/0/p00000.bin").read_bytes()
    pieces, tiles, entries = np.frombuffer(table, "<u8", 3, 16).tolist()
    assert (pieces, tiles) == (0, 0)
    for _, _, _, offset, length, _ in np.frombuffer(
        table, independent_reader.ENTRY, entries, 56
    ).tolist():
        data[offset : offset + length] = bytes(length)
    assert not any(data)


def test_clipped_tiles_are_stored_whole_and_padded_with_zeros(tmp_path):
    options = jaxshard.SaveOptions(pack_below=0, piece_bytes_max=16)
    jaxshard.save(tmp_path / "ckpt", {"w": np.full(37, 255, np.uint8)}, options=options)
    layout = leaves(tmp_path / "ckpt")["w"]["layout"]
    (side,) = layout["piece"]
    rest = 37 % side
    assert layout["tile"] == layout["piece"]
    assert rest
    raw = (attempt(tmp_path / "ckpt") / f"data/w/c/{37 // side}").read_bytes()
    assert raw[:-4] == b"\xff" * rest + b"\0" * (side - rest)


def test_clipped_tiles_of_packs_are_stored_clipped(tmp_path):
    options = jaxshard.SaveOptions(piece_bytes_max=16)
    jaxshard.save(tmp_path / "ckpt", {"w": np.full(37, 255, np.uint8)}, options=options)
    (side,) = leaves(tmp_path / "ckpt")["w"]["layout"]["tile"]
    packed = independent_reader.pack(attempt(tmp_path / "ckpt"), 0)
    assert {len(raw) for (_, tile), raw in packed.items() if tile < 37 // side} == {side}
    assert packed[0, 37 // side] == b"\xff" * (37 % side)


@pytest.mark.parametrize("partitions", [(), ("a",), (None, "b"), ("a", "b")])
def test_tiles_divide_pieces_and_pieces_divide_shards(tmp_path, partitions):
    array = jax.device_put(jnp.zeros((24, 40)), on(mesh((2, 4)), *partitions))
    options = jaxshard.SaveOptions(pack_below=0, piece_bytes_max=200)
    jaxshard.save(tmp_path / "ckpt", {"w": array}, options=options)
    layout = leaves(tmp_path / "ckpt")["w"]["layout"]
    assert all(p % t == 0 for p, t in zip(layout["piece"], layout["tile"], strict=True))
    shard = array.sharding.shard_shape(array.shape)
    for n, s, p in zip(array.shape, shard, layout["piece"], strict=True):
        assert n == s or s % p == 0
    names = list((attempt(tmp_path / "ckpt") / "data/w/c").rglob("*/*"))
    assert len(names) == math.prod(
        -(-n // p) for n, p in zip(array.shape, layout["piece"], strict=True)
    )


def test_a_run_is_described_by_one_file_that_never_changes(tmp_path):
    root = tmp_path / "run"
    for step in (1, 2):
        with jaxshard.ResumeManager(root, when=jaxshard.Every(steps=1)) as run:
            run.resume({"w": np.zeros(2)})
            run.save(step, {"w": np.zeros(2)}, wait=True)
        text = (root / "run.json").read_text()
    found = json.loads(text)
    assert (found["format"], found["version"]) == ("jaxshard-run", 1)
    assert re.fullmatch(r"[0-9a-f]{32}", found["run_id"])
    names = ["epochs", "events", "run.json", "step_00000001", "step_00000002"]
    assert sorted(p.name for p in root.iterdir()) == names
