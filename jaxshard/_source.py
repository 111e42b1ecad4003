"""An open checkpoint as bytes: its store, its manifest, and where the tables say its tiles are.

Format: docs/format.md, "Tables" and "Read order".
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from jaxshard import _plan
from jaxshard._errors import CorruptionError, Kind
from jaxshard._manifest import FILE, Manifest
from jaxshard._spec import Layout, LeafSpec
from jaxshard._store import Store
from jaxshard._table import Table, digest_of

HINT = "jaxshard.verify(path) lists every damaged file"


class Source:
    """An open checkpoint: where it is and what its manifest says."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self._digests: dict[tuple[int, int], dict[int, bytes]] = {}

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
    def _piece_index(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(leaf, piece) to (process, row in its table)."""
        return {
            (leaf, piece): (process, row)
            for process, table in enumerate(self.tables)
            for row, (leaf, piece) in enumerate(
                zip(table.pieces["leaf"].tolist(), table.pieces["piece"].tolist(), strict=True)
            )
        }

    @functools.cached_property
    def _entry_index(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(leaf, tile) to (process, row in the entries of its table)."""
        return {
            (leaf, tile): (process, row)
            for process, table in enumerate(self.tables)
            for row, (leaf, tile) in enumerate(
                zip(table.entries["leaf"].tolist(), table.entries["tile"].tolist(), strict=True)
            )
        }

    def piece_row(self, leaf: int, piece: int) -> tuple[int, int]:
        """Process and table row of a piece."""
        return self._lookup(self._piece_index, leaf, piece, "piece")

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

    def entry_row(self, leaf: int, tile: int) -> tuple[int, int]:
        """Process and table row of a packed tile."""
        return self._lookup(self._entry_index, leaf, tile, "packed tile")

    def _lookup(
        self, index: dict[tuple[int, int], tuple[int, int]], leaf: int, number: int, what: str
    ) -> tuple[int, int]:
        found = index.get((leaf, number))
        if found is None:
            name = self.manifest.tree.leaves[leaf].name
            raise CorruptionError(
                f"leaf {name!r}: expected {what} {number} in the tables, found none",
                kind=Kind.TABLE_DAMAGED, hint=HINT,
            )  # fmt: skip
        return found

    def tile_digest(self, leaf: int, piece: int, tile: int) -> bytes:
        """The digest that the writer gave a tile of a piece in a file of its own."""
        found = self._digests.get((leaf, piece))
        if found is None:
            found = self._digests[leaf, piece] = self._piece_digests(leaf, piece)
        return found[tile]

    def _piece_digests(self, leaf: int, piece: int) -> dict[int, bytes]:
        layout = layout_of(self.leaf(leaf))
        process, row = self.piece_row(leaf, piece)
        table = self.tables[process]
        tiles = list(_plan.tile_lattice(layout).touching(_plan.piece_lattice(layout).box(piece)))
        first = int(table.first_digest[row])
        digests = [
            d.tobytes() for d in table.digests[first : first + int(table.pieces[row]["tiles"])]
        ]
        if len(digests) != len(tiles):
            raise CorruptionError(
                f"leaf {self.manifest.tree.leaves[leaf].name!r}, piece {piece}: expected "
                f"{len(tiles)} tiles in the table, found {len(digests)}",
                kind=Kind.TABLE_DAMAGED, hint=HINT,
            )  # fmt: skip
        return dict(zip(tiles, digests, strict=True))

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
            expected, found = (tiles, layout.nbytes), self._packed_counts.get(number, (0, 0))
        else:
            pieces = _plan.piece_lattice(layout).size
            expected, found = (pieces, tiles), self._filed_counts.get(number, (0, 0))
        if expected != found:
            what = "tiles and bytes" if layout.packed else "pieces and tiles"
            raise CorruptionError(
                f"leaf {leaf.name!r}: expected {expected[0]} and {expected[1]} {what} in the "
                f"tables, found {found[0]} and {found[1]}",
                kind=Kind.TABLE_DAMAGED, hint=HINT,
            )  # fmt: skip

    @functools.cached_property
    def _filed_counts(self) -> dict[int, tuple[int, int]]:
        """By leaf: pieces and tiles that the tables have in files of their own."""
        return _counts((table.pieces["leaf"], table.pieces["tiles"]) for table in self.tables)

    @functools.cached_property
    def _packed_counts(self) -> dict[int, tuple[int, int]]:
        """By leaf: tiles and bytes that the tables have in packs."""
        return _counts((table.entries["leaf"], table.entries["nbytes"]) for table in self.tables)

    def replaced(self) -> bool:
        """Whether the manifest is no longer the one that was opened."""
        try:
            now = Manifest.from_bytes(self.store.read(FILE), FILE)
        except (OSError, CorruptionError):
            return not self.store.size(FILE)
        return (now.attempt, now.nonce) != (self.manifest.attempt, self.manifest.nonce)


def _counts(columns: Iterable[tuple[Any, Any]]) -> dict[int, tuple[int, int]]:
    """By number of the first column: how often it is there, and the sum of the second column."""
    counts: dict[int, tuple[int, int]] = {}
    for leaves, amounts in columns:
        for leaf, amount in zip(leaves.tolist(), amounts.tolist(), strict=True):
            rows, total = counts.get(leaf, (0, 0))
            counts[leaf] = (rows + 1, total + amount)
    return counts


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


def layout_of(leaf: LeafSpec) -> Layout:
    """The layout of a leaf that is stored as an array."""
    assert leaf.layout is not None, leaf.name
    return leaf.layout
