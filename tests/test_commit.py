"""All or nothing: conflicts, overwriting, races, leftovers, full and read-only disks, time-outs."""

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_same_tree, run_python

import jaxshard
from jaxshard import (
    CheckpointReplacedError,
    ConflictError,
    CorruptionError,
    Every,
    JaxshardError,
    Keep,
    LoadOptions,
    NotCommittedError,
    NotFoundError,
    ResumeManager,
    SaveOptions,
    StorageError,
    StorageTimeoutError,
    UnsupportedLeafError,
    _commit,
)
from jaxshard._errors import Kind

FILES = SaveOptions(pack_below=0)


def tree_of(value: int) -> dict[str, Any]:
    """A tree of files and inline values, all of which tell its number."""
    return {
        "w": jnp.full((64, 32), value, jnp.float32),
        "b": np.full(10, value, np.int16),
        "n": value,
    }


def picture(path: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def attempts(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name.startswith("a-"))


def saved(path: Path, value: int = 1, **options: Any) -> Path:
    jaxshard.save(path, tree_of(value), **options)
    return path


def assert_holds(path: Path, value: int) -> None:
    assert_same_tree(jaxshard.load(path, tree_of(0)), tree_of(value))
    report = jaxshard.verify(path)
    assert report.ok
    assert not report.leftovers


@pytest.fixture(params=["save", "save_async"])
def save_by(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Both doors; the second one waited for."""
    if request.param == "save":
        return jaxshard.save
    return lambda *args, **kwargs: jaxshard.save_async(*args, **kwargs).wait()


# Something is there -------------------------------------------------------------------------


def test_saving_onto_a_checkpoint_is_a_conflict_that_changes_nothing(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    path = saved(tmp_path / "c")
    before = picture(path)
    with pytest.raises(
        ConflictError, match=r"found a committed checkpoint\nhint: .*overwrite=True"
    ):
        save_by(path, tree_of(2))
    assert picture(path) == before
    with pytest.raises(FileExistsError, match="committed checkpoint"):
        save_by(path, tree_of(2))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_is_never_saved_over(
    tmp_path: Path, save_by: Callable[..., Any], *, overwrite: bool
) -> None:
    with ResumeManager(tmp_path / "run") as run:
        run.save(1, tree_of(1), wait=True)
    before = picture(tmp_path)
    with pytest.raises(ConflictError, match=r"found a run directory\nhint: .*ResumeManager"):
        save_by(tmp_path / "run", tree_of(2), overwrite=overwrite)
    assert picture(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_somebody_else_are_never_saved_over(
    tmp_path: Path, save_by: Callable[..., Any], *, overwrite: bool
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    before = picture(tmp_path)
    with pytest.raises(ConflictError, match=r"found 'chapter1.tex'") as caught:
        save_by(tmp_path / "thesis", tree_of(1), overwrite=overwrite)
    assert caught.value.kind is Kind.NOT_A_CHECKPOINT
    assert picture(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_place_of_the_checkpoint_is_a_conflict(
    tmp_path: Path, save_by: Callable[..., Any], *, overwrite: bool
) -> None:
    (tmp_path / "model.bin").write_bytes(b"other")
    with pytest.raises(ConflictError, match="found a file"):
        save_by(tmp_path / "model.bin", tree_of(1), overwrite=overwrite)
    assert (tmp_path / "model.bin").read_bytes() == b"other"


def test_an_empty_directory_and_leftovers_are_nothing(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    (tmp_path / "empty").mkdir()
    save_by(tmp_path / "empty", tree_of(1))
    assert_holds(tmp_path / "empty", 1)
    left = tmp_path / "left" / "a-0123456789abcdef" / "data" / "w" / "c"
    left.mkdir(parents=True)
    (left / "0").write_bytes(b"half of a file")
    (tmp_path / "left" / ".tmp-0123456789abcdef").write_bytes(b"{")
    save_by(tmp_path / "left", tree_of(2))
    assert_same_tree(jaxshard.load(tmp_path / "left", tree_of(0)), tree_of(2))


def test_a_run_is_not_begun_in_a_checkpoint_or_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    before = picture(path)
    with pytest.raises(ConflictError, match="found a checkpoint or a file"):
        ResumeManager(path)
    assert picture(path) == before
    (tmp_path / "file").write_text("hello")
    with pytest.raises(ConflictError, match="found a checkpoint or a file"):
        ResumeManager(tmp_path / "file")


def test_a_tree_that_cannot_be_saved_leaves_no_trace(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    with pytest.raises(UnsupportedLeafError, match="'bad': "):
        save_by(tmp_path / "new" / "c", {"good": jnp.ones(3), "bad": object()})
    assert not (tmp_path / "new").exists()


# Overwriting --------------------------------------------------------------------------------


def test_overwrite_replaces_everything_and_deletes_the_old_attempt(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    path = saved(tmp_path / "c", 1)
    old = attempts(path)
    save_by(path, tree_of(2), overwrite=True)
    assert_holds(path, 2)
    assert len(attempts(path)) == 1
    assert attempts(path) != old


def test_overwrite_of_nothing_is_a_save(tmp_path: Path, save_by: Callable[..., Any]) -> None:
    save_by(tmp_path / "c", tree_of(1), overwrite=True)
    assert_holds(tmp_path / "c", 1)


def test_overwriting_with_another_tree_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1, options=FILES)
    jaxshard.save(path, {"other": np.arange(5)}, overwrite=True, options=FILES)
    assert_same_tree(jaxshard.load(path), {"other": np.arange(5)})
    files = [name for name in picture(path) if "/data/" in name and "/c/" in name]
    assert [name.split("/data/")[1] for name in files] == ["other/c/0"]


def test_overwrite_mends_a_damaged_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1)
    (path / "manifest.json").write_bytes(b"{}")
    jaxshard.save(path, tree_of(2), overwrite=True)
    assert_same_tree(jaxshard.load(path, tree_of(0)), tree_of(2))
    assert jaxshard.verify(path).ok


@pytest.mark.parametrize("options", [SaveOptions(), FILES], ids=["packed", "filed"])
@pytest.mark.parametrize("end", ["overwrite", "delete", "delete the manifest"])
def test_a_reader_of_a_replaced_checkpoint_is_told_so(
    tmp_path: Path, options: SaveOptions, end: str
) -> None:
    path = saved(tmp_path / "c", 1, options=options)
    fresh, warm = jaxshard.open(path), jaxshard.open(path)
    warm["b"].read()
    if end == "overwrite":
        saved(path, 2, options=options, overwrite=True)
    elif end == "delete":
        shutil.rmtree(path)
    else:
        (path / "manifest.json").unlink()
        shutil.rmtree(path / attempts(path)[0])
    for reader in (fresh, warm):
        assert reader["n"].read() == 1  # lies in the manifest that was read
        with pytest.raises(
            CheckpointReplacedError, match=r"was replaced or deleted .*\nhint: open"
        ):
            reader["w"].read()


def test_a_reader_never_sees_a_mixture_of_two_checkpoints(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 0, options=FILES)
    stop = threading.Event()
    wrong: list[Any] = []
    seen: set[int] = set()

    def read() -> None:
        while not stop.is_set():
            try:
                tree = jaxshard.load(path)
            except CheckpointReplacedError:
                continue
            except Exception as e:  # noqa: BLE001  (anything else is what the test looks for)
                wrong.append(e)
                return
            numbers = {int(tree["n"]), *map(int, np.unique(tree["w"])), *map(int, tree["b"])}
            seen.update(numbers)
            if len(numbers) != 1:
                wrong.append(numbers)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for value in range(1, 16):
        saved(path, value, options=FILES, overwrite=True)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert len(seen) > 1
    assert_holds(path, 15)


def while_another_thread(reads: Callable[[], Any], work: Callable[[], None]) -> list[Any]:
    """Results and errors of a thread that reads again and again while `work` goes on."""
    stop = threading.Event()
    results: list[Any] = []

    def read() -> None:
        while not stop.is_set():
            try:
                results.append(reads())
            except Exception as e:  # noqa: BLE001  (handed to the test)
                results.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        work()
    finally:
        stop.set()
        reader.join()
    return results


@pytest.mark.parametrize("look", ["load", "verify"])
def test_a_replacement_in_the_middle_of_a_look_is_never_taken_for_damage(
    tmp_path: Path, look: str
) -> None:
    """Many files, so that they are deleted while the reader is somewhere among them."""
    path, looks = tmp_path / "c", {"load": jaxshard.load, "verify": jaxshard.verify}
    kinds = set()
    for delay_ms in (5, 20, 40):
        jaxshard.save(path, many_small_files(count=150), overwrite=True, options=FILES)

        def replace(delay_ms: int = delay_ms) -> None:
            time.sleep(delay_ms / 1000)
            saved(path, 1, overwrite=True)

        for result in while_another_thread(lambda: looks[look](path), replace):
            kinds.add(type(result).__name__)
            if look == "verify" and not isinstance(result, Exception):
                assert result.ok, result
    assert kinds <= {"CheckpointReplacedError", "VerifyReport", "dict"}


def test_a_reader_of_a_run_never_takes_a_pruned_step_for_damage(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with ResumeManager(root, keep=Keep(last=1), options=FILES) as run:
        run.save(1, tree_of(1), wait=True)
        found = jaxshard.open(root)

        def train() -> None:
            for step in range(2, 22):
                run.save(step, tree_of(step), wait=True)

        got = while_another_thread(lambda: found.load(tree_of(0)), train)
    errors = [result for result in got if isinstance(result, Exception)]
    gone = (CheckpointReplacedError, NotFoundError, NotCommittedError)
    assert not [e for e in errors if not isinstance(e, gone)]
    steps = [tree["n"] for tree in got if tree not in errors]
    assert len(set(steps)) > 1
    assert steps == sorted(steps)


def test_a_failed_overwrite_leaves_the_old_checkpoint_whole(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    path = saved(tmp_path / "c", 1, options=FILES)
    before = picture(path)
    with pytest.raises(StorageTimeoutError, match="timeout_s"):
        save_by(path, big_tree(), overwrite=True, options=IMPATIENT)
    assert picture(path) == before
    assert_holds(path, 1)


def test_an_overwrite_that_cannot_delete_the_old_attempt_still_holds_the_new_one(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    """The manifest has been replaced by then: the new attempt must not be given up."""
    path = saved(tmp_path / "c", 1)
    (old,) = attempts(path)
    # Somebody moved the data to another disk and left a link, which rmtree refuses.
    shutil.move(path / old, tmp_path / "elsewhere")
    (path / old).symlink_to(tmp_path / "elsewhere")
    assert_same_tree(jaxshard.load(path, tree_of(0)), tree_of(1))
    with contextlib.suppress(JaxshardError):
        save_by(path, tree_of(2), overwrite=True)
    assert_same_tree(jaxshard.load(path, tree_of(0)), tree_of(2))
    assert jaxshard.verify(path).ok


# Two writers --------------------------------------------------------------------------------


def race(work: Callable[[int], Any], writers: int) -> list[Any]:
    """Call from several threads at once; what each got, or its error."""
    barrier = threading.Barrier(writers)
    results: list[Any] = [None] * writers

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except Exception as e:  # noqa: BLE001  (handed to the test)
            results[number] = e

    threads = [threading.Thread(target=run, args=(n,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_writers_that_race_exactly_one_wins(tmp_path: Path) -> None:
    kinds = set()
    for round_ in range(12):
        path = tmp_path / str(round_)
        got = race(lambda number, path=path: jaxshard.save(path, tree_of(number)), 3)
        winners = [n for n, result in enumerate(got) if not isinstance(result, Exception)]
        losers = [result for result in got if isinstance(result, Exception)]
        assert len(winners) == 1
        assert all(isinstance(e, ConflictError) for e in losers), losers
        kinds |= {e.kind for e in losers}
        assert_holds(path, winners[0])
        assert len(attempts(path)) == 1
    assert Kind.COMMIT_RACE in kinds


def test_of_writers_that_race_in_memory_exactly_one_wins(tmp_path: Path) -> None:
    for round_ in range(12):
        url = f"memory://{tmp_path.name}/{round_}"
        got = race(lambda number, url=url: jaxshard.save(url, tree_of(number)), 3)
        winners = [n for n, result in enumerate(got) if not isinstance(result, Exception)]
        assert len(winners) == 1
        assert {type(result) for n, result in enumerate(got) if n not in winners} == {ConflictError}
        assert_same_tree(jaxshard.load(url, tree_of(0)), tree_of(winners[0]))
        report = jaxshard.verify(url)
        assert report.ok
        assert not report.leftovers


def test_of_processes_that_race_exactly_one_wins(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys, time
import jax.numpy as jnp, numpy as np, jaxshard
from test_commit import tree_of
root, me = pathlib.Path({str(tmp_path)!r}), int(sys.argv[1])
jaxshard.save(root / f"warm{{me}}", tree_of(me))
(root / f"ready{{me}}").touch()
while not all((root / f"ready{{n}}").exists() for n in range(2)):
    time.sleep(0.001)
begin = time.time() + 0.2
for number in range(8):
    while time.time() % 0.1 > 0.005:
        pass
    try:
        jaxshard.save(root / str(number), tree_of(me))
        print(number, "won")
    except jaxshard.ConflictError as e:
        print(number, "lost", e.kind)
"""
    writers = []

    def write(number: int) -> None:
        writers.append((number, run_python(f"import sys\nsys.argv = ['', '{number}']\n{code}")))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writers) == 2
    for number in range(8):
        told = {me: line for me, out in writers for line in out.splitlines()
                if line.startswith(f"{number} ")}  # fmt: skip
        winners = [me for me, line in told.items() if line.endswith("won")]
        assert len(told) == 2
        assert len(winners) == 1, told
        assert_holds(tmp_path / str(number), winners[0])


def test_overwriters_that_race_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 99)
    for _ in range(8):
        got = race(lambda number: jaxshard.save(path, tree_of(number), overwrite=True), 3)
        assert not [result for result in got if isinstance(result, Exception)]
        value = jaxshard.load(path)["n"]
        assert value in {0, 1, 2}
        assert_same_tree(jaxshard.load(path, tree_of(0)), tree_of(value))
        assert jaxshard.verify(path).ok


