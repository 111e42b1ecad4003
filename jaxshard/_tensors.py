"""Boxes of arrays <-> bytes in a store, through TensorStore; what its errors mean; digests.

Arrays are opened with the metadata that the manifest implies (no `zarr.json` is read). A missing
chunk is an error, never zeros. TensorStore is imported at first use.

Source: TensorStore's zarr3 and file drivers; what was measured is in docs/performance.md.
"""

import errno
import functools
import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from jaxshard import _plan
from jaxshard._boxes import Box, Lattice
from jaxshard._buffers import Array, Scratch
from jaxshard._durable import file_system
from jaxshard._errors import CorruptionError, Kind, StorageError
from jaxshard._spec import Layout, LeafSpec
from jaxshard._store import MemoryStore, Store, memory_context
from jaxshard._table import digest_of
from jaxshard._threads import cores
from jaxshard._transfer import Future
from jaxshard._zarr import array_metadata, chunk_key

IoMode = Literal["auto", "memmap", "pread"]
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
# How TensorStore gives the operating system's words: since 0.1.85, and before.
_OS_ERROR = re.compile(r"([^:\[]+)\[os_error_code=|\[OS error \d+:? ?(?:E[A-Z]+ )?([^\]]*)\]")
_WRITE_THREADS = 16  # 16 beat 4 for files with fsync; reads are bound by memory, so by cores


@functools.cache
def _context(threads: int, mode: str) -> Any:
    import tensorstore as ts  # noqa: PLC0415

    return ts.Context(
        {
            "file_io_concurrency": {"limit": threads},
            # Lock files outlive a kill, and a stale longer one corrupted the file after it.
            "file_io_locking": {"mode": "none"},
            "file_io_mode": {"mode": mode},
            "file_io_sync": False,  # `_syncing.Syncing` does it
            "cache_pool": {"total_bytes_limit": 0},
        }
    )


