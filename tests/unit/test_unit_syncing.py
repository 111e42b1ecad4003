import threading

import pytest

from jaxshard import _durable, _syncing


@pytest.fixture
def synced(monkeypatch):
    """Paths of files and directories in the order in which they were synced."""
    found = []
    sync_path, sync_dir = _durable.sync_path, _durable.sync_dir
    monkeypatch.setattr(_durable, "sync_path", lambda p: (sync_path(p), found.append(p)))
    monkeypatch.setattr(_durable, "sync_dir", lambda p: (sync_dir(p), found.append(p)))
    return found


def test_all_files_are_synced_and_then_each_directory_once(tmp_path, synced):
    _durable.make_dirs([tmp_path / "a", tmp_path / "b"])
    synced.clear()
    syncing = _syncing.Syncing(tmp_path)
    files = [f"{'ab'[i % 2]}/{i}" for i in range(50)]
    for name in files[:25]:
        syncing.write(name, name.encode())
    for name in files[25:]:
        (tmp_path / name).write_bytes(name.encode())
        syncing.written(name)
    syncing.finish()
    assert sorted(synced[:50]) == sorted(tmp_path / name for name in files)
    assert synced[50:] == [tmp_path / "a", tmp_path / "b"]
    assert all((tmp_path / name).read_bytes() == name.encode() for name in files)
    assert no_thread_of("jaxshard-sync")


def no_thread_of(name):
    return not any(thread.name == name for thread in threading.enumerate())


def test_nothing_to_sync_is_done_at_once(tmp_path, synced):
    _syncing.Syncing(tmp_path).finish(0)
    assert synced == []


def test_a_file_that_exists_is_not_written_over(tmp_path):
    (tmp_path / "f").write_bytes(b"first")
    syncing = _syncing.Syncing(tmp_path)
    with pytest.raises(FileExistsError, match="f"):
        syncing.write("f", b"second")
    syncing.abandon()
    assert (tmp_path / "f").read_bytes() == b"first"


def test_a_file_that_cannot_be_synced_is_an_error_and_no_directory_is_synced(tmp_path, synced):
    syncing = _syncing.Syncing(tmp_path)
    syncing.write("there", b"x")
    syncing.written("gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        syncing.finish()
    assert tmp_path not in synced
    assert no_thread_of("jaxshard-sync")


def test_a_disk_that_hangs_is_a_timeout(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(_durable, "sync_path", lambda _: hangs.wait())
    monkeypatch.setattr(_syncing, "_ABANDON_S", 0.01)
    syncing = _syncing.Syncing(tmp_path)
    syncing.write("f", b"x")
    with pytest.raises(TimeoutError):
        syncing.finish(0.01)
    syncing.abandon()  # does not wait for it
    hangs.set()
    assert syncing._workers.end(10)
    assert no_thread_of("jaxshard-sync")


def test_what_is_abandoned_leaves_no_thread(tmp_path, synced):
    syncing = _syncing.Syncing(tmp_path)
    for i in range(20):
        syncing.write(str(i), b"x")
    syncing.abandon()
    assert no_thread_of("jaxshard-sync")
    assert tmp_path not in synced
