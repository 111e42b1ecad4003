"""`verify` finds every damaged file of a checkpoint."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxshard import _assembly, _fetch, _piecefile, _places, _plan, _source, _table, _tensors, _zarr
from jaxshard._boxes import Box
from jaxshard._errors import CorruptionError, FormatError, Kind, bullet_list, counted, size_text
from jaxshard._fetch import raise_if_replaced
from jaxshard._manifest import FILE, Manifest
from jaxshard._reader import open_checkpoint
from jaxshard._registry import Shown
from jaxshard._spec import Layout, LeafSpec, layout_of
from jaxshard._store import PathLike, Store, open_store, storage_errors

_BLOCK_BYTES = 16 << 20
# Names that TensorStore gives to files before it renames them.
_TEMPORARY = re.compile(r"(\.tmp-[0-9a-f]+|.*\.__lock)$|.*/(\.tmp-[0-9a-f]+|[^/]*\.__lock)$")


class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes:
      kind: `missing`, `length`, `damaged`, `misplaced` or `extra`.
      file: relative to the checkpoint.
      leaf: name of the leaf whose data is in the file, if there is one.
      piece: number of the piece that is in the file, if there is one.
      message: what is wrong, in words.
    """

    kind: str
    file: str
    leaf: str | None
    piece: int | None
    message: str

    def __str__(self) -> str:
        of = "" if self.leaf is None else f" (leaf {self.leaf!r}"
        of += ")" if of and self.piece is None else f", piece {self.piece})" if of else ""
        return f"{self.kind}: {self.file}{of}: {self.message}"


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport(Shown):
    """What `verify` found.

    Attributes:
      path: the checkpoint.
      problems: all that is wrong.
      leftovers: files of other attempts and temporary ones: harmless.
      files: number of files that were looked at.
      nbytes: bytes of elements that were read and compared.
    """

    path: str
    problems: tuple[Problem, ...]
    leftovers: tuple[str, ...]
    files: int
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        looked = f"{self.files} files, {size_text(self.nbytes)} compared"
        left = f", {len(self.leftovers)} leftover files" if self.leftovers else ""
        if self.ok:
            return f"{self.path}: sound ({looked}{left})"
        title = f"{self.path}: {counted(len(self.problems), 'problem')} ({looked}{left})"
        return bullet_list(title, tuple(map(str, self.problems)))


