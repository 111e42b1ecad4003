"""An open checkpoint as bytes: its store, its manifest, and where the tables say its tiles are.

Format: docs/format.md, "Tables" and "Read order".
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxshard import _plan
from jaxshard._boxes import Lattice
from jaxshard._errors import CorruptionError, Kind
from jaxshard._manifest import FILE, Manifest
from jaxshard._spec import LeafSpec, layout_of
from jaxshard._store import Store
from jaxshard._table import Table, digest_of

Column = np.ndarray[Any, Any]
HINT = "jaxshard.verify(path) lists every damaged file"


class Source:
    """An open checkpoint: where it is and what its manifest says."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self._placed: dict[int, list[tuple[int, int]]] = {}  # by leaf and piece

    def leaf(self, number: int) -> LeafSpec:
        """A leaf; for one that is the same as an earlier one, that one."""
        leaf = self.manifest.tree.leaves[number]
        return leaf if leaf.same_as is None else self.manifest.tree.leaves[leaf.same_as]

    def resolve(self, number: int) -> int:
        """Number of the leaf whose pieces hold the data of a leaf."""
        same_as = self.manifest.tree.leaves[number].same_as
        return number if same_as is None else same_as

    @functools.cached_property
    def tables(self) -> list[Table]:
        """The tables of all processes, their digests compared with the manifest's."""
        return [self._table(p) for p in range(len(self.manifest.processes))]

    def _table(self, process: int) -> Table:
        record = self.manifest.processes[process]
        key = table_file(self.manifest.attempt, process)
        size = self.store.size(key)
        if size is None:
            raise CorruptionError(
                f"table {key!r}: expected to exist, found nothing",
                kind=Kind.TABLE_DAMAGED, path=key, hint=HINT,
            )  # fmt: skip
        data = self.store.read(key) if size == record.table_bytes else b""
        if digest_of(data).hex() != record.table_digest:
            raise CorruptionError(
                f"table {key!r} is damaged: expected {record.table_bytes} bytes with digest "
                f"{record.table_digest}, found {size} bytes that are not these",
                kind=Kind.TABLE_DAMAGED, path=key, hint=HINT,
            )  # fmt: skip
        return Table.from_bytes(data, key)

    @functools.cached_property
    def _piece_rows(self) -> "_Rows":
        return _Rows([table.pieces for table in self.tables], "piece")

    @functools.cached_property
    def entries(self) -> "Entries":
        """The entries of the packs of all processes."""
        return Entries(self.tables)

    def piece_row(self, leaf: int, piece: int) -> tuple[int, int]:
        """Process and table row of a piece."""
        if leaf not in self._placed:
            rows = self._in_order(self._piece_rows, leaf, "piece")
            first = self._piece_rows.first
            process = np.searchsorted(first, rows, "right") - 1
            self._placed[leaf] = list(
                zip(process.tolist(), (rows - first[process]).tolist(), strict=True)
            )
        return self._placed[leaf][piece]

    def packed_rows(self, leaf: int) -> Column:
        """Rows of `entries` that hold the tiles of a packed leaf, by tile."""
        rows = self._in_order(self.entries.rows, leaf, "packed tile")
        layout = layout_of(self.leaf(leaf))
        sizes = _plan.cell_sizes(layout.shape, layout.tile) * layout.itemsize
        if not np.array_equal(self.entries.nbytes[rows], sizes):
            raise CorruptionError(
                f"leaf {self.manifest.tree.leaves[leaf].name!r}: expected packed tiles of the "
                "sizes of its grid, the tables have others",
                kind=Kind.TABLE_DAMAGED, hint=HINT,
            )  # fmt: skip
        return rows

    def _in_order(self, rows: "_Rows", leaf: int, what: str) -> Column:
        found = rows.of(leaf)
        layout = layout_of(self.leaf(leaf))
        cell = layout.tile if layout.packed else layout.piece
        if found is None or len(found) != Lattice(layout.shape, cell).size:
            name = self.manifest.tree.leaves[leaf].name
            raise CorruptionError(
                f"leaf {name!r}: expected each {what} once in the tables",
                kind=Kind.TABLE_DAMAGED, hint=HINT,
            )  # fmt: skip
        return found

    def file_bytes(self, leaf: int, piece: int) -> int:
        """Length that the file of a piece must have.

        Raises:
          CorruptionError: the table gives another one than the shape of the piece.
        """
        process, row = self.piece_row(leaf, piece)
        written = int(self.tables[process].pieces[row]["file_bytes"])
        layout = layout_of(self.leaf(leaf))
        implied = _plan.file_bytes(layout, _plan.piece_lattice(layout).box(piece))
        if self.manifest.compression is None and written != implied:
            raise CorruptionError(
                f"leaf {self.manifest.tree.leaves[leaf].name!r}, piece {piece}: expected a file of "
                f"{implied} bytes, the table says {written}",
                kind=Kind.TABLE_DAMAGED, hint=HINT,
            )  # fmt: skip
        return written

    def piece_digests(self, leaf: int, piece: int) -> list[bytes]:
        """Digests of the tiles of a piece in a file of its own, in C order as they lie there."""
        layout = layout_of(self.leaf(leaf))
        process, row = self.piece_row(leaf, piece)
        table = self.tables[process]
        expected = _plan.tiles_in(layout, _plan.piece_lattice(layout).box(piece))
        first = int(self._first_digests[process][row])
        digests = table.digests[first : first + int(table.pieces[row]["tiles"])]
        if len(digests) != expected:
            raise CorruptionError(
                f"leaf {self.manifest.tree.leaves[leaf].name!r}, piece {piece}: expected "
                f"{expected} tiles in the table, found {len(digests)}",
                kind=Kind.TABLE_DAMAGED, hint=HINT,
            )  # fmt: skip
        return [digest.tobytes() for digest in digests]

    @functools.cached_property
    def _first_digests(self) -> list[Column]:
        return [table.first_digest for table in self.tables]

    def require_complete(self, number: int) -> None:
        """The tables have as many tiles of a leaf as its shape asks for.

        Looked at before anything is planned or allocated, so that a manifest cannot claim more
        than there are tables and files for.

        Raises:
          CorruptionError: they have more or fewer.
        """
        leaf = self.manifest.tree.leaves[number]
        layout = layout_of(leaf)
        tiles = _plan.tile_lattice(layout).size
        if layout.packed:
            expected, found = (tiles, layout.nbytes), self._packed_counts[number]
        else:
            pieces = _plan.piece_lattice(layout).size
            expected, found = (pieces, tiles), self._filed_counts[number]
        if expected != found:
            what = "tiles and bytes" if layout.packed else "pieces and tiles"
            raise CorruptionError(
                f"leaf {leaf.name!r}: expected {expected[0]} and {expected[1]} {what} in the "
                f"tables, found {found[0]} and {found[1]}",
                kind=Kind.TABLE_DAMAGED, hint=HINT,
            )  # fmt: skip

    @functools.cached_property
    def _filed_counts(self) -> list[tuple[int, int]]:
        """By leaf: pieces and tiles that the tables have in files of their own."""
        return self._counts([table.pieces for table in self.tables], "tiles")

    @functools.cached_property
    def _packed_counts(self) -> list[tuple[int, int]]:
        """By leaf: tiles and bytes that the tables have in packs."""
        return self._counts([table.entries for table in self.tables], "nbytes")

    def _counts(self, parts: list[Column], amount: str) -> list[tuple[int, int]]:
        """By leaf: how many rows it has, and the sum of another column."""
        leaves = len(self.manifest.tree.leaves)
        leaf = np.concatenate([part["leaf"] for part in parts])
        amounts = np.concatenate([part[amount] for part in parts]).astype(np.int64)
        known = leaf < leaves
        sums = np.zeros(leaves, np.int64)
        np.add.at(sums, leaf[known], amounts[known])
        counts = np.bincount(leaf[known], minlength=leaves)
        return list(zip(counts.tolist(), sums.tolist(), strict=True))

    def replaced(self) -> bool:
        """Whether the manifest is no longer the one that was opened."""
        try:
            now = Manifest.from_bytes(self.store.read(FILE), FILE)
        except (OSError, CorruptionError):
            return not self.store.size(FILE)
        return (now.attempt, now.nonce) != (self.manifest.attempt, self.manifest.nonce)


