import errno
import os
import pathlib

import numpy as np
import pytest

import jaxshard
from jaxshard import _newfile

BLOCK = _newfile._BLOCK_BYTES
PAST = sorted(_newfile._FILE_SYSTEMS)


def values(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def written(path, parts) -> bytes:
    with _newfile.NewFiles(path.parent).create(path) as file:
        for buffers in parts:
            file.write(buffers)
        file.end()
    return path.read_bytes()


@pytest.fixture
def local_disk(tmp_path):
    found = _newfile.file_system(str(tmp_path))
    if found not in PAST:
        pytest.skip(f"temporary files are on {found}, not on one of {', '.join(PAST)}")
    return tmp_path


def is_cached(path, offset: int) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 4097]
)
@pytest.mark.parametrize("cut", [BLOCK, 2 * BLOCK + 4, 300_001])
def test_a_file_holds_what_was_written_however_it_was_cut(tmp_path, nbytes, cut):
    whole = values(nbytes)
    parts = [(whole[i : i + cut], b"tail") for i in range(0, nbytes, cut)]
    expected = b"".join(bytes(b) for buffers in parts for b in buffers)
    assert written(tmp_path / "file", parts) == expected


def test_it_is_the_same_in_memory_file_systems():
    if _newfile.file_system("/dev/shm") != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    path = pathlib.Path(f"/dev/shm/jaxshard-test-{os.getpid()}")
    try:
        whole = values(2 * BLOCK + 5)
        assert written(path, [(whole,)]) == whole.tobytes()
    finally:
        path.unlink()


def test_an_existing_file_is_not_touched(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        written(path, [(values(BLOCK),)])
    assert path.read_bytes() == b"mine"


def test_blocks_go_past_the_page_cache(local_disk):
    path = local_disk / "file"
    with _newfile.NewFiles(local_disk).create(path) as file:
        file.write((values(2 * BLOCK + 100),))
        file.end()
        os.fsync(file.fd)
    assert not is_cached(path, 0)
    assert not is_cached(path, 2 * BLOCK - 1)
    assert is_cached(path, 2 * BLOCK)  # the rest


def test_a_save_leaves_the_page_cache_to_others(local_disk):
    jaxshard.save(local_disk / "ckpt", {"w": np.ones((2048, 1024), np.float32)})
    pieces = [p for p in (local_disk / "ckpt").rglob("c/*/*") if p.stat().st_size > BLOCK]
    assert pieces
    assert not any(is_cached(path, 0) for path in pieces)


def test_a_disk_that_wants_other_blocks_is_written_through_the_cache(local_disk):
    """The kernel itself refuses memory that is not aligned."""
    whole, path = values(3 * BLOCK), local_disk / "file"
    unaligned = np.empty(BLOCK + 4096, np.uint8)
    start = -unaligned.ctypes.data % 4096 + 1
    fd = _newfile.create(path)
    file = _newfile.NewFile(fd, unaligned[start : start + BLOCK])
    file.write((whole[:10], whole[10:]))
    file.end()
    os.close(fd)
    assert path.read_bytes() == whole.tobytes()


def test_other_errors_are_not_taken_for_that(local_disk, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(OSError, match="No space"),
        _newfile.NewFiles(local_disk).create(local_disk / "file") as file,
    ):
        file.write((values(BLOCK),))


def test_the_file_system_of_a_path_that_does_not_exist_is_that_above_it(tmp_path):
    assert _newfile.file_system(str(tmp_path / "a" / "b")) == _newfile.file_system(str(tmp_path))
    assert _newfile.file_system("/proc/self") == "proc"