def verify(
    path: PathLike,
    *,
    read_data: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Look for missing, cut, changed, exchanged, stale and extra files.

    Every byte that jaxshard wrote is covered: by the digest of the manifest, the digests of the
    tables in it, the digests of tiles in those, and checksums in the files.

    Args:
      path: a committed checkpoint.
      read_data: False looks at presence and lengths only, and at the small files.
      on_progress: called with bytes of data done and bytes of data in all, as reading goes on.

    Returns:
      All problems, with leaf, piece and file.

    Raises:
      NotFoundError: nothing is at `path`, or a run directory.
      NotCommittedError: a save was begun there and never committed.
      FormatError: it was written by a newer version (kind `format-version`).
      CheckpointReplacedError: a writer replaced or deleted it meanwhile.

    Example:
      >>> import jax.numpy as jnp, jaxshard
      >>> _ = jaxshard.save("memory://doc/verify", {"w": jnp.ones((2, 3))})
      >>> jaxshard.verify("memory://doc/verify").ok
      True
    """
    store = open_store(path)
    try:
        checkpoint = open_checkpoint(path)
    except (CorruptionError, FormatError) as e:
        if e.kind is Kind.FORMAT_VERSION:  # it may be sound
            raise
        problem = Problem("damaged", FILE, None, None, str(e).splitlines()[0])
        return VerifyReport(store.url, (problem,), (), 1, 0)
    with storage_errors("verifying", store.url):
        check = _Check(checkpoint.source, on_progress)
        try:
            check.small_files()
            if check.tables_sound:
                check.coverage()
            check.pieces(read_data=read_data)
            check.packs(read_data=read_data)
            leftovers = check.others()
        except FileNotFoundError as e:  # between two looks at it
            raise_if_replaced(checkpoint.source, e)
            raise
        if check.problems:
            raise_if_replaced(checkpoint.source, None)
    return VerifyReport(
        store.url, tuple(check.problems), tuple(leftovers), len(check.expected), check.nbytes
    )


class _Check:
    """One verification: what is expected, what was found wrong."""

    def __init__(
        self, source: _source.Source, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self.source = source
        self.store: Store = source.store
        self.manifest: Manifest = source.manifest
        self.attempt = source.manifest.attempt
        self.problems: list[Problem] = []
        self.expected: set[str] = {FILE}
        self.nbytes = 0
        self.tables_sound = True
        self.unsound: set[int] = set()  # leaves that the tables do not fit
        self._on_progress = on_progress
        self._done = 0

    @functools.cached_property
    def _total(self) -> int:
        """Bytes of data that there are to read."""
        filed = sum(layout_of(leaf).nbytes for _, leaf in self._filed())
        return filed + sum(table.segments * table.segment_bytes for table in self._tables())

    def _progress(self, nbytes: int) -> None:
        self._done += nbytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def _problem(
        self, kind: str, file: str, message: str, leaf: str | None = None, piece: int | None = None
    ) -> None:
        self.problems.append(Problem(kind, file, leaf, piece, message))

    # Files whose bytes follow from the manifest

    def small_files(self) -> None:
        for process in range(len(self.manifest.processes)):
            self.expected.add(_source.table_file(self.attempt, process))
        try:
            _ = self.source.tables
        except CorruptionError as e:
            self.tables_sound = False
            kind = "damaged" if self.store.size(e.path or "") is not None else "missing"
            self._problem(kind, e.path or "tables", str(e).splitlines()[0])
        for file, text in self._metadata_files():
            self.expected.add(file)
            found = self.store.read(file) if self.store.size(file) is not None else None
            if found is None:
                self._problem("missing", file, "expected to exist, found nothing")
            elif found != text:
                self._problem("damaged", file, "its text is not what the manifest implies")

    def _metadata_files(self) -> Iterator[tuple[str, bytes]]:
        filed = [leaf for _, leaf in self._filed()]
        layouts = [layout_of(leaf) for leaf in filed]
        group = _zarr.to_bytes(_zarr.group_metadata())
        for path in _zarr.group_paths(layouts):
            yield f"{self.attempt}/data/{path}/zarr.json".replace("//", "/"), group
        for leaf, layout in zip(filed, layouts, strict=True):
            metadata = _zarr.array_metadata(leaf, layout, self.manifest.compression)
            yield f"{self.attempt}/data/{layout.path}/zarr.json", _zarr.to_bytes(metadata)
        for process, table in enumerate(self._tables()):
            if table.segments:
                metadata = _zarr.pack_metadata(table.segment_bytes, table.segments)
                yield (
                    f"{_source.pack_dir(self.attempt, process)}/zarr.json",
                    _zarr.to_bytes(metadata),
                )

    def _filed(self) -> Iterator[tuple[int, LeafSpec]]:
        for number, leaf in enumerate(self.manifest.tree.leaves):
            if leaf.layout is not None and not leaf.layout.packed:
                yield number, leaf

    def _tables(self) -> list[_table.Table]:
        return self.source.tables if self.tables_sound else []

    # The tables against the manifest

    def coverage(self) -> None:
        """Every tile of every leaf is in the tables, with the digests that the manifest adds up."""
        for number, leaf in enumerate(self.manifest.tree.leaves):
            if leaf.layout is None:
                continue
            try:
                self.source.require_complete(number)
                digest = f"{_table.leaf_digest(self._digests(number, leaf)):032x}"
            except CorruptionError as e:
                self._problem("damaged", "tables", str(e).splitlines()[0], leaf.name)
                self.unsound.add(number)
                continue
            if digest != leaf.digest:
                self._problem(
                    "damaged", FILE, f"digest {leaf.digest}, but the tables add up to {digest}",
                    leaf.name,
                )  # fmt: skip

    def _digests(self, number: int, leaf: LeafSpec) -> Iterator[tuple[int, bytes]]:
        layout = layout_of(leaf)
        if layout.packed:
            digests = self.source.entries.digest[self.source.packed_rows(number)]
            yield from enumerate(map(bytes, digests.tolist()))
            return
        pieces, tiles = _plan.piece_lattice(layout), _plan.tile_lattice(layout)
        for piece in range(pieces.size):
            inside = tiles.touching(pieces.box(piece))
            yield from zip(inside, self.source.piece_digests(number, piece), strict=True)

    # Data

    def pieces(self, *, read_data: bool) -> None:
        for number, leaf in self._filed():
            if number in self.unsound:
                continue
            layout = layout_of(leaf)
            lattice = _plan.piece_lattice(layout)
            whole = []
            for piece in range(lattice.size):
                file = _tensors.piece_file(self.attempt, layout, piece)
                self.expected.add(file)
                if self._length_is_right(number, leaf, piece, file):
                    whole.append((piece, file))
            if read_data:
                self._read_pieces(number, leaf, whole)

    def _length_is_right(self, number: int, leaf: LeafSpec, piece: int, file: str) -> bool:
        found = self.store.size(file)
        if found is None:
            self._problem("missing", file, "expected to exist, found nothing", leaf.name, piece)
            return False
        if not self.tables_sound:
            return False  # nothing is left to compare with
        try:
            expected = self.source.file_bytes(number, piece)
        except CorruptionError as e:
            self._problem("damaged", "tables", str(e).splitlines()[0], leaf.name, piece)
            return False
        if found != expected:
            message = f"expected {expected} bytes, found {found}"
            self._problem("length", file, message, leaf.name, piece)
        return found == expected

    def _read_pieces(self, number: int, leaf: LeafSpec, pieces: list[tuple[int, str]]) -> None:
        """Read pieces at the same time; if something is wrong, one by one, to see with which."""
        before = self._done
        try:
            self._fetch(number, leaf, [piece for piece, _ in pieces])
        except CorruptionError as e:
            if len(pieces) == 1:
                (piece, file), text = pieces[0], str(e)
                kind = "misplaced" if "another one's place" in text else "damaged"
                self._problem(kind, file, text.splitlines()[0], leaf.name, piece)
                return
            self._done = before
            for one in pieces:
                self._read_pieces(number, leaf, [one])

    def _fetch(self, number: int, leaf: LeafSpec, pieces: list[int]) -> None:
        layout = layout_of(leaf)
        boxes = [_plan.piece_lattice(layout).box(piece) for piece in pieces]
        wants = [
            _assembly.Want(
                number,
                [_plan.element_box(block, layout, leaf.array_shape or ())],
                functools.partial(self._verified, block.size * layout.itemsize),
            )
            for box in boxes
            for block in _places.blocks(layout, box, _BLOCK_BYTES)
        ]
        straight = (
            _piecefile.IS_FAST
            and self.manifest.compression is None
            and all(map(functools.partial(self._index_is_ours, layout), pieces, boxes))
        )
        _fetch.fetch(
            self.source,
            wants,
            host_bytes_max=8 * _BLOCK_BYTES,
            io_mode="auto" if straight else "pread",  # TensorStore knows what to make of it
            checksums=True,
        )
        self.nbytes += sum(box.size for box in boxes) * layout.itemsize

    def _index_is_ours(self, layout: Layout, piece: int, box: Box) -> bool:
        index = _piecefile.index(layout, box)
        found = bytearray(len(index))
        if index:
            file = _tensors.piece_file(self.attempt, layout, piece)
            at = _plan.file_bytes(layout, box) - len(index)
            self.store.read_range(file, at, memoryview(found))
        return found == index

    def _verified(self, nbytes: int, _: Any) -> None:
        """Verified values are not kept."""
        self._progress(nbytes)

    def packs(self, *, read_data: bool) -> None:
        for process, table in enumerate(self._tables()):
            for segment in range(table.segments):
                file = _source.pack_file(self.attempt, process, segment)
                self.expected.add(file)
                found = self.store.size(file)
                if found is None:
                    self._pack_problem("missing", table, segment, file, "found nothing")
                elif found != table.segment_bytes:
                    self._pack_problem("length", table, segment, file, f"found {found} bytes")
                elif read_data:
                    self._read_segment(table, segment, file)

    def _pack_problem(
        self, kind: str, table: _table.Table, segment: int, file: str, found: str
    ) -> None:
        """One problem for each leaf that has a part in a pack file that is missing or cut."""
        inside = table.entries["offset"] // table.segment_bytes == segment
        for leaf in sorted(set(table.entries["leaf"][inside].tolist())):
            name = self.manifest.tree.leaves[leaf].name
            self._problem(kind, file, f"expected {table.segment_bytes} bytes, {found}", name)

    def _read_segment(self, table: _table.Table, segment: int, file: str) -> None:
        data = np.empty(table.segment_bytes, np.uint8)
        self.store.read_range(file, 0, data.data)
        start = segment * table.segment_bytes
        offsets = table.entries["offset"]
        inside = (offsets >= start) & (offsets < start + table.segment_bytes)
        position = 0
        for entry in table.entries[inside]:
            at, nbytes = int(entry["offset"]) - start, int(entry["nbytes"])
            self._padding(data[position:at], file, position)
            position = at + nbytes
            self.nbytes += nbytes
            if _table.digest_of(data[at:position]) != entry["digest"].tobytes():
                name = self.manifest.tree.leaves[int(entry["leaf"])].name
                message = f"tile {int(entry['tile'])} at byte {at} is not what was written"
                self._problem("damaged", file, message, name)
        self._padding(data[position:], file, position)
        self._progress(table.segment_bytes)

    def _padding(self, gap: Any, file: str, at: int) -> None:
        if gap.any():
            self._problem("damaged", file, f"padding at byte {at} is not zero")

    # Files that nobody expects

    def others(self) -> list[str]:
        """Leftovers; files inside the attempt that do not belong there become problems."""
        leftovers = []
        # Where nothing is known about what should be there, nothing is too much.
        leaves = [self.manifest.tree.leaves[number] for number in self.unsound]
        unknown = tuple(f"{self.attempt}/data/{layout_of(leaf).path}/" for leaf in leaves)
        if not self.tables_sound:
            unknown += (f"{self.attempt}/packs/",)
        for file in self.store.walk():
            if file in self.expected:
                continue
            if not file.startswith(f"{self.attempt}/") or is_temporary(file):
                leftovers.append(file)
            elif not file.startswith(unknown):
                self._problem("extra", file, "no leaf of the manifest has it")
        return leftovers


def is_temporary(file: str) -> bool:
    """Whether a file inside an attempt has a name that only a killed writer leaves behind."""
    return _TEMPORARY.match(file) is not None
