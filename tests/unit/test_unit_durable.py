"""Files appear whole or not at all, never over another one unless that is asked for."""

import errno
import os
import stat
import threading

import pytest

from jaxshard import _durable


def names(directory):
    return sorted(p.name for p in directory.iterdir())


# Directories --------------------------------------------------------------------------------


def test_directories_are_made_with_their_parents(tmp_path):
    _durable.make_dirs([tmp_path / "a/b/c", tmp_path / "a/d", tmp_path / "a/b/c"])
    assert (tmp_path / "a/b/c").is_dir()
    assert (tmp_path / "a/d").is_dir()


def test_directories_that_exist_are_left_as_they_are(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_bytes(b"x")
    _durable.make_dirs([tmp_path / "a"])
    assert (tmp_path / "a/file").read_bytes() == b"x"


def test_many_threads_may_make_the_same_directories(tmp_path):
    errors = []

    def make():
        try:
            _durable.make_dirs([tmp_path / "a/b/c/d/e" / str(i) for i in range(20)])
        except OSError as e:
            errors.append(e)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(names(tmp_path / "a/b/c/d/e")) == 20


def test_a_file_where_a_directory_should_be_is_an_error(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        _durable.make_dirs([tmp_path / "a/b"])
    assert (tmp_path / "a").read_bytes() == b"x"


def test_syncing_what_is_no_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="file"):
        _durable.sync_dir(tmp_path / "file")


# New files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(b"abc"), memoryview(b"abcd").cast("H")])
def test_a_new_file_holds_all_of_the_data(tmp_path, data):
    _durable.write_new(tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == bytes(data)


def test_a_new_file_never_takes_the_place_of_another_one(tmp_path):
    _durable.write_new(tmp_path / "f", b"first")
    with pytest.raises(FileExistsError, match="f"):
        _durable.write_new(tmp_path / "f", b"second")
    assert (tmp_path / "f").read_bytes() == b"first"


def test_a_new_file_does_not_follow_a_link_to_elsewhere(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError, match="link"):
        _durable.write_new(tmp_path / "link", b"x")
    assert not (tmp_path / "target").exists()


def test_a_large_file_is_written_to_its_end(tmp_path):
    data = os.urandom(5_000_001)
    _durable.write_new(tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("make", [_durable.write_new, _durable.create_if_absent, _durable.replace])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path, make):
    before = os.umask(0o027)
    try:
        make(tmp_path / "f", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


@pytest.mark.parametrize("make", [_durable.write_new, _durable.create_if_absent, _durable.replace])
def test_without_its_directory_no_file_is_made(tmp_path, make):
    with pytest.raises(FileNotFoundError, match="absent"):
        make(tmp_path / "absent/f", b"x")
    assert names(tmp_path) == []


# Create if absent ---------------------------------------------------------------------------


def test_creation_gives_the_whole_file_and_leaves_nothing_beside_it(tmp_path):
    assert _durable.create_if_absent(tmp_path / "f", b"data") is True
    assert (tmp_path / "f").read_bytes() == b"data"
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("occupy", ["file", "directory", "dangling link"])
def test_creation_over_anything_changes_nothing(tmp_path, occupy):
    path = tmp_path / "f"
    if occupy == "file":
        path.write_bytes(b"first")
    elif occupy == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    assert _durable.create_if_absent(path, b"second") is False
    assert names(tmp_path) == ["f"]
    assert not path.is_file() or path.read_bytes() == b"first"


def race(path, create):
    """Sixteen threads at once; who says that it created the file."""
    start = threading.Barrier(16)
    won = []

    def contend(number):
        start.wait()
        if create(path, str(number).encode() * 1000):
            won.append(number)

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_of_many_creators_exactly_one_wins(tmp_path):
    for attempt in range(5):
        path = tmp_path / f"f{attempt}"
        (winner,) = race(path, _durable.create_if_absent)
        assert path.read_bytes() == str(winner).encode() * 1000
    assert names(tmp_path) == [f"f{i}" for i in range(5)]


def rename_create(path, data):
    """What creation does on a file system without link(2)."""
    temporary = path.with_name(f".tmp-{threading.get_ident()}")
    temporary.write_bytes(data)
    try:
        return _durable._rename_noreplace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def test_without_hard_links_a_rename_that_never_replaces_takes_their_place(tmp_path):
    (winner,) = race(tmp_path / "f", rename_create)
    assert (tmp_path / "f").read_bytes() == str(winner).encode() * 1000
    assert rename_create(tmp_path / "f", b"late") is False
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_that_refuses_links_is_served_by_rename(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert _durable.create_if_absent(tmp_path / "f", b"data") is True
    assert _durable.create_if_absent(tmp_path / "f", b"more") is False
    assert (tmp_path / "f").read_bytes() == b"data"
    assert names(tmp_path) == ["f"]


def test_a_failed_creation_leaves_nothing(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(OSError, match="Input/output error"):
        _durable.create_if_absent(tmp_path / "f", b"data")
    assert names(tmp_path) == []


def test_a_failed_sync_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def broken(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        _durable.create_if_absent(tmp_path / "f", b"data")
    assert names(tmp_path) == []


# Replace and remove -------------------------------------------------------------------------


def test_replacing_gives_the_new_data_and_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "f").write_bytes(b"old and longer")
    _durable.replace(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert names(tmp_path) == ["f"]


def test_replacing_nothing_makes_the_file(tmp_path):
    _durable.replace(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"


def test_who_has_the_old_file_open_still_reads_the_old_one(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with (tmp_path / "f").open("rb") as file:
        _durable.replace(tmp_path / "f", b"new")
        assert file.read() == b"old"


def test_a_failed_replacement_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"old")

    def broken(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space left"):
        _durable.replace(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_removing_what_is_gone_is_fine(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    _durable.remove(tmp_path / "f")
    _durable.remove(tmp_path / "f")
    _durable.remove(tmp_path / "no/such/directory/f")
    assert names(tmp_path) == []


@pytest.mark.parametrize("what", ["file", "tree", "nothing"])
def test_a_tree_is_removed_whatever_it_is(tmp_path, what):
    path = tmp_path / "x"
    if what == "file":
        path.write_bytes(b"x")
    elif what == "tree":
        (path / "a/b").mkdir(parents=True)
        (path / "a/b/f").write_bytes(b"x")
    _durable.remove_tree(path)
    assert names(tmp_path) == []


def test_removing_a_tree_does_not_follow_links_out_of_it(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/f").write_bytes(b"x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/link").symlink_to(tmp_path / "kept")
    _durable.remove_tree(tmp_path / "tree")
    assert (tmp_path / "kept/f").read_bytes() == b"x"
    assert names(tmp_path) == ["kept"]
