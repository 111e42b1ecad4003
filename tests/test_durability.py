"""The order of writes that docs/format.md promises, read from what the kernel was asked to do."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import REPOSITORY

import jaxshard

PROGRAM = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np, jaxshard
from support import mesh, on
root = pathlib.Path(sys.argv[1])
options = jaxshard.SaveOptions(pack_below=100, piece_bytes_max=4000)

def tree(step):
    return {"w": jax.device_put(jnp.arange(4000.0).reshape(40, 100) + step, on(mesh((2,)), "a")),
            "deep": {"er": {"b": np.arange(300.0)}, "t": np.arange(900.0) + step},
            "small": np.ones(3, np.uint8), "n": step}

jaxshard.save(root / "new" / "place" / "once", tree(0), options=options)
jaxshard.save(root / "twice", tree(1), options=options)
(root / "MARK").touch()
jaxshard.save(root / "twice", tree(2), overwrite=True, options=options)
keep = jaxshard.Keep(last=1)
with jaxshard.ResumeManager(root / "run", keep=keep, options=options) as run:
    run.save(1, tree(1), wait=True)
    run.save(2, tree(2), wait=True)
"""
OPENING = {"openat", "open", "creat"}
MAKING = {"mkdir", "mkdirat"}
NAMING = {"link", "linkat", "rename", "renameat", "renameat2"}
REMOVING = {"unlink", "unlinkat", "rmdir"}
WRITING = {"write", "pwrite64", "writev", "pwritev"}
SYNCING = {"fsync", "fdatasync"}
LOCKING = {"flock", "fcntl"}


class Call(NamedTuple):
    """One successful system call: when it began and ended (line numbers), and its paths."""

    name: str
    begin: int
    end: int
    paths: tuple[str, ...]
    text: str


_PATH = re.compile(r'(?:AT_FDCWD(?:<[^>]*>)?|\d+<([^>]*)>), "([^"]*)"|"([^"]*)"|\d+<([^>]*)>')


def calls_of(record: str) -> list[Call]:
    """The successful calls of a record of `strace -f -y`, by when they ended."""
    unfinished: dict[str, tuple[int, str]] = {}
    calls = []
    for at, line in enumerate(record.splitlines()):
        pid, _, text = line.partition(" ")
        text, begin = text.strip(), at
        if text.endswith("<unfinished ...>"):
            unfinished[pid] = (at, text.removesuffix("<unfinished ...>"))
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>", text)
        if resumed:
            begin, first = unfinished.pop(pid)
            text = first + text[resumed.end() :]
        found = re.match(r"(\w+)\((.*)\)\s+= (\d+)", text)
        if found:
            calls.append(Call(found[1], begin, at, tuple(paths_of(found[1], found[2])), text))
    return calls


def paths_of(name: str, arguments: str) -> Iterator[str]:
    if name in WRITING | SYNCING | LOCKING:  # on a descriptor; what is written is no path
        found = re.match(r"\d+<([^>]*)>", arguments)
        yield from (found[1],) if found else ()
        return
    for below, relative, quoted, descriptor in _PATH.findall(arguments):
        inside = below and not relative.startswith("/")
        yield f"{below}/{relative}" if inside else relative or quoted or descriptor


class Record(NamedTuple):
    """All that happened below one directory."""

    root: Path
    calls: list[Call]

    def of(self, names: set[str], path: str | Path, nth: int = 0) -> Iterator[Call]:
        """Calls with a path in the given place."""
        return (c for c in self.calls if c.name in names and c.paths[nth : nth + 1] == (str(path),))

    def below(self, path: Path) -> "Record":
        """What happened there; what gives a file of somewhere else a name there too."""
        inside = f"{path}/"
        calls = [
            c
            for c in self.calls
            if any(p == str(path) or p.startswith(inside) for p in c.paths)
            and not (c.name in NAMING and not c.paths[-1].startswith(inside))
        ]
        return Record(path, calls)

    def commit(self) -> Call:
        """The call that gave the manifest of this checkpoint its name."""
        (call,) = self.of(NAMING, self.root / "manifest.json", 1)
        return call

    def is_synced(self, path: Path, after: int, before: int) -> bool:
        return any(c.begin > after and c.end < before for c in self.of(SYNCING, path))


_records: list[Record] = []