class _Rows:
    """Rows of all tables by leaf and, within it, by piece or tile."""

    def __init__(self, parts: list[Column], field: str) -> None:
        self.first = np.cumsum([0, *map(len, parts)])[:-1]  # row where each process begins
        leaf = np.concatenate([part["leaf"] for part in parts]).astype(np.int64)
        self._number = np.concatenate([part[field] for part in parts])
        self._order = np.lexsort((self._number, leaf))
        self._leaf = leaf[self._order]

    def of(self, leaf: int) -> Column | None:
        """Rows of a leaf, if its pieces or tiles are numbered from 0 without gaps."""
        start, stop = np.searchsorted(self._leaf, [leaf, leaf + 1])
        rows: Column = self._order[start:stop]
        numbered = np.array_equal(self._number[rows], np.arange(stop - start))
        return rows if numbered else None


class Entries:
    """The entries of the packs of all processes, as columns by process and rising offset.

    Attributes:
      rows: by leaf and tile.
      offset: bytes from the start of the pack of the process.
      nbytes: bytes of the tile.
      digest: of the tile.
      file: numbers that are equal for entries in the same file.
    """

    def __init__(self, tables: list[Table]) -> None:
        parts = [table.entries for table in tables]
        self.rows = _Rows(parts, "tile")
        self.offset = np.concatenate([part["offset"] for part in parts]).astype(np.int64)
        self.nbytes = np.concatenate([part["nbytes"] for part in parts]).astype(np.int64)
        self.digest = np.concatenate([part["digest"] for part in parts])
        self._segment_bytes = np.array([max(1, table.segment_bytes) for table in tables])
        process = np.repeat(np.arange(len(parts)), list(map(len, parts)))
        self._first_file = np.cumsum([0, *(table.segments for table in tables)])
        segment = self.offset // self._segment_bytes[process]
        self.file = self._first_file[process] + segment

    def segment_bytes(self, process: int) -> int:
        """Bytes of each file of the pack of a process."""
        return int(self._segment_bytes[process])

    def file_of(self, row: int) -> tuple[int, int]:
        """Process and number of the file that an entry lies in."""
        file = int(self.file[row])
        process = int(np.searchsorted(self._first_file, file, "right")) - 1
        return process, file - int(self._first_file[process])