def test_a_commit_whose_answer_was_lost_counts(tmp_path: Path) -> None:
    """The same manifest again is no conflict (docs/format.md, "Write order")."""
    from jaxshard._manifest import Manifest
    from jaxshard._store import open_store

    path = saved(tmp_path / "c", 1)
    store = open_store(path)
    manifest = Manifest.from_bytes((path / "manifest.json").read_bytes(), "manifest.json")
    _commit.commit(store, manifest, overwrite=False)
    assert_holds(path, 1)
    other = Manifest.from_bytes(
        (saved(tmp_path / "d", 2) / "manifest.json").read_bytes(), "manifest.json"
    )
    with pytest.raises(ConflictError, match="another save committed here first") as caught:
        _commit.commit(store, other, overwrite=False)
    assert caught.value.kind is Kind.COMMIT_RACE
    assert_holds(path, 1)


# What is not a checkpoint -------------------------------------------------------------------


def test_attempts_without_a_manifest_are_not_committed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1)
    (path / "manifest.json").unlink()
    for look in (jaxshard.load, jaxshard.open, jaxshard.verify):
        with pytest.raises(NotCommittedError, match="begun here and never committed") as caught:
            look(path)
        assert caught.value.kind is Kind.NOT_COMMITTED


def test_a_temporary_manifest_alone_is_not_committed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1)
    (path / "manifest.json").rename(path / ".tmp-0123456789abcdef")
    with pytest.raises(NotCommittedError, match="never committed"):
        jaxshard.load(path)
    shutil.rmtree(path / attempts(path)[0])
    with pytest.raises((NotCommittedError, NotFoundError), match=r"found nothing|never committed"):
        jaxshard.load(path)