@pytest.fixture
def record(need_tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The program above under strace, once for all tests."""
    strace = need_tool("strace")
    if not _records:
        root = tmp_path_factory.mktemp("traced")
        _records.append(Record(root, calls_of(traced(strace, root, root.with_name("strace")))))
    return _records[0]


def traced(strace: str, root: Path, log: Path) -> str:
    names = OPENING | MAKING | NAMING | REMOVING | WRITING | SYNCING | LOCKING
    known = [f"?{name}" for name in sorted(names)]  # some machines lack the older calls
    done = subprocess.run(
        [strace, "-f", "-y", "-o", log, "-e", f"trace={','.join(known)}", "-e", "signal=none",
         sys.executable, "-c", PROGRAM, root],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}",
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "PTRACE" in done.stderr and done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return log.read_text()


def shared(checkpoint: Record) -> dict[Path, Call]:
    """Files of another checkpoint that got a second name in this one."""
    inside = f"{checkpoint.root}/"
    named = (c for c in checkpoint.calls if c.name in NAMING)
    return {Path(c.paths[1]): c for c in named if not c.paths[0].startswith(inside)}


def since_mark(record: Record, path: Path) -> Record:
    """What happened below a path after the program made its mark."""
    mark = next(c.end for c in record.calls if str(record.root / "MARK") in c.paths)
    below = record.below(path)
    return Record(path, [c for c in below.calls if c.begin > mark])


def checkpoints(record: Record) -> list[Record]:
    """Each save of the program on its own."""
    overwritten = record.below(record.root / "twice")
    after = since_mark(record, record.root / "twice")
    return [
        record.below(record.root / "new" / "place" / "once"),
        Record(overwritten.root, overwritten.calls[: -len(after.calls)]),
        after,
        *(record.below(record.root / "run" / f"step_0000000{n}") for n in (1, 2)),
    ]


def written(record: Record) -> dict[Path, tuple[str, Call]]:
    """Files that were created and kept: the name they were opened with, and the creating call."""
    opened = {c.paths[-1]: c for c in record.calls if c.name in OPENING and "O_CREAT" in c.text}
    named = {c.paths[0]: Path(c.paths[1]) for c in record.calls if c.name in NAMING}
    return {named.get(name, Path(name)): (name, call) for name, call in opened.items()}


@pytest.fixture(params=range(5), ids=["new", "first", "overwrite", "step 1", "step 2"])
def checkpoint(record: Record, request: pytest.FixtureRequest) -> Record:
    return checkpoints(record)[request.param]


def data_files(checkpoint: Record) -> dict[Path, tuple[str, Call]]:
    return {f: how for f, how in written(checkpoint).items() if f.name != "manifest.json"}


def test_the_record_is_of_checkpoints_with_every_kind_of_file(record: Record) -> None:
    for checkpoint in checkpoints(record):
        files = [*written(checkpoint), *shared(checkpoint)]
        below = [str(f.relative_to(checkpoint.root)) for f in files]
        assert "manifest.json" in below
        assert len([name for name in below if "/data/w/c/" in name]) >= 4
        for part in ("/data/zarr.json", "/data/deep/er/b/c/", "/packs/00000/c/0", "/p00000.bin"):
            assert [name for name in below if part in name], part
    assert [len(shared(checkpoint)) for checkpoint in checkpoints(record)] == [0, 0, 0, 0, 1]
    assert jaxshard.verify(record.root / "twice").ok
    assert jaxshard.open(record.root / "run").all_steps() == [2]


def test_every_file_is_synced_after_its_last_write_and_before_the_commit(
    checkpoint: Record,
) -> None:
    commit = checkpoint.commit()
    for file, (opened_as, _) in written(checkpoint).items():
        writes = [c.end for c in checkpoint.of(WRITING, opened_as)]
        assert writes, f"{file} was never written"
        names = (Path(opened_as), file)  # TensorStore's files are synced under their last name
        assert any(checkpoint.is_synced(n, max(writes), commit.begin) for n in names), file


def test_the_directory_of_every_file_is_synced_before_the_commit(checkpoint: Record) -> None:
    commit = checkpoint.commit()
    for file, (opened_as, opened) in data_files(checkpoint).items():
        named = next(checkpoint.of(NAMING, opened_as), opened)
        assert checkpoint.is_synced(file.parent, named.end, commit.begin), file


def test_a_file_of_the_step_before_is_durable_under_its_new_name_before_the_commit(
    record: Record,
) -> None:
    second = record.below(record.root / "run" / "step_00000002")
    first = record.below(record.root / "run" / "step_00000001")
    ((file, named),) = shared(second).items()
    assert first.commit().end < named.begin
    assert second.is_synced(file.parent, named.end, second.commit().begin)


def test_the_directory_above_every_new_directory_is_synced_before_the_commit(
    record: Record,
) -> None:
    for checkpoint in checkpoints(record):
        commit = checkpoint.commit()
        made = [c for c in checkpoint.calls if c.name in MAKING]
        assert len(made) >= 10
        for call in made:
            assert record.is_synced(Path(call.paths[-1]).parent, call.end, commit.begin), call
    # And those above the checkpoint that were not there.
    for name in ("new", "new/place", "new/place/once", "twice", "run", "run/step_00000001"):
        made_by = next(c for c in record.calls
                       if c.name in MAKING and c.paths == (str(record.root / name),))  # fmt: skip
        named = min(c.begin for c in record.below(record.root / name).calls
                    if c.name in NAMING and "manifest.json" in c.text)  # fmt: skip
        assert record.is_synced((record.root / name).parent, made_by.end, named), name


def test_directories_are_durable_before_any_file_is_made(checkpoint: Record) -> None:
    """So that no file is ever made by TensorStore in a directory that nobody synced."""
    made = {c.paths[-1]: c.end for c in checkpoint.calls if c.name in MAKING}
    first = min(opened.begin for _, opened in data_files(checkpoint).values())
    assert max(made.values()) < first
    for directory, end in made.items():
        if directory != str(checkpoint.root):
            assert checkpoint.is_synced(Path(directory).parent, end, first), directory


def test_tables_follow_the_data_and_the_manifest_follows_the_tables(checkpoint: Record) -> None:
    files = written(checkpoint)
    tables = {f: how for f, how in files.items() if "tables" in f.parts}
    data = {f: how for f, how in data_files(checkpoint).items() if f not in tables}
    first_table = min(opened.begin for _, opened in tables.values())
    for file, (opened_as, opened) in data.items():
        assert opened.end < first_table
        named = next(checkpoint.of(NAMING, opened_as), opened)
        assert checkpoint.is_synced(file.parent, named.end, first_table), file
    _, temporary = files[checkpoint.root / "manifest.json"]
    for file in tables:
        assert checkpoint.is_synced(file, first_table, temporary.begin)
        assert checkpoint.is_synced(file.parent, first_table, temporary.begin)


def test_the_manifest_is_synced_under_another_name_then_named_then_its_directory_is_synced(
    checkpoint: Record,
) -> None:
    commit = checkpoint.commit()
    temporary, opened = written(checkpoint)[checkpoint.root / "manifest.json"]
    assert re.fullmatch(r"\.tmp-[0-9a-f]{16}", Path(temporary).name)
    assert Path(temporary).parent == checkpoint.root
    assert checkpoint.is_synced(Path(temporary), opened.end, commit.begin)
    assert any(c.begin > commit.end for c in checkpoint.of(SYNCING, checkpoint.root))


def test_the_manifest_is_linked_if_new_and_renamed_if_replaced(record: Record) -> None:
    kinds = [checkpoint.commit().name.removesuffix("at") for checkpoint in checkpoints(record)]
    assert kinds == ["link", "link", "rename", "link", "link"]


def test_the_attempt_that_was_replaced_goes_after_the_new_manifest_is_durable(
    record: Record,
) -> None:
    checkpoint = since_mark(record, record.root / "twice")
    commit = checkpoint.commit()
    removed = [c for c in checkpoint.calls if c.name in REMOVING]
    assert len(removed) > 20
    first = min(c.begin for c in removed)
    assert checkpoint.is_synced(checkpoint.root, commit.end, first)


def test_a_step_that_is_deleted_loses_its_manifest_first_and_durably(record: Record) -> None:
    deleted = record.below(record.root / "run" / "step_00000001")
    newer = record.below(record.root / "run" / "step_00000002").commit()
    removed = [
        c for c in deleted.calls if c.name in REMOVING and not c.paths[-1].startswith(".tmp-")
        and ".tmp-" not in c.paths[-1]
    ]  # fmt: skip
    assert removed[0].paths[-1] == str(deleted.root / "manifest.json")
    assert removed[0].begin > newer.end
    assert len(removed) > 20
    assert deleted.is_synced(deleted.root, removed[0].end, removed[1].begin)


def test_the_description_of_a_run_is_as_durable_as_a_manifest(record: Record) -> None:
    run = record.below(record.root / "run")
    (named,) = run.of(NAMING, run.root / "run.json", 1)
    assert run.is_synced(Path(named.paths[0]), -1, named.begin)
    first_step = next(run.of(MAKING, run.root / "step_00000001"))
    assert run.is_synced(run.root, named.end, first_step.begin)


def test_nothing_is_ever_locked(record: Record) -> None:
    locking = r"flock\(|, F_(OFD_)?SETLK|, F_SETLEASE"
    locks = [c for c in record.calls if c.name in LOCKING and re.search(locking, c.text)]
    assert not [c for c in locks if str(record.root) in c.text]


def test_nothing_is_written_to_a_file_that_already_has_its_name(record: Record) -> None:
    """Data files appear whole or belong to an attempt; a committed file is never written to."""
    for checkpoint in checkpoints(record):
        commit = checkpoint.commit()
        late = [c for c in checkpoint.calls if c.name in WRITING and c.end > commit.begin]
        assert not late
