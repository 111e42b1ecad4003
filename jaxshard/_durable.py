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
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxshard import _newfile
from jaxshard._threads import Workers

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
_SYNC_THREADS = 16  # as many as TensorStore writes with: the disk commits them in groups
_ABANDON_S = 5.0
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


def write_new(path: Path, data: Any) -> None:
    """Write a file that does not exist yet; contents and directory entry are durable.

    Raises:
      FileExistsError: it exists.
    """
    _write(path, data)
    sync_dir(path.parent)


class Syncing:
    """Makes many new files durable while others are still being written.

    A few threads write and sync, which end with it; the directories are synced once, at the end.
    TensorStore would sync the directory after each of its files: 96 files of 8 MiB took a seventh
    longer with that. (benchmarks/save.py, state big)
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = _newfile.NewFiles(root)
        self._workers = Workers("jaxshard-sync", _SYNC_THREADS, _SYNC_THREADS)
        self._directories: set[Path] = set()
        self._error: Exception | None = None

    def write(self, key: str, data: Any) -> None:
        """Write a file that does not exist yet, below the root.

        Raises:
          FileExistsError: it exists.
        """
        _write(self._root / key, data, sync=False)
        self.written(key)

    def write_parts(self, key: str, parts: Iterable[Iterable[Any]]) -> Future[None]:
        """Begin to write a file that does not exist yet, from buffers made on one of the threads.

        Raises:
          FileExistsError: by the future: it exists.
        """
        path = self._root / key
        self._directories.add(path.parent)
        return self._workers.start(lambda: self._write_parts(path, parts))

    def _write_parts(self, path: Path, parts: Iterable[Iterable[Any]]) -> None:
        self._raise_error()
        with self._files.create(path) as file:
            for buffers in parts:
                self._raise_error()  # the file may be about to be removed
                file.write(buffers)
            file.end()
            _sync_file(file.fd)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def written(self, key: str) -> None:
        """Begin to sync a file that was written."""
        path = self._root / key
        self._directories.add(path.parent)
        self._workers.start(functools.partial(self._sync, path))

    def _sync(self, path: Path) -> None:
        try:
            if self._error is None:
                _sync_path(path)
        except Exception as e:  # noqa: BLE001  (raised by `finish`)
            self._error = e

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until all files and their directory entries are durable.

        Raises:
          OSError: one of them could not be synced; of the file system as a whole nothing is known.
          TimeoutError: not done after `timeout_s`.
        """
        if not self._workers.end(timeout_s):
            raise TimeoutError
        self._raise_error()
        for directory in sorted(self._directories):
            sync_dir(directory)

    def abandon(self) -> None:
        """Stop: what was written is about to be removed. Waits a little for what goes on."""
        self._error = self._error or OSError(errno.ECANCELED, "abandoned")
        self._workers.end(_ABANDON_S)


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _sync_file(fd)
    finally:
        os.close(fd)


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


def _write(path: Path, data: Any, *, sync: bool = True) -> None:
    fd = _newfile.create(path)
    try:
        _newfile.write_all(fd, (data,))
        if sync:
            _sync_file(fd)
    finally:
        os.close(fd)


def _sync_file(fd: int) -> None:
    if sys.platform == "darwin":  # there fsync(2) leaves data in the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


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
