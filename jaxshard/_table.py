"""The table of one process: what it wrote, with lengths and digests, as fixed-width binary.

Little-endian: a header, one record per piece (its file), one digest per tile of those pieces in
order, one record per entry of the pack. Pure: numpy and xxhash.

Format: docs/format.md, "Tables".
"""

import dataclasses
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from jaxshard._errors import CorruptionError, Kind

MAGIC = b"JXSTABL1"
_HEADER = struct.Struct("<8sIIQQQQQ")  # magic, process, 0, pieces, tiles, entries, segment, count
PIECE = np.dtype([("leaf", "<u4"), ("tiles", "<u4"), ("piece", "<u8"), ("file_bytes", "<u8")])
DIGEST = np.dtype("V16")
ENTRY = np.dtype(
    [("leaf", "<u4"), ("reserved", "<u4"), ("tile", "<u8"), ("offset", "<u8"), ("nbytes", "<u8"),
     ("digest", "V16")]
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """What one process wrote.

    Attributes:
      process: its index.
      pieces: `[n]` records of dtype `PIECE`, sorted by leaf and piece.
      digests: `[tiles]` xxh3-128 of the tiles of those pieces, piece by piece, in C order.
      entries: `[m]` records of dtype `ENTRY`, by rising offset.
      segment_bytes: bytes of each file of the pack.
      segments: number of files of the pack.
    """

    process: int
    pieces: np.ndarray[Any, Any]
    digests: np.ndarray[Any, Any]
    entries: np.ndarray[Any, Any]
    segment_bytes: int = 0
    segments: int = 0

    def to_bytes(self) -> bytes:
        """The file."""
        header = _HEADER.pack(
            MAGIC, self.process, 0, len(self.pieces), len(self.digests), len(self.entries),
            self.segment_bytes, self.segments,
        )  # fmt: skip
        parts = (self.pieces, self.digests, self.entries)
        return header + b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes, file: str) -> "Table":
        """Read a table whose digest the manifest has already confirmed.

        Raises:
          CorruptionError: the lengths in the header are not those of the file.
        """
        try:
            magic, process, _, pieces, tiles, entries, segment, count = _HEADER.unpack_from(data)
        except struct.error as e:
            raise _damaged(file, "shorter than its header") from e
        sizes = (pieces * PIECE.itemsize, tiles * DIGEST.itemsize, entries * ENTRY.itemsize)
        if magic != MAGIC or _HEADER.size + sum(sizes) != len(data):
            raise _damaged(file, "header and length do not agree")
        a = _HEADER.size + sizes[0]
        b = a + sizes[1]
        table = cls(
            process,
            np.frombuffer(data, PIECE, pieces, _HEADER.size),
            np.frombuffer(data, DIGEST, tiles, a),
            np.frombuffer(data, ENTRY, entries, b),
            segment,
            count,
        )
        if not table.pack_fits():
            raise _damaged(file, "its entries do not lie in the files of its pack")
        return table

    def pack_fits(self) -> bool:
        """Whether entries rise, do not overlap or cross files, and reach into the last file."""
        pack_bytes = self.segment_bytes * self.segments
        if not len(self.entries) or not 0 < pack_bytes < 1 << 62:
            return len(self.entries) == pack_bytes == 0
        start, nbytes = self.entries["offset"], self.entries["nbytes"]
        if int(start.max()) >= pack_bytes or int(nbytes.max()) > self.segment_bytes:
            return False
        end = start + nbytes
        rising = bool(np.all(end[:-1] <= start[1:]))
        last = np.maximum(end, 1) - np.uint64(1)
        size = np.uint64(self.segment_bytes)
        inside = bool(np.all((start // size == last // size) | (nbytes == 0)))
        return rising and inside and int(end[-1]) > pack_bytes - self.segment_bytes

    @property
    def first_digest(self) -> np.ndarray[Any, Any]:
        """`[n]` position in `digests` of the first tile of each piece."""
        tiles = self.pieces["tiles"].astype(np.int64)
        first: np.ndarray[Any, Any] = np.cumsum(tiles) - tiles
        return first


def _damaged(file: str, why: str) -> CorruptionError:
    return CorruptionError(
        f"table {file!r} is damaged: {why}",
        kind=Kind.TABLE_DAMAGED,
        path=file,
        hint="jaxshard.verify(path) lists every damaged file",
    )


def digest_of(data: Any) -> bytes:
    """xxh3-128 of contiguous bytes (any buffer), 16 bytes big-endian (the canonical form)."""
    return xxhash.xxh3_128_digest(data)


def leaf_digest(tiles: Iterable[tuple[int, bytes]]) -> int:
    """Order-free digest of a leaf from (number, digest) of its tiles: a sum modulo 2^128.

    Each process can give its part; the parts of a leaf are added up.
    """
    return sum(tile_part(tile, digest) for tile, digest in tiles) % (1 << 128)


def tile_part(tile: int, digest: bytes) -> int:
    """What one tile adds to the digest of its leaf."""
    return xxhash.xxh3_128_intdigest(tile.to_bytes(8, "little") + digest)


def digest_text(leaf_digest: int) -> str:
    """The digest of a leaf as the manifest has it."""
    return f"{leaf_digest % (1 << 128):032x}"
