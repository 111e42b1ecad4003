"""The contract of a store, run for each kind; and how paths and URLs lead to one."""

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from jaxshard._errors import ConflictError, Kind, StorageError
from jaxshard._store import LocalStore, MemoryStore, memory_context, open_store, storage_errors

numbers = itertools.count()


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    path = str(tmp_path / "s") if request.param == "local" else f"memory://unit/{next(numbers)}"
    made = open_store(path)
    made.make_dirs([""])
    return made


def filled(store, *keys):
    store.make_dirs(key.rpartition("/")[0] for key in keys)
    for key in keys:
        store.write(key, key.encode())
    return store


# Files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"abc", np.arange(5, dtype=np.uint8), memoryview(b"xyz")])
def test_what_was_written_is_read(store, data):
    store.write("f", data)
    assert store.read("f") == bytes(data)
    assert store.size("f") == len(bytes(data))


def test_a_file_that_is_not_there(store):
    assert store.size("f") is None
    assert store.size("no/such/f") is None
    with pytest.raises(FileNotFoundError, match="f"):
        store.read("f")


def test_a_directory_is_no_file(store):
    filled(store, "a/f")
    assert store.size("a") is None


def test_a_file_is_no_directory(store):
    filled(store, "f")
    assert store.size("f/g") is None
    assert store.child("f").entries() == []


def test_a_new_file_never_takes_the_place_of_another_one(store):
    store.write("f", b"first")
    with pytest.raises(OSError, match="f"):
        store.write("f", b"second")
    assert store.read("f") == b"first"


@pytest.mark.parametrize(
    ("offset", "length", "found"),
    [
        (0, 10, b"0123456789"),
        (3, 4, b"3456"),
        (8, 5, b"89"),
        (10, 3, b""),
        (50, 3, b""),
        (2, 0, b""),
    ],
)
def test_a_range_is_filled_as_far_as_there_are_bytes(store, offset, length, found):
    store.write("f", b"0123456789")
    into = bytearray(b"." * length)
    assert store.read_range("f", offset, memoryview(into)) == 10  # the length of the file
    assert into == found + b"." * (length - len(found))


def test_a_range_of_a_file_that_is_not_there(store):
    with pytest.raises(FileNotFoundError, match="f"):
        store.read_range("f", 0, memoryview(bytearray(1)))


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder", "folder/none"):
        with pytest.raises(FileNotFoundError, match=name):
            LocalStore(tmp_path).read_range(name, 0, memoryview(bytearray(1)))


# Creating and replacing ---------------------------------------------------------------------


def test_of_two_creations_the_first_wins(store):
    assert store.create("f", b"first") is True
    assert store.create("f", b"second") is False
    assert store.read("f") == b"first"


def test_a_file_that_was_removed_can_be_created_again(store):
    store.create("f", b"first")
    store.remove("f")
    assert store.create("f", b"second") is True
    assert store.read("f") == b"second"


def test_an_empty_file_is_there(store):
    assert store.create("f", b"") is True
    assert store.create("f", b"x") is False


def test_replacing(store):
    store.replace("f", b"first and longer")
    store.replace("f", b"second")
    assert store.read("f") == b"second"
    assert store.entries() == ["f"]


# Listing ------------------------------------------------------------------------------------


def test_a_walk_gives_all_files_sorted(store):
    keys = ["b", "a/x", "a.b/y", "a/b/c", "z/0/1", "a0", "z/0/10", "z/0/2"]
    assert list(filled(store, *keys).walk()) == sorted(keys)


def test_entries_are_names_of_files_and_directories(store):
    assert filled(store, "b", "a/x", "a/y", "c/d/e").entries() == ["a", "b", "c"]


def test_nothing_has_no_entries(store):
    other = store.child("nothing")
    assert other.entries() == []
    assert list(other.walk()) == []
    assert not other.is_file()


def test_a_child_sees_its_part_only(store):
    filled(store, "a/x", "ab/y", "a/b/z")
    child = store.child("a")
    assert list(child.walk()) == ["b/z", "x"]
    assert child.read("b/z") == b"a/b/z"
    assert child.url == f"{store.url}/a"
    assert child.child("b").read("z") == b"a/b/z"


