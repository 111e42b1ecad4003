"""Many new files of a local disk that become durable together."""

import errno
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxshard import _durable
from jaxshard._newfile import NewFiles
from jaxshard._threads import Workers

_SYNC_THREADS = 16  # as many as TensorStore writes with: the disk commits them in groups
_ABANDON_S = 5.0


class Syncing:
    """Makes many new files durable while others are still being written.

    A few threads write and sync, which end with it; the directories are synced once, at the end.
    TensorStore would sync the directory after each of its files: 96 files of 8 MiB took a seventh
    longer with that. (benchmarks/save.py, state big)
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = NewFiles(root)
        self._workers = Workers("jaxshard-sync", _SYNC_THREADS, _SYNC_THREADS)
        self._directories: set[Path] = set()
        self._error: Exception | None = None

    def write(self, key: str, data: Any) -> None:
        """Write a file that does not exist yet, below the root.

        Raises:
          FileExistsError: it exists.
        """
        with self._files.create(self._root / key) as file:
            file.write((data,))
            file.end()
        self.written(key)

    def write_parts(
        self,
        key: str,
        parts: Iterable[Iterable[Any]],
        instead: Callable[[], bool] | None = None,
    ) -> Future[bool]:
        """Begin to write a file that does not exist yet, from buffers made on one of the threads.

        Args:
          key: of the file.
          parts: its bytes.
          instead: called first, on that thread; if it is true the file is there by now.

        Returns:
          What `instead` has returned.

        Raises:
          FileExistsError: by the future: it exists.
        """
        path = self._root / key
        self._directories.add(path.parent)
        return self._workers.start(lambda: self._write_parts(path, parts, instead))

    def _write_parts(
        self, path: Path, parts: Iterable[Iterable[Any]], instead: Callable[[], bool] | None
    ) -> bool:
        self._raise_error()
        if instead is not None and instead():
            return True
        with self._files.create(path) as file:
            for buffers in parts:
                self._raise_error()  # the file may be about to be removed
                file.write(buffers)
            file.end()
            _durable.sync_file(file.fd)
        return False

    def link(self, key: str, url: str) -> bool:
        """Let a file that does not exist yet be another name of one that is durable.

        Returns:
          Whether it is. Else nothing was done: this file system does not do that, or not so often.
        """
        path = self._root / key
        self._directories.add(path.parent)
        return _durable.link(Path(url), path)

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
                _durable.sync_path(path)
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
            _durable.sync_dir(directory)

    def abandon(self) -> None:
        """Stop: what was written is about to be removed. Waits a little for what goes on."""
        self._error = self._error or OSError(errno.ECANCELED, "abandoned")
        self._workers.end(_ABANDON_S)
