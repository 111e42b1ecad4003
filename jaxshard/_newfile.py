"""The bytes of a new file, written past the page cache where the disk is a local one.

What passes through that cache is copied by the kernel, drives out what a data loader keeps there,
and needs pages that a hypervisor may have taken back: *big* was saved in 0.7 s, and in 1.3 s with
four times the CPU time where the pages had been free for a while. Past it it takes 0.6 s, always.
(benchmarks/save.py)

Source: open(2), O_DIRECT: memory, position in the file and length are multiples of a block of the
disk.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxshard._buffers import Array, Scratch
from jaxshard._durable import create, file_system, write_all

# Elsewhere it is not there, goes through the cache all the same, or waits for a network.
_FILE_SYSTEMS = {"ext4", "xfs"}
_BLOCK_BYTES = 1 << 20  # half of what the cache of a core holds


class NewFiles:
    """Creates files below a directory; for several threads."""

    def __init__(self, root: Path) -> None:
        self._direct = hasattr(os, "O_DIRECT") and file_system(str(root)) in _FILE_SYSTEMS
        self._scratch = Scratch()

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator["NewFile"]:
        """A file that does not exist yet, closed at the end.

        Raises:
          FileExistsError: it exists.
        """
        fd = create(path)
        try:
            if self._direct:
                with self._scratch.lend(_BLOCK_BYTES) as block:
                    yield NewFile(fd, block)
            else:
                yield NewFile(fd, None)
        finally:
            os.close(fd)


class NewFile:
    """A file that is written from its beginning to its end.

    Args:
      fd: the file.
      block: aligned memory that bytes are gathered in, to be written past the page cache.
    """

    def __init__(self, fd: int, block: Array | None) -> None:
        self.fd = fd
        self._block = block
        self._filled = 0
        self._refused = False

    def write(self, buffers: Iterable[Any]) -> None:
        """Append buffers, or remember a copy of them until a block is full."""
        if self._block is None:
            write_all(self.fd, buffers)
            return
        for buffer in buffers:
            left = np.frombuffer(buffer, np.uint8)
            while len(left):
                free = self._block[self._filled :]
                part, left = left[: len(free)], left[len(free) :]
                free[: len(part)] = part
                self._filled += len(part)
                if self._filled == len(self._block):
                    self._write_block(self._block)

    def _write_block(self, block: Array) -> None:
        self._filled = 0
        left = block.data
        try:
            self._past_cache(yes=not self._refused)
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError as e:
            if self._refused or e.errno != errno.EINVAL:
                raise
            self._refused = True  # this disk has larger blocks, or wrote a part of one
            self._past_cache(yes=False)
            write_all(self.fd, (left,))

    def _past_cache(self, *, yes: bool) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT if yes else flags)

    def end(self) -> None:
        """Write what is left: less than a block, so through the cache."""
        if self._block is not None and self._filled:
            self._past_cache(yes=False)
            write_all(self.fd, (self._block[: self._filled],))
