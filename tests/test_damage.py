"""No silent damage: every file of a checkpoint harmed in every way, and manifests made to harm."""

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from support import assert_same_tree, mesh, on, run_python, spelled_out

import jaxshard
from jaxshard import (
    CorruptionError,
    FormatError,
    LoadOptions,
    NotCommittedError,
    NotFoundError,
    SaveOptions,
)
from jaxshard._errors import Kind

OPTIONS = SaveOptions(pack_below=5, piece_bytes_max=784)


def a_tree(step: int) -> dict[str, Any]:
    """Filed and packed leaves of every shape that the writer has, with the values of a step."""
    on_a = on(mesh((2, 2)), "a")
    numbers = np.arange(4 * 343, dtype=np.float32).reshape(4, 343) + step
    return {
        "sharded": jax.device_put(numbers, on_a),  # 8 files of up to two tiles
        "whole": np.arange(300, dtype=np.int16) + step,  # one file, one chunk, no index
        "zero_d": np.array(1.5 * step),  # a file of its own: `c`
        "nibbles": jax.device_put(jnp.arange(48).astype(jnp.int4).reshape(8, 6) ^ step, on_a),
        "empty": np.zeros((0, 4), np.float32),
        "key": jax.random.key(step),
        "packed": {"bytes": np.array([step, 2, 3], np.uint8), "flags": jnp.array([step > 1, True])},
        "text": "".join(f"{n:05d}" for n in range(step, step + 1000)),
        "number": step,
    }


class Saved(NamedTuple):
    """An intact checkpoint, what is in it, its files, and the same files of another step."""

    path: Path
    values: Any
    files: list[str]  # with `ATTEMPT` for the name of the attempt
    attempt: str
    other: dict[str, bytes]

    def file(self, name: str) -> Path:
        return self.path / name.replace("ATTEMPT", self.attempt)

    def shown(self, name: str) -> str:
        return name.replace("ATTEMPT", self.attempt)


def contents(path: Path) -> dict[str, bytes]:
    attempt = attempt_of(path)
    return {
        str(file.relative_to(path)).replace(attempt, "ATTEMPT"): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def attempt_of(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_bytes())["attempt"])


