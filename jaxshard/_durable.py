"""Files and directories of a local disk that survive a power cut.

This room owns every fsync: of pieces, of small files, of what TensorStore has written, and of
directories that get a new entry. Nothing is ever locked (locks fail on NFS, Lustre and FUSE, and
outlive kills).

Guarantee: when a function returns, what it says is on disk stays there, on file systems that
honour fsync. Not guaranteed: anything about a function that raised, except that nobody else's
file was touched.

Source: fsync(2), link(2), renameat2(2); Pillai et al., "All File Systems Are Not Created Equal",
OSDI 2014.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
TEMPORARY_PREFIX = ".tmp-"


def make_dirs(paths: Iterable[Path]) -> None:
    """Create directories with their parents; sync every directory that got a new entry."""
    grown: set[Path] = set()
    for path in paths:
        missing = []
        here = path
        while not here.is_dir():
            missing.append(here)
            here = here.parent
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another thread or process was faster
                directory.mkdir()
            grown.add(directory.parent)
    for directory in sorted(grown):
        sync_dir(directory)


def sync_dir(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some network file systems have nothing to sync here
            raise
    finally:
        os.close(fd)


def sync_path(path: Path) -> None:
    """Make the bytes of a file durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def sync_file(fd: int) -> None:
    """Make the bytes of an open file durable."""
    if sys.platform == "darwin":  # there fsync(2) leaves data in the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def create(path: Path) -> int:
    """Descriptor of a file that does not exist yet.

    Raises:
      FileExistsError: it exists.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(fd: int, buffers: Iterable[Any]) -> None:
    """Append buffers to a file, through the cache."""
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        done = os.writev(fd, left)
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if left:
            left[0] = left[0][done:]


def write_new(path: Path, data: Any) -> None:
    """Write a file that does not exist yet; contents and directory entry are durable.

    Raises:
      FileExistsError: it exists.
    """
    _write(path, data)
    sync_dir(path.parent)


def _write(path: Path, data: Any) -> None:
    fd = create(path)
    try:
        write_all(fd, (data,))
        sync_file(fd)
    finally:
        os.close(fd)


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file, which is made if it does not exist.

    Not whole or nothing: a crash may leave a part of `data` there.
    """
    new = not path.exists()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, (data,))
        sync_file(fd)
    finally:
        os.close(fd)
    if new:
        sync_dir(path.parent)


def create_if_absent(path: Path, data: bytes) -> bool:
    """Let `path` appear with all of `data`, unless something is there.

    Returns:
      Whether it was created. If not, nothing was changed.

    Raises:
      OSError: errno ENOTSUP, if the file system can do this neither by link nor by rename.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        _write(temporary, data)
        created = _publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_dir(path.parent)
    return created


def _publish(temporary: Path, path: Path) -> bool:
    """Give the file its name, failing if that is taken; `temporary` may stay."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno not in _NO_LINK:
            raise
        return _rename_noreplace(temporary, path)
    return True


def _rename_noreplace(temporary: Path, path: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        done = libc.renameat2(
            _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE
        )
        code = ctypes.get_errno()
        if done == 0:
            return True
        if code == errno.EEXIST:
            return False
        if code not in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
            raise OSError(code, os.strerror(code), str(path))
    raise OSError(
        errno.ENOTSUP,
        "this file system has neither link(2) nor renameat2(RENAME_NOREPLACE), so a commit could "
        "overwrite another one; use ext4, xfs, btrfs, NFS, Lustre or an object store",
        str(path),
    )


def link(path: Path, new: Path) -> bool:
    """Give a durable file a second name, which is durable once its directory is synced.

    Returns:
      Whether it has it; False if the file is gone, or file systems do not do that with it.
    """
    try:
        os.link(path, new)
    except FileNotFoundError:
        return False
    except FileExistsError:  # a lost reply may have been asked for again
        if not path.samefile(new):
            raise
    except OSError as e:
        if e.errno not in _NO_LINK | {errno.EXDEV}:
            raise
        return False
    return True


def replace(path: Path, data: bytes) -> None:
    """Let `path` hold all of `data` instead of what it held, at once."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        _write(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_dir(path.parent)


def remove(path: Path) -> None:
    """Remove a file, durably; it may be gone already."""
    path.unlink(missing_ok=True)
    if path.parent.is_dir():
        sync_dir(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a file or a directory with what is in it; it may be gone already.

    Not synced: after a power cut it may be there again.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_empty(path: Path) -> None:
    """Remove a directory if nothing is in it."""
    with contextlib.suppress(FileNotFoundError):
        try:
            path.rmdir()
        except OSError as e:
            if e.errno not in {errno.ENOTEMPTY, errno.EEXIST}:  # POSIX allows either
                raise


def changed_at(path: Path) -> float | None:
    """When anything at or below `path` was last changed, by the clock of the file system."""
    inside = (Path(here, name) for here, dirs, files in os.walk(path) for name in dirs + files)
    newest = None
    for one in itertools.chain([path], inside):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it goes on meanwhile
            newest = max(newest or 0.0, one.lstat().st_mtime)
    return newest


def files_below(path: Path) -> Iterator[tuple[int, int, int]]:
    """Inode, number of names, and length of each file at or below `path`."""
    inside = (Path(here, name) for here, _, names in os.walk(path) for name in names)
    for one in itertools.chain([path], inside):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it goes on meanwhile
            found = one.lstat()
            if stat.S_ISREG(found.st_mode):
                yield found.st_ino, found.st_nlink, found.st_size


@functools.lru_cache(maxsize=64)
def file_system(path: str) -> str | None:
    """The type of the file system that a path is on, None where that is not known."""
    try:
        with open("/proc/self/mounts", encoding="utf-8") as file:  # noqa: PTH123  (starts faster)
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return None
    real = os.path.realpath(path)
    above = [m for m in mounts if real == m[0] or real.startswith(m[0].rstrip("/") + "/")]
    return max(above, key=lambda m: len(m[0]))[1] if above else None