def not_what_was_written(where: str, file: str, tile: int) -> CorruptionError:
    """The error for a tile whose digest is another one than its writer's."""
    return CorruptionError(
        f"{where}, tile {tile}, file {file!r}: its bytes are not those that were "
        "written (changed, or the file is in another one's place)",
        path=file,
        hint=HINT,
    )


@contextlib.contextmanager
def damage_in(source: Source) -> Iterator[None]:
    """Say of which checkpoint a damaged file is, and with which call to look for more."""
    try:
        yield
    except CorruptionError as e:
        raise CorruptionError(
            f"{source.store.url}: {str(e).splitlines()[0]}",
            kind=e.kind,
            path=e.path,
            step=source.manifest.step,
            hint=f"jaxshard.verify({source.store.url!r}) lists every damaged file",
        ) from e


def table_file(attempt: str, process: int) -> str:
    """Key of the table of one process."""
    return f"{attempt}/tables/{process // 256}/p{process:05d}.bin"


def pack_dir(attempt: str, process: int) -> str:
    """Key of the pack of one process."""
    return f"{attempt}/packs/{process:05d}"


def pack_file(attempt: str, process: int, segment: int) -> str:
    """Key of one file of a pack."""
    return f"{pack_dir(attempt, process)}/c/{segment}"