def save_two_steps(root: Path, options: SaveOptions) -> Saved:
    for step in (1, 2):
        jaxshard.save(root / f"step{step}", a_tree(step), options=options)
    path = root / "step1"
    files = contents(path)
    return Saved(path, jaxshard.load(path), list(files), attempt_of(path), contents(root / "step2"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_two_steps(tmp_path_factory.mktemp("plain"), OPTIONS)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    options = dataclasses.replace(OPTIONS, compression="zstd")
    return save_two_steps(tmp_path_factory.mktemp("zstd"), options)


def test_the_checkpoint_under_test_has_every_kind_of_file(saved: Saved) -> None:
    infos = jaxshard.open(saved.path).leaves
    assert infos["sharded"].tile_shape != infos["sharded"].piece_shape
    assert infos["whole"].tile_shape == infos["whole"].piece_shape == (300,)
    assert infos["packed/bytes"].packed
    assert infos["packed/flags"].packed
    assert not any(infos[name].packed for name in ("sharded", "zero_d", "nibbles", "key", "text"))
    for name in ("manifest.json", "ATTEMPT/data/zero_d/c", "ATTEMPT/packs/00000/c/0"):
        assert name in saved.files
    assert sum(name.startswith("ATTEMPT/data/sharded/c/") for name in saved.files) == 8
    assert_same_tree(jaxshard.load(saved.path, a_tree(2)), a_tree(1))


# Harm ---------------------------------------------------------------------------------------

Harm = Callable[[bytes], bytes | None]


def flip(position: Callable[[int], int], bit: int) -> Harm:
    def harm(data: bytes) -> bytes:
        at = position(len(data)) % len(data)
        return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]

    return harm


HARMS: dict[str, Harm] = {
    "first byte, low bit": flip(lambda n: 0, 0),
    "first byte, high bit": flip(lambda n: 0, 7),
    "a third in": flip(lambda n: n // 3, 4),
    "in the middle": flip(lambda n: n // 2, 2),
    "late": flip(lambda n: n - 21, 5),
    "last byte": flip(lambda n: n - 1, 0),
    "cut by one byte": lambda data: data[:-1],
    "cut to half": lambda data: data[: len(data) // 2],
    "emptied": lambda _: b"",
    "deleted": lambda _: None,
    "a byte appended": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
}
SEEN_BY_LENGTH = {"cut by one byte", "cut to half", "emptied", "deleted", "a byte appended"}


@contextlib.contextmanager
def harmed(files: dict[Path, bytes | None]) -> Iterator[None]:
    """Files with other bytes (or none) for a while."""
    before = {file: file.read_bytes() for file in files}
    try:
        for file, data in files.items():
            if data is None:
                file.unlink()
            else:
                file.write_bytes(data)
        yield
    finally:
        for file, data in before.items():
            file.write_bytes(data)


def load_or_error(path: Path, io_mode: Any) -> Any:
    try:
        return jaxshard.load(path, options=LoadOptions(io_mode=io_mode))
    except (CorruptionError, FormatError, NotCommittedError) as e:
        return e


def problem_of_load(saved: Saved, names: list[str], io_mode: Any, *, needed: bool) -> str | None:
    """What is wrong with how `load` takes the harm, None if nothing is."""
    got = load_or_error(saved.path, io_mode)
    if not isinstance(got, Exception):
        if needed:
            return f"{names} were harmed, and load gave values"
        assert_same_tree(got, saved.values)
        return None
    if isinstance(got, NotCommittedError):
        return None if names == ["manifest.json"] else f"{names}: {got!r}"
    if not any(saved.shown(name) in str(got) for name in names):
        return f"{names} were harmed, and load does not name one: {got}"
    return None


def is_needed(name: str, harm: str, io_mode: str) -> bool:
    """Whether `load` of everything cannot be right without these bytes."""
    if name.endswith("zarr.json"):
        return False
    if "/data/" in name and harm in {"late", "last byte"} and io_mode == "auto":
        return False  # the index, or a checksum, which TensorStore needs
    # Between the tiles of a pack, and after the last one, lies padding that no leaf has.
    return "/packs/" not in name or harm in {"first byte, low bit", "emptied", "deleted", "zeros"}


@pytest.mark.parametrize("io_mode", ["auto", "memmap", "pread"])
@pytest.mark.parametrize("harm", HARMS)
def test_load_names_the_harmed_file_or_gives_the_right_values(
    saved: Saved, harm: str, io_mode: str
) -> None:
    problems = []
    for name in saved.files:
        data = saved.file(name).read_bytes()
        with harmed({saved.file(name): HARMS[harm](data)}):
            needed = is_needed(name, harm, io_mode)
            problems.append(problem_of_load(saved, [name], io_mode, needed=needed))
    assert not list(filter(None, problems))


def named_by_verify(path: Path, *, read_data: bool) -> set[str]:
    try:
        report = jaxshard.verify(path, read_data=read_data)
    except NotCommittedError:
        return {"manifest.json"}
    assert report.ok == (not report.problems)
    return {problem.file for problem in report.problems}


@pytest.mark.parametrize("harm", HARMS)
def test_verify_names_the_harmed_file_and_no_other(saved: Saved, harm: str) -> None:
    for name in saved.files:
        data = saved.file(name).read_bytes()
        with harmed({saved.file(name): HARMS[harm](data)}):
            assert named_by_verify(saved.path, read_data=True) == {saved.shown(name)}, (harm, name)


@pytest.mark.parametrize("harm", ["a third in", "last byte", "cut by one byte", "zeros"])
def test_a_compressed_checkpoint_is_guarded_as_well(compressed: Saved, harm: str) -> None:
    for name in compressed.files:
        data = compressed.file(name).read_bytes()
        with harmed({compressed.file(name): HARMS[harm](data)}):
            needed = is_needed(name, harm, "pread")
            assert not problem_of_load(compressed, [name], "auto", needed=needed)
            found = named_by_verify(compressed.path, read_data=True)
            assert found == {compressed.shown(name)}, (harm, name)


@pytest.mark.parametrize("harm", sorted(SEEN_BY_LENGTH))
def test_verify_without_data_finds_what_is_missing_or_of_another_length(
    saved: Saved, harm: str
) -> None:
    for name in saved.files:
        data = saved.file(name).read_bytes()
        with harmed({saved.file(name): HARMS[harm](data)}):
            assert named_by_verify(saved.path, read_data=False) == {saved.shown(name)}, (harm, name)


def siblings(saved: Saved) -> list[tuple[str, str]]:
    """Pairs of files of one leaf that could be taken for each other."""
    pairs = []
    for name in saved.files:
        if "/c/" in name and "/data/" in name:
            leaf = name.split("/c/")[0]
            pairs += [(name, n) for n in saved.files if n > name and n.startswith(f"{leaf}/c/")]
    return pairs


@pytest.mark.parametrize("io_mode", ["auto", "memmap", "pread"])
def test_two_files_of_a_leaf_that_changed_places_are_noticed(saved: Saved, io_mode: str) -> None:
    pairs = siblings(saved)
    assert len(pairs) >= 30
    for a, b in pairs:
        data = {name: saved.file(name).read_bytes() for name in (a, b)}
        with harmed({saved.file(a): data[b], saved.file(b): data[a]}):
            assert not problem_of_load(saved, [a, b], io_mode, needed=True)
            if io_mode == "pread":
                found = named_by_verify(saved.path, read_data=True)
                assert found == {saved.shown(a), saved.shown(b)}


def test_a_file_in_a_siblings_place_is_called_misplaced(saved: Saved) -> None:
    a, b = (f"ATTEMPT/data/sharded/c/{n}" for n in ("0/0", "1/0"))
    with harmed({saved.file(a): saved.file(b).read_bytes()}):
        (problem,) = jaxshard.verify(saved.path).problems
    assert (problem.kind, problem.leaf, problem.piece) == ("misplaced", "sharded", 0)
    assert str(problem).startswith(f"misplaced: {saved.shown(a)} (leaf 'sharded', piece 0): ")


@pytest.mark.parametrize("io_mode", ["auto", "memmap", "pread"])
def test_a_file_of_another_step_is_noticed(saved: Saved, io_mode: str) -> None:
    assert set(saved.other) == set(saved.files)
    for name in saved.files:
        stale = saved.other[name]
        if name == "manifest.json" or stale == saved.file(name).read_bytes():
            continue  # the manifest of another step has a test of its own
        with harmed({saved.file(name): stale}):
            assert not problem_of_load(saved, [name], io_mode, needed="zarr.json" not in name)
            assert named_by_verify(saved.path, read_data=True) == {saved.shown(name)}


def test_the_manifest_of_another_step_finds_nothing_that_it_names(saved: Saved) -> None:
    with harmed({saved.file("manifest.json"): saved.other["manifest.json"]}):
        with pytest.raises(CorruptionError, match=r"tables/0/p00000.bin': expected to exist"):
            jaxshard.load(saved.path)
        assert not jaxshard.verify(saved.path).ok
        assert not jaxshard.verify(saved.path, read_data=False).ok


def test_a_load_onto_devices_notices_as_much_as_one_without_like(saved: Saved) -> None:
    like = {"sharded": jax.device_put(jnp.zeros((4, 343)), on(mesh((8,)), None, None))}
    name = "ATTEMPT/data/sharded/c/1/2"
    with harmed({saved.file(name): HARMS["in the middle"](saved.file(name).read_bytes())}):
        with pytest.raises(CorruptionError, match=r"leaf 'sharded'.*sharded/c/1/2"):
            jaxshard.load(saved.path, like, select="sharded")
        leaf = jaxshard.open(saved.path)["sharded"]
        with pytest.raises(CorruptionError, match=r"leaf 'sharded'.*sharded/c/1/2"):
            leaf.read()
        first = leaf.read(np.s_[:2])  # what does not need the file is right
        assert np.array_equal(first, saved.values["sharded"][:2])


def test_each_flipped_bit_of_a_small_file_is_noticed(saved: Saved) -> None:
    tile = math.prod(jaxshard.open(saved.path).leaves["sharded"].tile_shape) * 4
    elements = {
        "ATTEMPT/data/zero_d/c": lambda at: at < 8,
        "ATTEMPT/data/sharded/c/0/0": lambda at: at < 2 * tile + 4 and not 0 <= at - tile < 4,
        "ATTEMPT/tables/0/p00000.bin": lambda _: True,
    }
    for name, is_element in elements.items():
        data = saved.file(name).read_bytes()
        places = {*range(0, len(data), max(1, len(data) // 40)), *range(len(data) - 8, len(data))}
        for at in sorted(places):
            with harmed({saved.file(name): flip(lambda _, at=at: at, at % 8)(data)}):
                # Checksums and the index are for other readers of Zarr: `load` compares digests
                # of the elements, and looks at those only where it reads through TensorStore.
                assert not problem_of_load(saved, [name], "auto", needed=is_element(at)), at
                assert not problem_of_load(saved, [name], "pread", needed=True), at


def test_each_changed_byte_of_the_manifest_is_noticed(saved: Saved) -> None:
    data = saved.file("manifest.json").read_bytes()
    for at in range(0, len(data), 13):
        with (
            harmed({saved.file("manifest.json"): flip(lambda _, at=at: at, at % 8)(data)}),
            pytest.raises((CorruptionError, FormatError), match=r"manifest\.json: "),
        ):
            jaxshard.open(saved.path)


def test_each_cut_of_the_manifest_is_noticed(saved: Saved) -> None:
    data = saved.file("manifest.json").read_bytes()
    for length in range(0, len(data), 61):
        with (
            harmed({saved.file("manifest.json"): data[:length]}),
            pytest.raises(CorruptionError, match=r"manifest\.json: the manifest is damaged: cut"),
        ):
            jaxshard.open(saved.path)


def test_a_lost_directory_is_an_error_that_names_a_file_in_it(saved: Saved) -> None:
    for name in ("data/sharded", "data", "packs", "tables"):
        directory, aside = saved.path / saved.attempt / name, saved.path.parent / "aside"
        directory.rename(aside)
        try:
            with pytest.raises(CorruptionError, match=f"{saved.attempt}/{name}.*found nothing"):
                jaxshard.load(saved.path)
            report = jaxshard.verify(saved.path, read_data=False)
            assert all(f"{saved.attempt}/{name}/" in p.file for p in report.problems)
            assert {p.kind for p in report.problems} == {"missing"}
        finally:
            aside.rename(directory)


def test_a_directory_in_the_place_of_a_file_is_an_error_that_names_it(saved: Saved) -> None:
    for name in ("ATTEMPT/data/sharded/c/0/1", "ATTEMPT/packs/00000/c/0",
                 "ATTEMPT/tables/0/p00000.bin"):  # fmt: skip
        file, aside = saved.file(name), saved.path.parent / "aside"
        file.rename(aside)
        file.mkdir()
        try:
            with pytest.raises(CorruptionError, match=saved.shown(name)):
                jaxshard.load(saved.path)
            assert named_by_verify(saved.path, read_data=True) == {saved.shown(name)}
        finally:
            file.rmdir()
            aside.rename(file)


# What belongs there and what does not -------------------------------------------------------


def fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    for name, data in contents(path).items():
        digest.update(f"{name}:{len(data)}:".encode() + data)
    return digest.hexdigest()


def test_an_intact_checkpoint_verifies_clean_and_looking_changes_nothing(saved: Saved) -> None:
    before = fingerprint(saved.path)
    report = jaxshard.verify(saved.path)
    assert report.ok
    assert not report.problems
    assert not report.leftovers
    assert report.files == len(saved.files)
    assert str(report).startswith(f"{saved.path}: sound ({len(saved.files)} files, ")
    quick = jaxshard.verify(saved.path, read_data=False)
    assert quick.ok
    assert quick.nbytes == 0 < report.nbytes
    jaxshard.load(saved.path)
    assert fingerprint(saved.path) == before


@pytest.mark.parametrize(
    "name",
    ["data/sharded/c/9/9", "data/stranger/zarr.json", "packs/00000/c/1", "tables/0/p00001.bin",
     "notes.txt"],
)  # fmt: skip
def test_a_strange_file_inside_the_attempt_is_a_problem(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    path = shutil.copytree(saved.path, tmp_path / "copy")
    extra = path / saved.attempt / name
    extra.parent.mkdir(parents=True, exist_ok=True)
    extra.write_bytes(b"?")
    (problem,) = jaxshard.verify(path).problems
    assert (problem.kind, problem.file) == ("extra", f"{saved.attempt}/{name}")
    assert_same_tree(jaxshard.load(path), saved.values)


@pytest.mark.parametrize(
    "name",
    ["a-0123456789abcdef/data/sharded/c/0/0", "a-0123456789abcdef/tables/0/p00000.bin",
     ".tmp-0123456789abcdef", "{attempt}/data/sharded/c/0/.tmp-0123456789abcdef",
     "{attempt}/data/sharded/c/0/0.__lock"],
)  # fmt: skip
def test_what_killed_writers_left_behind_is_no_problem(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    path = shutil.copytree(saved.path, tmp_path / "copy")
    name = name.format(attempt=saved.attempt)
    left = path / name
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"left behind" * 1000)
    report = jaxshard.verify(path)
    assert report.ok
    assert report.leftovers == (name,)
    assert "1 leftover files" in str(report)
    assert_same_tree(jaxshard.load(path), saved.values)


def test_the_report_lists_every_problem_at_once(saved: Saved, tmp_path: Path) -> None:
    path = shutil.copytree(saved.path, tmp_path / "copy")
    attempt = path / saved.attempt
    (attempt / "data/sharded/c/0/0").unlink()
    (attempt / "data/zero_d/c").write_bytes(b"")
    (attempt / "data/text/zarr.json").write_bytes(b"{}")
    (attempt / "more").write_bytes(b"")
    report = jaxshard.verify(path)
    assert sorted(p.kind for p in report.problems) == ["damaged", "extra", "length", "missing"]
    assert str(report).splitlines()[0].startswith(f"{path}: 4 problems (")
    for problem in report.problems:
        assert f"  - {problem}" in str(report).splitlines()


# Manifests made to do harm ------------------------------------------------------------------


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and give it the digest that it would have had."""
    file = path / "manifest.json"
    body = spelled_out(json.loads(file.read_bytes()))
    del body["xxh3_128"]
    change(body)
    seal(file, json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def seal(file: Path, text: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(text)
    file.write_bytes(text[:-1] + f',"xxh3_128":"{digest}"}}\n'.encode())


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A small checkpoint of one filed and one packed leaf."""
    tree = {"filed": np.arange(600.0), "packed": np.arange(3, dtype=np.uint8), "text": "hello"}
    jaxshard.save(tmp_path / "victim", tree, options=OPTIONS)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "secret").write_bytes(b"not yours")
    return tmp_path / "victim"


def test_forging_nothing_changes_nothing(victim: Path) -> None:
    before = json.loads((victim / "manifest.json").read_bytes())
    forge(victim, lambda body: None)
    after = json.loads((victim / "manifest.json").read_bytes())
    assert after["leaves"] == spelled_out(before)["leaves"]
    assert jaxshard.verify(victim).ok


def setting(*way: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field: keys and indices, then the new value."""

    def change(body: Any) -> None:
        for key in way[:-2]:
            body = body[key]
        body[way[-2]] = way[-1]

    return change


def without(*way: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: Any) -> None:
        for key in way[:-1]:
            body = body[key]
        del body[way[-1]]

    return change


FILED = ("leaves", 0)
LAYOUT = (*FILED, "layout")
TEXT = ("leaves", 2)
HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "attempt above": setting("attempt", "../x"),
    "attempt absolute": setting("attempt", "/tmp"),
    "attempt above, looking right": setting("attempt", "a-0123456789abcdef/../../x"),
    "attempt with a newline": setting("attempt", "a-0123456789abcdef\n"),
    "attempt is a number": setting("attempt", 7),
    "attempt absent": without("attempt"),
    "path above": setting(*LAYOUT, "path", "../../../x"),
    "path above in the middle": setting(*LAYOUT, "path", "a/../../../../x"),
    "path is ..": setting(*LAYOUT, "path", ".."),
    "path absolute": setting(*LAYOUT, "path", "/etc/passwd"),
    "path empty": setting(*LAYOUT, "path", ""),
    "path with an empty part": setting(*LAYOUT, "path", "a//b"),
    "path with a backslash": setting(*LAYOUT, "path", "a\\..\\b"),
    "path with a NUL": setting(*LAYOUT, "path", "a\0b"),
    "path is a list": setting(*LAYOUT, "path", ["a"]),
    "side negative": setting(*LAYOUT, "shape", [-600]),
    "side of the leaf negative": setting(*FILED, "shape", [-600]),
    "side is a float": setting(*LAYOUT, "shape", [600.0]),
    "side is a bool": setting(*LAYOUT, "piece", [True]),
    "shape of the leaf is another": setting(*FILED, "shape", [599]),
    "shape of the leaf is huge": setting(*FILED, "shape", [1 << 61]),
    "shape is huge": setting(*LAYOUT, "shape", [1 << 61]),
    "side beyond 2**62": setting(*LAYOUT, "shape", [1 << 62]),
    "rank too large": setting(*LAYOUT, "shape", [1] * 65),
    "rank of the piece": setting(*LAYOUT, "piece", [100, 1]),
    "tile does not divide": setting(*LAYOUT, "tile", [7]),
    "tile is zero": setting(*LAYOUT, "tile", [0]),
    "tile negative": setting(*LAYOUT, "tile", [-1]),
    "tile larger than the piece": setting(*LAYOUT, "tile", [1 << 40]),
    "piece is zero": setting(*LAYOUT, "piece", [0]),
    "per_byte of another type": setting(*LAYOUT, "per_byte", 2),
    "per_byte is zero": setting(*LAYOUT, "per_byte", 0),
    "stored as another type": setting(*LAYOUT, "dtype", "float32"),
    "dtype unknown": setting(*FILED, "dtype", "object"),
    "dtype is a class": setting(*FILED, "dtype", "os.system"),
    "dtype absent": without(*FILED, "dtype"),
    "layout absent": without(*FILED, "layout"),
    "kind unknown": setting(*FILED, "kind", "pickle"),
    "kind absent": without(*FILED, "kind"),
    "name is a number": setting(*FILED, "name", 3),
    "name twice": setting(*FILED, "name", "packed"),
    "same_as itself": setting(*FILED, "same_as", 0),
    "same_as beyond": setting(*TEXT, "same_as", 99),
    "mesh beyond": setting(*FILED, "mesh", 0),
    "leaves are a dict": setting("leaves", {}),
    "leaf left out": without("leaves", 2),
    "leaf is null": setting("leaves", 0, None),
    "tree numbered twice": setting("tree", "nodes", [0, 0, 2]),
    "tree out of order": setting("tree", "nodes", [1, 0, 2]),
    "tree without a leaf": setting("tree", {"type": "list", "nodes": [0, 1]}),
    "tree beyond the leaves": setting("tree", "nodes", [0, 1, 3]),
    "tree with negative numbers": setting("tree", "nodes", [0, 1, -1]),
    "tree is a bool": setting("tree", True),
    "tree is null": setting("tree", None),
    "node type unknown": setting("tree", "type", "module"),
    "keys too few": setting("tree", "keys", ["filed"]),
    "key of an unknown type": setting("tree", "keys", [{"class": "os.system"}, "a", "b"]),
    "processes none": setting("processes", []),
    "processes are null": setting("processes", None),
    "table length of another type": setting("processes", 0, "table_bytes", "many"),
    "compression unknown": setting("compression", "gzip"),
    "step negative": setting("step", -1),
    "step is a float": setting("step", 1.5),
    "metadata is a list": setting("metadata", []),
}  # fmt: skip


class Grown(NamedTuple):
    """How much memory was taken at most meanwhile."""

    resident_kib: int
    allocated: int


@contextlib.contextmanager
def memory_is_bounded(nbytes: int) -> Iterator[None]:
    """Neither the resident memory of this process nor what Python and NumPy ask for grows more."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status_kib("VmRSS")
    tracemalloc.start()
    try:
        yield
        _, allocated = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocated < nbytes
    assert (status_kib("VmHWM") - before) << 10 < nbytes


def status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise KeyError(field)


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_manifest_is_a_clear_error(victim: Path, change: str) -> None:
    forge(victim, HOSTILE[change])
    with (
        memory_is_bounded(64 << 20),
        pytest.raises((FormatError, CorruptionError), match=r"manifest\.json"),
    ):
        jaxshard.load(victim)
    report = jaxshard.verify(victim)
    assert [p.file for p in report.problems] == ["manifest.json"]


@pytest.mark.parametrize("version", [2, 17, 999_999_999])
def test_a_newer_format_is_refused_by_its_number(victim: Path, version: int) -> None:
    forge(victim, setting("a_version", version))
    with pytest.raises(FormatError, match=f"found version {version}\nhint: pip install") as caught:
        jaxshard.load(victim)
    assert caught.value.kind is Kind.FORMAT_VERSION
    with pytest.raises(FormatError, match=f"found version {version}"):  # it is not damaged
        jaxshard.verify(victim)


def test_a_newer_format_is_told_from_damage_even_if_the_rest_is_unknown(victim: Path) -> None:
    (victim / "manifest.json").write_bytes(b'{"a_format":"jaxshard","a_version":2,"else":[]}')
    with pytest.raises(FormatError, match="found version 2"):
        jaxshard.open(victim)


@pytest.mark.parametrize(
    "text", [b"{}", b"[]", b"null", b"", b"\0" * 100, b"{" * 100, b'{"a_format":"other"}']
)
def test_a_file_of_another_program_is_an_error(victim: Path, text: bytes) -> None:
    (victim / "manifest.json").write_bytes(text)
    with pytest.raises((CorruptionError, FormatError), match=r"manifest\.json: "):
        jaxshard.load(victim)
    if text:
        seal(victim / "manifest.json", text)
        with pytest.raises((CorruptionError, FormatError), match=r"manifest\.json: "):
            jaxshard.load(victim)


@pytest.mark.parametrize("levels", [300, 100_000])
@pytest.mark.parametrize("where", ["tree", "metadata", "key"])
def test_deep_nesting_is_an_error_and_no_crash(victim: Path, levels: int, where: str) -> None:
    file = victim / "manifest.json"
    body = json.loads(file.read_bytes())
    del body["xxh3_128"]
    deep = {
        "tree": ('{"nodes":[', '],"type":"list"}'),
        "metadata": ('{"a":', "}"),
        "key": ('{"tuple":[', "]}"),
    }[where]
    nested = deep[0] * levels + "0" + deep[1] * levels
    if where == "key":
        body["tree"]["keys"][0] = "HERE"
    else:
        body[where] = "HERE"
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).replace('"HERE"', nested)
    seal(file, text.encode())
    if where == "metadata" and levels == 300:
        jaxshard.load(victim)  # deep, but not too deep for JSON
        return
    with pytest.raises(FormatError, match=r"manifest\.json: "):
        jaxshard.load(victim)
    assert not jaxshard.verify(victim).ok


def huge(shape: int, piece: int, tile: int) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        leaf = body["leaves"][0]
        leaf["shape"] = leaf["layout"]["shape"] = [shape]
        leaf["layout"]["piece"], leaf["layout"]["tile"] = [piece], [tile]

    return change


HUGE = {
    "one piece, one tile": huge(1 << 61, 1 << 61, 1 << 61),
    "one piece, many tiles": huge(1 << 61, 1 << 61, 1),
    "many pieces": huge(1 << 61, 1, 1),
    "as the writer would cut it": huge(1 << 61, 98, 98),
    "1 TiB in one piece": huge(1 << 37, 1 << 37, 1 << 37),
    "1 TiB in small pieces": huge(1 << 37, 98, 98),
}


BOUNDED = """
import resource, sys, jaxshard, numpy as np
from jaxshard import CorruptionError, FormatError

def kib(field):
    return int([l for l in open("/proc/self/status") if l.startswith(field + ":")][0].split()[1])

sound, *paths = sys.argv[1:]
jaxshard.load(sound), jaxshard.verify(sound)  # starts every pool of threads
limit = (kib("VmSize") << 10) + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (15, 15))
before = kib("VmHWM")
for path in paths:
    for name, work in {
        "load": lambda: jaxshard.load(path),
        "read": lambda: jaxshard.open(path)["filed"].read(np.s_[-3:]),
        "verify": lambda: len(jaxshard.verify(path).problems),
    }.items():
        try:
            print(path.rsplit("/")[-1], name, "gave", repr(work())[:80], flush=True)
        except (CorruptionError, FormatError) as e:
            print(path.rsplit("/")[-1], name, "error", str(e).splitlines()[0], flush=True)
        except (Exception, MemoryError) as e:
            print(path.rsplit("/")[-1], name, "broke", repr(e)[:200], flush=True)
print("grown by", kib("VmHWM") - before >> 10, "MiB")
"""


def under_limits(sound: Path, paths: list[Path]) -> list[str]:
    """Load, read and verify in a process that may take 1 GiB: hostile files take all there is."""
    argv = ["-", str(sound), *map(str, paths)]
    return run_python(
        f"import sys\nsys.argv = {argv!r}\n{BOUNDED}", devices=1, timeout_s=120
    ).splitlines()


@pytest.mark.parametrize("packed", [False, True], ids=["filed", "packed"])
def test_a_huge_leaf_with_tiny_files_is_an_error_without_memory_or_time(
    victim: Path, *, packed: bool
) -> None:
    paths = []
    for name, change in HUGE.items():
        paths.append(shutil.copytree(victim, victim.parent / name))
        forge(paths[-1], change)
        if packed:
            forge(paths[-1], setting(*LAYOUT, "packed", True))
    *lines, grown = under_limits(victim, paths)
    told = [line for line in lines if " verify " not in line]
    assert not [line for line in told if " error " not in line or "'filed'" not in line]
    verified = [line.split(" verify gave ")[1] for line in lines if " verify gave " in line]
    assert len(verified) == len(HUGE) == len(lines) - len(told), lines
    assert all(0 < int(count) < 10 for count in verified), lines
    assert int(grown.split()[2]) < 64, grown


def test_a_leaf_of_another_files_data_is_noticed(victim: Path) -> None:
    """Two leaves point to one path: their digests say that only one can be right."""
    tree = {"a": np.arange(600.0), "b": np.arange(600.0) + 1}
    jaxshard.save(victim, tree, overwrite=True, options=OPTIONS)
    forge(victim, setting("leaves", 1, "layout", "path", "a"))
    with pytest.raises((CorruptionError, FormatError), match=r"'b'|manifest"):
        jaxshard.load(victim)


def test_a_table_beyond_its_pack_is_an_error_without_memory(victim: Path) -> None:
    """The table is forged too, digest and all: an entry far behind the end of a file."""
    length = next(victim.rglob("p00000.bin")).stat().st_size
    offset_and_nbytes = (1 << 60).to_bytes(8, "little") + (1 << 50).to_bytes(8, "little")
    forge_table(victim, length - 48 + 16, offset_and_nbytes)
    with memory_is_bounded(64 << 20), pytest.raises(CorruptionError, match=r"'packed'|p00000\.bin"):
        jaxshard.load(victim)
    assert not jaxshard.verify(victim).ok


HEADER = {"pieces": 16, "tiles": 24, "entries": 32, "segment_bytes": 40, "segments": 48}


def forge_table(path: Path, at: int, data: bytes) -> None:
    """Change bytes of the table, and its digest in the manifest with it."""
    file = next(path.rglob("p00000.bin"))
    table = bytearray(file.read_bytes())
    table[at : at + len(data)] = data
    file.write_bytes(table)
    digest = xxhash.xxh3_128_hexdigest(bytes(table))
    forge(path, setting("processes", 0, "table_xxh3_128", digest))


@pytest.mark.parametrize("value", [0, 1 << 40, (1 << 64) - 1])
def test_a_forged_header_of_a_table_is_noticed_without_memory_or_time(
    victim: Path, value: int
) -> None:
    paths = []
    for name, at in HEADER.items():
        paths.append(shutil.copytree(victim, victim.parent / name))
        forge_table(paths[-1], at, value.to_bytes(8, "little"))
    *lines, grown = under_limits(victim, paths)
    assert not [line for line in lines if " broke " in line]
    verified = [line for line in lines if " verify " in line]
    assert len(verified) == len(HEADER)
    assert not [line for line in verified if line.endswith(" 0")]
    for line in lines:
        # How the pack is cut matters to nobody who finds his bytes; all else is an error.
        if " load gave " in line:
            assert line.startswith("segment")
            assert "0.,   1.,   2." in line
    assert int(grown.split()[2]) < 64, grown


@pytest.mark.parametrize("value", [-1, 1 << 60])
def test_a_table_of_another_length_than_the_manifest_says_is_damaged(
    victim: Path, value: int
) -> None:
    forge(victim, setting("processes", 0, "table_bytes", value))
    with pytest.raises((CorruptionError, FormatError), match=r"p00000\.bin|manifest\.json"):
        jaxshard.load(victim)
    assert not jaxshard.verify(victim).ok


def test_values_that_do_not_fit_their_kind_are_errors(victim: Path) -> None:
    for value in (None, 7, ["hello"], {"a": 1}):
        forge(victim, setting(*TEXT, "value", value))
        with pytest.raises(FormatError, match="leaf 'text': expected the value of a str"):
            jaxshard.load(victim)


def test_a_class_that_a_manifest_names_is_never_imported(victim: Path) -> None:
    (victim.parent / "bomb.py").write_text("raise SystemExit('executed')")
    forge(victim, lambda body: body["tree"].update({"class": "bomb.Bomb"}))
    assert jaxshard.load(victim)["text"] == "hello"
    assert "bomb" not in __import__("sys").modules


def test_nothing_there_and_a_file_there_are_not_damage(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="found nothing"):
        jaxshard.verify(tmp_path / "nothing")
    (tmp_path / "file").write_text("hello")
    with pytest.raises(NotFoundError, match="expected a checkpoint"):
        jaxshard.verify(tmp_path / "file")


def test_packed_tiles_of_other_sizes_than_those_of_the_grid_are_noticed(tmp_path: Path) -> None:
    value = np.arange(33, dtype=np.float32)
    jaxshard.save(tmp_path / "c", {"w": value}, options=SaveOptions(piece_bytes_max=24))
    checkpoint = jaxshard.open(tmp_path / "c")
    (table,) = checkpoint.source.tables
    entries = table.entries.copy()
    sizes = entries["nbytes"]
    assert sizes.tolist() == [24, 24, 24, 24, 24, 12]
    sizes[[0, 5]] = sizes[[5, 0]]  # their sum stays the same
    checkpoint.source.tables[0] = dataclasses.replace(table, entries=entries)
    with pytest.raises(CorruptionError, match="'w': expected packed tiles of the sizes") as caught:
        checkpoint["w"].read()
    assert caught.value.kind == Kind.TABLE_DAMAGED