def _open(store: Store, key: str, metadata: dict[str, Any], context: Any) -> Any:
    import tensorstore as ts  # noqa: PLC0415

    spec = {
        "driver": "zarr3",
        "kvstore": store.kvstore(key),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    if isinstance(store, MemoryStore):
        context = memory_context()
    return ts.open(spec, open=True, assume_metadata=True, context=context).result()


def _open_leaf(
    store: Store, attempt: str, leaf: LeafSpec, compression: str | None, context: Any
) -> Any:
    layout = leaf.layout
    assert layout is not None, leaf.name
    metadata = array_metadata(leaf, layout, compression)
    return _open(store, f"{attempt}/data/{layout.path}", metadata, context)


def open_for_writing(store: Store, attempt: str, leaf: LeafSpec, compression: str | None) -> Any:
    """The array of a leaf that is not packed; its directories exist."""
    return _open_leaf(store, attempt, leaf, compression, _context(_WRITE_THREADS, "default"))


def open_for_reading(
    store: Store, attempt: str, leaf: LeafSpec, compression: str | None, io_mode: IoMode
) -> Any:
    """The array of a leaf that is not packed."""
    # memmap turns a failing disk into SIGBUS, so "auto" takes it only where Linux says the file
    # system is local; file lengths have been checked before.
    local = file_system(store.url) in _LOCAL
    memmap = io_mode == "memmap" or (io_mode == "auto" and local)
    context = _context(cores(), "memmap" if memmap else "default")
    return _open_leaf(store, attempt, leaf, compression, context)


def write_box(array: Any, box: Box, values: Array) -> Future:
    """Begin to write a whole piece; `values` must not change until the future is done."""
    future: Future = array[box.slices].write(values, can_reference_source_data_indefinitely=True)
    return future


def read_box(array: Any, box: Box, into: Array) -> Future:
    """Begin to read a box straight into an array of its shape, of any strides."""
    import tensorstore as ts  # noqa: PLC0415

    target = ts.array(into).translate_to[box.offset] if box.shape else ts.array(into)
    future: Future = target.write(array[box.slices])
    return future


def read_error(error: Exception, where: str, file: str) -> Exception:
    """What a failed read means: damage, or a passing fault of the store; `where` as below."""
    text = str(error)
    status = text.split(":", 1)[0]
    if isinstance(error, (CorruptionError, StorageError, MemoryError)):
        return error
    if status == "NOT_FOUND" or isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return missing_file(where, file)
    if status in {"DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INVALID_ARGUMENT"}:
        return CorruptionError(
            f"{where}, file {file!r}: damaged: {_essence(error)}",
            kind=Kind.DATA_DAMAGED,
            path=file,
            hint="jaxshard.verify(path) lists every damaged file",
        )
    message = f"{where}, file {file!r}: cannot be read: {_essence(error)}"
    return StorageError(message, path=file)


def _essence(error: Exception) -> str:
    """The operating system's words if they are there, else the beginning of the message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = _OS_ERROR.search(str(error))
    return (found[1] or found[2]).strip() if found else f"{error!s:.300}"


def missing_file(where: str, file: str) -> CorruptionError:
    """The error for a file that is not there; `where` as below."""
    return CorruptionError(
        f"{where}, file {file!r}: expected to exist, found nothing",
        kind=Kind.DATA_MISSING,
        path=file,
        hint="jaxshard.verify(path) lists every missing file",
    )


def require_length(where: str, file: str, found: int | None, expected: int) -> None:
    """Refuse a file that has not the length that its writer gave it.

    Args:
      where: whose file it is: the leaf, and the piece if it is of one.
      file: its key.
      found: its length, None if there is none.
      expected: the length that it must have.

    Raises:
      CorruptionError: it has another one, or there is no file.
    """
    if found is None:
        raise missing_file(where, file)
    if found != expected:
        raise CorruptionError(
            f"{where}, file {file!r}: expected {expected} bytes, found {found}",
            path=file,
            hint="jaxshard.verify(path) lists every damaged file",
        )


def write_error(error: Exception, name: str | None, file: str) -> Exception:
    """What a failed write means; `name` of the leaf, None for a pack."""
    if isinstance(error, (StorageError, MemoryError)):
        return error
    where = f"file {file!r}" if name is None else f"leaf {name!r}, file {file!r}"
    text = _essence(error)
    full = (
        getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT}
        or "No space left" in text  # TensorStore's
        or str(error).startswith("RESOURCE_EXHAUSTED")
    )
    return StorageError(
        f"{where}: cannot be written: {text}",
        kind=Kind.NO_SPACE if full else Kind.STORAGE,
        path=file,
        hint="free some space; earlier checkpoints are untouched" if full else None,
    )


# Digests ------------------------------------------------------------------------------------


def raw_bytes(values: Array) -> Array:
    """`[nbytes]` of uint8: the elements in C order; copied only if they are not contiguous."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class TileHasher:
    """Digests of tiles; those of a wider array are gathered first."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        self._scratch = scratch or Scratch()

    def digests(self, values: Array, box: Box, tiles: Lattice) -> Iterator[tuple[int, bytes]]:
        """(number, digest) of each tile of a box of whole tiles, in C order, as they are asked."""
        for tile in tiles.touching(box):
            part = values[tiles.box(tile).relative_to(box).slices]
            yield tile, self.digest(part)

    def digest(self, tile: Array) -> bytes:
        """Digest of the elements of one tile in C order."""
        if tile.flags.c_contiguous:
            return digest_of(raw_bytes(tile))
        with self._scratch.lend(tile.nbytes) as raw:
            raw.view(tile.dtype).reshape(tile.shape)[...] = tile
            return digest_of(raw)


def piece_file(attempt: str, layout: Layout, piece: int) -> str:
    """Key of the file of one piece."""
    position = _plan.piece_lattice(layout).position(piece)
    return f"{attempt}/data/{layout.path}/{chunk_key(position)}"