# Removing -----------------------------------------------------------------------------------


def test_removing_a_file_leaves_the_others(store):
    filled(store, "a", "b").remove("a")
    assert list(store.walk()) == ["b"]
    store.remove("a")


def test_removing_a_tree_leaves_what_begins_alike(store):
    filled(store, "a/x", "a/b/y", "a.x", "a0/x", "ab", "a-1/z").remove_tree("a")
    assert sorted(store.walk()) == ["a-1/z", "a.x", "a0/x", "ab"]
    store.remove_tree("a")


def test_removing_everything(store):
    filled(store, "a/x", "b")
    store.remove_tree("")
    assert list(store.walk()) == []
    assert store.entries() == []


def test_removing_everything_of_a_child_leaves_its_siblings(store):
    filled(store, "a/x", "ab/x").child("a").remove_tree("")
    assert list(store.walk()) == ["ab/x"]


# For TensorStore ----------------------------------------------------------------------------


def test_tensorstore_sees_the_same_files(store):
    filled(store, "a/f")
    context = memory_context() if isinstance(store, MemoryStore) else ts.Context()
    kv = ts.KvStore.open(store.kvstore("a"), context=context).result()
    assert bytes(kv.read("f").result().value) == b"a/f"
    kv.write("g", b"from there").result()
    assert store.read("a/g") == b"from there"


def test_free_space_is_a_number_of_bytes_or_no_limit(store):
    free = store.free_bytes()
    assert free is None if isinstance(store, MemoryStore) else free > 0


def test_free_space_is_known_before_the_directory_is_made(tmp_path):
    there = LocalStore(tmp_path).free_bytes()
    assert abs(LocalStore(tmp_path / "not/yet").free_bytes() - there) < 1 << 30


def test_memory_stores_of_one_prefix_are_one():
    name = f"memory://unit/{next(numbers)}"
    open_store(name).write("f", b"x")
    assert open_store(f"{name}/").read("f") == b"x"


def test_a_local_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    assert open_store(tmp_path / "f").is_file()
    assert not open_store(tmp_path).is_file()


# Paths and URLs -----------------------------------------------------------------------------


def test_paths_of_all_kinds_lead_to_a_local_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = str(tmp_path / "a")
    for path in ("a", "./a", "~/a", Path("a"), str(tmp_path / "a"), f"file://{tmp_path}/a"):
        assert open_store(path).url == wanted


def test_a_relative_path_means_where_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = open_store("a")
    monkeypatch.chdir("/")
    opened.make_dirs([""])
    assert (tmp_path / "a").is_dir()


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://bucket/x", "http://x/y", "hf://x"])
def test_a_url_that_is_not_served_is_refused_by_name(url):
    scheme = url.split("://")[0]
    says = f"{url}: expected a local path or memory://, found {scheme}://\nhint: "
    with pytest.raises(StorageError, match=says) as e:
        open_store(url)
    assert e.value.path == url


def test_a_path_that_is_no_path_is_a_type_error():
    with pytest.raises(TypeError, match="expected a path, found int\nhint: the path comes first"):
        open_store(7)


# Errors of the environment ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, Kind.NO_SPACE), (errno.EDQUOT, Kind.NO_SPACE), (errno.EACCES, Kind.STORAGE),
     (errno.EIO, Kind.STORAGE), (errno.EROFS, Kind.STORAGE)],
)  # fmt: skip
def test_an_error_of_the_disk_says_what_was_being_done(code, kind):
    cause = OSError(code, os.strerror(code), "some/file")
    says = f"^writing there: {os.strerror(code)}"
    with pytest.raises(StorageError, match=says) as e, storage_errors("writing", "there"):
        raise cause
    assert (e.value.kind, e.value.path, e.value.__cause__) == (kind, "there", cause)
    assert ("hint: free some space" in str(e.value)) == (kind is Kind.NO_SPACE)


def test_errors_of_ours_pass_as_they_are():
    with pytest.raises(ConflictError, match=r"^mine$"), storage_errors("writing", "there"):
        raise ConflictError("mine")


def test_other_errors_pass_as_they_are():
    with pytest.raises(ValueError, match=r"^mine$"), storage_errors("writing", "there"):
        raise ValueError("mine")