def test_nothing_is_not_found_and_the_hint_names_neighbours(tmp_path: Path) -> None:
    for look in (jaxshard.load, jaxshard.open, jaxshard.verify):
        with pytest.raises(NotFoundError, match="expected a checkpoint, found nothing"):
            look(tmp_path / "c")
    with pytest.raises(FileNotFoundError, match="found nothing"):
        jaxshard.load(tmp_path / "c")
    saved(tmp_path / "best", 1)
    with pytest.raises(NotFoundError, match=r"\nhint: .*best"):
        jaxshard.load(tmp_path / "bets")


def test_other_files_are_not_found_either(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(NotFoundError, match=r"found other files and no manifest.json"):
        jaxshard.load(tmp_path)


def test_a_run_is_not_found_and_the_hint_names_its_newest_step(tmp_path: Path) -> None:
    with ResumeManager(tmp_path / "run") as run:
        with pytest.raises(NotFoundError, match="hint: no step was committed in it yet") as caught:
            jaxshard.load(tmp_path / "run")
        run.save(3, tree_of(3), wait=True)
        run.save(20, tree_of(20), wait=True)
    assert caught.value.kind is Kind.IS_A_RUN
    newest = tmp_path / "run" / "step_00000020"
    for look in (jaxshard.load, jaxshard.verify):
        with pytest.raises(NotFoundError, match=f"a run.*\nhint: load {newest}$") as caught:
            look(tmp_path / "run")
        assert caught.value.kind is Kind.IS_A_RUN
    assert jaxshard.load(newest)["n"] == 20


# Copies and leftovers -----------------------------------------------------------------------


def test_a_copy_stays_valid_wherever_it_is_and_however_it_was_made(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with ResumeManager(root, when=Every(steps=1)) as run:
        for step in (1, 2):
            run.save(step, tree_of(step), wait=True)
    (tmp_path / "a").mkdir()
    copies = [Path(shutil.copytree(root, tmp_path / "by-python")), tmp_path / "a" / "by-cp",
              tmp_path / "a" / "by-tar", tmp_path / "moved"]  # fmt: skip
    subprocess.run(["cp", "-r", root, copies[1]], check=True)
    copies[2].mkdir()
    subprocess.run(f"tar -C {root} -cf - . | tar -C {copies[2]} -xf -", shell=True, check=True)
    root.rename(copies[3])
    for copy in copies:
        found = jaxshard.open(copy)
        assert found.all_steps() == [1, 2]
        assert_same_tree(found.load(tree_of(0)), tree_of(2))
        assert_holds(copy / "step_00000001", 1)
        with ResumeManager(copy) as run:  # a copy is not taken for unfinished, and goes on
            state, step = run.resume(tree_of(0))
            assert step == 2
            assert_same_tree(state, tree_of(2))
            assert run.all_steps() == [1, 2]
            run.save(3, tree_of(3), wait=True)
        assert_holds(copy / "step_00000003", 3)


def test_a_copy_that_was_cut_short_is_never_taken_for_whole(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1, options=FILES)
    files = sorted(picture(path))
    for count in range(len(files)):
        copy = tmp_path / "copy"
        for name in files[:count]:  # the manifest comes last in this order
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path / name, copy / name)
        with pytest.raises((NotFoundError, NotCommittedError, CorruptionError), match=r"."):
            jaxshard.load(copy)
        shutil.rmtree(copy, ignore_errors=True)
    assert files[-1] == "manifest.json"


def test_stale_longer_temporaries_do_no_harm(tmp_path: Path) -> None:
    """Lock files and temporaries of killed writers, longer than what is written now."""
    long = b"\xff" * 100_000
    root = tmp_path / "run"
    with ResumeManager(root) as run:
        run.save(1, tree_of(1), wait=True)
    step = root / "step_00000002"
    stale = step / "a-00000000deadbeef" / "data" / "w" / "c" / "0"
    stale.mkdir(parents=True)
    for file in (stale / "0", stale / "0.__lock", stale / ".tmp-0123456789abcdef",
                 step / ".tmp-0123456789abcdef", root / ".tmp-0123456789abcdef",
                 root / "run.json.__lock"):  # fmt: skip
        file.write_bytes(long)
    with ResumeManager(root, options=FILES) as run:
        assert run.all_steps() == [1]
        run.save(2, tree_of(2), wait=True)
        assert run.all_steps() == [1, 2]
    assert_holds(step, 2)  # without leftovers: they were swept behind the save
    assert long not in picture(step).values()


# Disks --------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(path: Path, options: str) -> Iterator[Path]:
    """A file system in memory; skips where this user may not mount one."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no right to mount a small disk: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def many_small_files(value: int = 0, count: int = 700) -> dict[str, Any]:
    """A tree whose bytes fit easily and whose files do not: each takes a block or two."""
    return {f"leaf{n:04d}": np.full(100, value + n, np.int32) for n in range(count)}


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        path = saved(disk / "c", 1)
        before = picture(disk)
        for where in (disk / "new" / "d", path):
            with pytest.raises(StorageError, match=r"expected 17,.* free bytes, found 8,") as e:
                save_by(where, {"w": np.zeros(4 << 20, np.float32)}, overwrite=True)
            assert e.value.kind is Kind.NO_SPACE
        assert picture(disk) == before
        assert [p.name for p in disk.iterdir()] == ["c"]
        assert_holds(path, 1)


# 700 files of 400 bytes and 700 zarr.json: 2.8 MB each, more than the sizes say.
@pytest.mark.parametrize(
    "options", ["size=2500k", "size=4m", "size=16m,nr_inodes=500"],
    ids=["full at the data", "full at the metadata", "out of inodes"],
)  # fmt: skip
def test_a_disk_that_fills_up_in_mid_save_leaves_everything_as_it_was(
    tmp_path: Path, save_by: Callable[..., Any], options: str
) -> None:
    with small_disk(tmp_path / "disk", options) as disk:
        path = saved(disk / "c", 1)
        before = picture(disk)
        for where in (disk / "d", path):
            with pytest.raises(StorageError, match=r"(?i)no space left on device") as caught:
                save_by(where, many_small_files(), overwrite=True, options=FILES)
            assert caught.value.kind is Kind.NO_SPACE
            assert caught.value.hint
            assert "earlier checkpoints are untouched" in caught.value.hint
        assert picture(disk) == before
        assert_holds(path, 1)
        with pytest.raises((NotFoundError, NotCommittedError), match=r"found nothing|never comm"):
            jaxshard.load(disk / "d")
        jaxshard.save(disk / "d", tree_of(2))  # what was written is gone: there is room again
        assert_holds(disk / "d", 2)


def test_a_run_goes_on_when_the_disk_is_full_and_when_there_is_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        with ResumeManager(disk / "run", when=Every(steps=1), options=FILES) as run:
            run.maybe_save(1, tree_of(1)).wait()
            run.maybe_save(2, many_small_files())
            run.wait_until_finished()
            assert "step 2 was not saved, training goes on: " in caplog.text
            assert run.latest_step() == 1
            assert run.all_steps() == [1]
            run.maybe_save(3, tree_of(3)).wait()
            assert run.latest_step() == 3
        assert jaxshard.open(disk / "run").all_steps() == [1, 3]
        assert_holds(disk / "run" / "step_00000003", 3)
        with ResumeManager(disk / "run") as run:
            assert run.resume(tree_of(0))[1] == 3


def test_a_read_only_disk_is_a_storage_error_that_says_so(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        path = saved(disk / "c", 1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for where in (disk / "d", path):
            with pytest.raises(StorageError, match=f"writing {where}: Read-only file system"):
                save_by(where, tree_of(2), overwrite=True)
        assert_holds(path, 1)
        with pytest.raises(StorageError, match="Read-only file system"):
            ResumeManager(disk / "run")


def test_a_disk_that_turns_read_only_in_mid_run_never_becomes_the_latest_step(
    tmp_path: Path,
) -> None:
    with (
        small_disk(tmp_path / "disk", "size=8m") as disk,
        ResumeManager(disk / "run", when=Every(steps=1)) as run,
    ):
        run.maybe_save(1, tree_of(1)).wait()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        run.maybe_save(2, tree_of(2))
        run.wait_until_finished()
        assert run.latest_step() == 1
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        run.maybe_save(3, tree_of(3)).wait()
        assert run.all_steps() == [1, 3]


def test_a_directory_without_permission_is_a_storage_error(tmp_path: Path) -> None:
    if os.getuid() == 0:
        become_nobody = "import os; os.setgid(65534); os.setuid(65534)\n"
        for above in tmp_path.parents[:-2]:  # pytest's own directories are for root alone
            above.chmod(0o755)
        tmp_path.chmod(0o755)
    else:
        become_nobody = ""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    out = run_python(
        "import jax, jaxshard, numpy as np\n"
        f"jaxshard.save({str(tmp_path / 'warm')!r}, {{'w': np.ones(3)}})\n{become_nobody}"
        f"try:\n    jaxshard.save({str(locked / 'c')!r}, {{'w': np.ones(3)}})\n"
        "except jaxshard.StorageError as e:\n    print(e)\n",
        devices=1,
    )
    assert out.startswith(f"writing {locked / 'c'}: Permission denied")
    assert not list(locked.iterdir())


@pytest.mark.parametrize("below", ["file/c", "n" * 300])
def test_a_path_that_cannot_be_is_a_storage_error(
    tmp_path: Path, save_by: Callable[..., Any], below: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"Not a directory|File name too long"):
        save_by(tmp_path / below, tree_of(1))
    with pytest.raises((NotFoundError, StorageError), match=r"found nothing|File name too long"):
        jaxshard.load(tmp_path / below)
    assert picture(tmp_path) == {"file": b"in the way"}


# Errors of the background -------------------------------------------------------------------


def failing(tmp_path: Path) -> jaxshard.PendingSave:
    """A save that was begun and fails: a file is in the place of a directory above it."""
    (tmp_path / "file").touch()
    pending = jaxshard.save_async(tmp_path / "file" / "c", tree_of(1))
    deadline = time.monotonic() + 30
    while not pending.done() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert pending.done()
    return pending


def test_an_error_of_the_background_comes_out_at_wait_and_not_again(tmp_path: Path) -> None:
    pending = failing(tmp_path)
    with pytest.raises(StorageError, match="Not a directory") as caught:
        pending.wait()
    assert not isinstance(caught.value, JaxshardError) or caught.value.kind is Kind.STORAGE
    assert caught.value.__cause__.errno == errno.ENOTDIR
    assert_holds(saved(tmp_path / "next"), 1)  # nothing is raised here
    with pytest.raises(StorageError, match="Not a directory"):
        pending.wait()  # who asks again is told again


def test_an_error_of_the_background_is_given_by_exception(tmp_path: Path) -> None:
    error = failing(tmp_path).exception()
    assert isinstance(error, StorageError)
    assert_holds(saved(tmp_path / "next"), 1)


@pytest.mark.parametrize("call", ["save", "save_async", "load"])
def test_an_error_of_the_background_that_nobody_saw_is_raised_once_by_the_next_call(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "c", 1)
    failing(tmp_path)
    assert f"saving {tmp_path / 'file' / 'c'} failed: " in caplog.text
    work: dict[str, Callable[[], Any]] = {
        "save": lambda: jaxshard.save(tmp_path / "d", tree_of(2)),
        "save_async": lambda: jaxshard.save_async(tmp_path / "d", tree_of(2)).wait(),
        "load": lambda: jaxshard.load(path),
    }
    with pytest.raises(StorageError, match="Not a directory") as caught:
        work[call]()
    note = f"raised in the background by the earlier save of '{tmp_path / 'file' / 'c'}'"
    assert caught.value.__notes__ == [note]
    assert not (tmp_path / "d").exists()
    work[call]()


def test_races_that_are_lost_in_the_background_are_raised_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, begun = _commit.commit, threading.Event()
    monkeypatch.setattr(_commit, "commit", lambda *a, **k: begun.wait(60) and commit(*a, **k))
    pending = [jaxshard.save_async(tmp_path / "c", big_tree(), options=FILES) for _ in range(3)]
    begun.set()  # the first one could be there before the last one is begun
    deadline = time.monotonic() + 60
    while not all(p.done() for p in pending) and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(ConflictError, match="another save committed here first"):
            jaxshard.load(tmp_path / "c")
    assert jaxshard.load(tmp_path / "c")["w1"][0] == 1
    assert jaxshard.verify(tmp_path / "c").ok
    assert len(attempts(tmp_path / "c")) == 1
    assert sum(p.exception() is None for p in pending) == 1


def test_a_save_whose_caller_fails_commits_nothing(tmp_path: Path) -> None:
    class Odd(np.ndarray):
        """Refused."""

    with pytest.raises(UnsupportedLeafError, match="Odd"):
        jaxshard.save_async(tmp_path / "c", {"w": np.ones(3).view(Odd)})
    assert not (tmp_path / "c").exists()


# Time-outs ----------------------------------------------------------------------------------

IMPATIENT = SaveOptions(pack_below=0, timeout_s=1e-6)


def big_tree() -> dict[str, Any]:
    """Takes a while to write and to read, in one piece of 48 MiB above all."""
    return {"w0": np.zeros(12 << 20, np.float32), "w1": np.ones(1 << 20, np.float32)}


def test_a_save_that_does_not_end_in_time_commits_nothing(
    tmp_path: Path, save_by: Callable[..., Any]
) -> None:
    with pytest.raises(StorageTimeoutError, match="within timeout_s: 1e-06\nhint: ") as caught:
        save_by(tmp_path / "c", big_tree(), options=IMPATIENT)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.kind is Kind.TIMEOUT
    assert not attempts(tmp_path / "c")
    with pytest.raises(NotFoundError, match="found nothing"):
        jaxshard.load(tmp_path / "c")
    jaxshard.save(tmp_path / "c", tree_of(1))
    assert_holds(tmp_path / "c", 1)


def test_a_load_that_does_not_end_in_time_gives_nothing(tmp_path: Path) -> None:
    jaxshard.save(tmp_path / "c", big_tree(), options=FILES)
    for mode in ("pread", "memmap"):
        with pytest.raises(StorageTimeoutError, match="within timeout_s: 1e-06"):
            jaxshard.load(tmp_path / "c", options=LoadOptions(timeout_s=1e-6, io_mode=mode))
    assert_same_tree(jaxshard.load(tmp_path / "c"), big_tree())


def test_waiting_may_be_given_up_and_taken_up_again(tmp_path: Path) -> None:
    pending = jaxshard.save_async(tmp_path / "c", big_tree(), options=FILES)
    with pytest.raises(StorageTimeoutError, match="goes on in the background; wait"):
        pending.wait(timeout_s=0)
    with pytest.raises(TimeoutError, match="did not end within timeout_s: 0"):
        pending.exception(timeout_s=0)
    assert repr(pending) == f"<PendingSave '{tmp_path / 'c'}': in progress>"
    report = pending.wait(timeout_s=60)
    assert pending.done()
    assert repr(pending).endswith(": committed>")
    assert report.nbytes == 13 << 22
    assert report.files == 2
    assert report.blocked_s <= report.seconds
    assert_same_tree(jaxshard.load(tmp_path / "c"), big_tree())
