"""Write one attempt: from a planned save to a committed manifest.

Pieces, small files, packs, table and manifest, in the order that docs/format.md promises; on any
error nothing is left but what was there before.
"""

import dataclasses
import datetime
import errno
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxshard import (
    _arrays,
    _buffers,
    _commit,
    _dtypes,
    _manifest,
    _piecefile,
    _plan,
    _source,
    _table,
    _tensors,
    _transfer,
    _zarr,
)
from jaxshard._errors import Kind, StorageError
from jaxshard._saving import PACK_BUFFERS, SaveJob
from jaxshard._snapshot import Staged
from jaxshard._spec import Layout, LeafSpec, layout_of
from jaxshard._store import Syncer, storage_errors
from jaxshard._transfer import Request

_SPARE_BYTES = 1 << 20  # for what is not counted: directories, indices, tables, the manifest


def write(job: SaveJob, staged: Iterable[Staged | None]) -> int:
    """Write everything and commit; on any error, remove the attempt and leave the rest alone.

    Returns:
      Bytes of elements that were not written, since the step before has them.

    Raises:
      StorageError: the store failed; nothing was committed.
      ConflictError: another save committed at this path first.
    """
    try:
        with storage_errors("writing", job.store.url):
            _require_space(job)
            return _write(job, staged)
    except BaseException:
        _commit.abandon(job.store, job.attempt)
        raise


def _require_space(job: SaveJob) -> None:
    free = job.store.free_bytes()
    needed = job.plan.nbytes + _SPARE_BYTES
    needed -= 0 if job.reuse is None else job.reuse.expected_bytes
    if free is not None and free < needed:
        raise StorageError(
            f"{job.store.url}: expected {needed:,} free bytes, found {free:,}",
            kind=Kind.NO_SPACE,
            path=job.store.url,
            hint="free some space, or save elsewhere; nothing was written",
        )


def _write(job: SaveJob, staged: Iterable[Staged | None]) -> int:
    job.store.make_dirs(_directories(job))
    began, timeout_s = time.monotonic(), job.options.timeout_s
    syncing = job.store.syncing()
    record = _Record(job, syncing)
    try:
        _transfer.run(
            record.requests(iter(staged)), bytes_max=job.window_bytes, timeout_s=timeout_s
        )
        leaves = record.leaves()  # while the last files are synced
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
        with _transfer.late(timeout_s):
            syncing.finish(left)
    except BaseException:
        syncing.abandon()
        raise
    # TensorStore's threads, and JAX where it unpacks sub-byte arrays, take memory by malloc.
    by_malloc = not record.is_straight or any(x.per_byte > 1 for _, x in _filed_leaves(job))
    if by_malloc and job.plan.nbytes > _buffers.TRIM_BYTES:
        _buffers.trim_heap()
    table = record.table().to_bytes()
    job.store.write(_source.table_file(job.attempt, 0), table)
    draft = job.draft if job.draft is not None else _draft(job, record.reused())
    manifest = dataclasses.replace(
        draft,
        attempt=job.attempt,
        nonce=secrets.token_hex(16),
        tree=dataclasses.replace(job.tree, leaves=leaves),
        processes=(_manifest.ProcessRecord(len(table), _table.digest_of(table).hex()),),
    )
    if job.epoch is not None:
        job.epoch.require_newest()
    if job.may_commit is not None:
        job.may_commit()
    _commit.commit(job.store, manifest, overwrite=job.overwrite)
    return sum(leaf.nbytes for leaf in manifest.reused.values())


def _draft(job: SaveJob, reused: dict[str, _manifest.ReusedLeaf]) -> _manifest.Manifest:
    """What the manifest of a new save says but for its files."""
    return _manifest.Manifest(
        attempt="",
        nonce="",
        step=job.step,
        epoch=None if job.epoch is None else job.epoch.number,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        metadata=job.metadata,
        environment=_arrays.environment(),
        compression=job.options.compression,
        tree=job.tree,
        processes=(),
        reused=reused,
    )


def _filed_leaves(job: SaveJob) -> list[tuple[LeafSpec, Layout]]:
    return [
        (leaf, leaf.layout)
        for leaf in job.tree.leaves
        if leaf.layout is not None and not leaf.layout.packed
    ]


def _directories(job: SaveJob) -> list[str]:
    """Every directory that the attempt will have, so that TensorStore creates none."""
    attempt = job.attempt
    directories = {f"{attempt}/data", _source.table_file(attempt, 0).rpartition("/")[0]}
    directories.update(f"{attempt}/data/{layout.path}" for _, layout in _filed_leaves(job))
    for leaf, number in job.plan.pieces[["leaf", "number"]].tolist():
        directories.add(_piece_file(job, leaf, number).rpartition("/")[0])
    if job.plan.segments:
        directories.add(f"{_source.pack_dir(attempt, 0)}/c")
    return sorted(directories)


def _piece_file(job: SaveJob, leaf: int, number: int) -> str:
    return _tensors.piece_file(job.attempt, layout_of(job.tree.leaves[leaf]), number)


class _Record:
    """What is being written, and what table and manifest will say about it."""

    def __init__(self, job: SaveJob, syncing: Syncer) -> None:
        self._job = job
        self._syncing = syncing
        self.is_straight = job.options.compression is None and _piecefile.IS_FAST
        self._encoder = _piecefile.PieceEncoder()
        self._hasher = _tensors.TileHasher()
        self._reuse = job.reuse if job.reuse is not None and job.reuse.open() else None
        self._reused: dict[int, tuple[int, int]] = {}  # by leaf: pieces and their bytes
        self._arrays: dict[int, Any] = {}
        self._pieces: list[tuple[int, int, list[tuple[int, bytes]]]] = []
        self._entry_digests: list[bytes] = []
        self._offsets = job.plan.entries["offset"].tolist()

    def requests(self, staged: Iterator[Staged | None]) -> Iterator[Request | None]:
        """Pieces, then the small files (while pieces are in flight), then the pack.

        A None of `staged` (not there yet) is passed on.
        """
        for _ in range(len(self._job.plan.pieces)):
            while (item := _next(staged)) is None:
                yield None
            yield self._piece_request(item)
        for key, data in self._small_files():
            yield self._file_request(key, data)
        yield from self._pack_requests(staged)

    def _piece_request(self, staged: Staged) -> Request:
        job, piece = self._job, staged.of
        assert isinstance(piece, _plan.Piece)
        if not staged.values:
            return self._unchanged_request(piece)
        leaf = job.tree.leaves[piece.leaf]
        layout = layout_of(leaf)
        file = _piece_file(job, piece.leaf, piece.number)
        release = staged.release
        # A tile that is not contiguous, or at the edge, is gathered, and again for its digest.
        # With the views of one array of 2 GiB counted too, a single piece was written at a time,
        # at half the speed of the disk. (benchmarks/save.py, state huge)
        gathered = 2 * _plan.stored_tile_bytes(layout) if self.is_straight else 0
        nbytes = gathered + (0 if self.is_straight and staged.views else piece.nbytes)
        # Here, so that the request does not hold the unpacked elements of a sub-byte leaf too.
        values = _dtypes.to_stored(staged.values[0], str(leaf.dtype), layout.per_byte)
        del staged

        digests: list[tuple[int, bytes]] = []

        def instead() -> bool:
            found = self._hasher.digests(values, piece.box, _plan.tile_lattice(layout))
            return self._link_if_same(piece, found)

        def start() -> _transfer.Future:
            if self.is_straight:
                parts = self._encoder.parts(values, piece.box, layout, digests)
                return self._syncing.write_parts(file, parts, instead)
            digests.extend(self._hasher.digests(values, piece.box, _plan.tile_lattice(layout)))
            if self._link_if_same(piece, digests):
                return _transfer.done(True)
            if piece.leaf not in self._arrays:
                self._arrays[piece.leaf] = _tensors.open_for_writing(
                    job.store, job.attempt, leaf, job.options.compression
                )
            return _tensors.write_box(self._arrays[piece.leaf], piece.box, values)

        def finish(linked: Any) -> None:
            release()
            if linked is True:
                self._is_reused(piece)
                return
            self._pieces.append((piece.leaf, piece.number, digests))
            if not self.is_straight:
                self._syncing.written(file)

        return Request(
            nbytes,
            start,
            finish,
            lambda error: _tensors.write_error(error, leaf.name, file),
        )

    # What the step before has

    def _link_if_same(self, piece: _plan.Piece, digests: Iterable[tuple[int, bytes]]) -> bool:
        file = _piece_file(self._job, piece.leaf, piece.number)
        same = self._reuse is not None and self._reuse.has(piece, digests)
        return same and self._reuse is not None and self._reuse.link(self._syncing, file, piece)

    def _unchanged_request(self, piece: _plan.Piece) -> Request:
        """Link a file without a look at the values, or copy it where links are not made."""
        leaf = self._job.tree.leaves[piece.leaf]
        file = _piece_file(self._job, piece.leaf, piece.number)

        def start() -> _transfer.Future:
            reuse = self._reuse
            if reuse is None:
                raise FileNotFoundError(errno.ENOENT, "the step before has lost its tables", file)
            contents = reuse.contents(piece)
            return self._syncing.write_parts(
                file, contents, lambda: reuse.link(self._syncing, file, piece)
            )

        def finish(linked: Any) -> None:
            self._is_reused(piece, linked=linked is True)

        return Request(0, start, finish, lambda e: _tensors.write_error(e, leaf.name, file))

    def _is_reused(self, piece: _plan.Piece, *, linked: bool = True) -> None:
        assert self._reuse is not None
        tiles = _plan.tile_lattice(layout_of(self._job.tree.leaves[piece.leaf])).touching(piece.box)
        digests = list(zip(tiles, self._reuse.digests(piece), strict=True))
        self._pieces.append((piece.leaf, piece.number, digests))
        if linked:
            pieces, nbytes = self._reused.get(piece.leaf, (0, 0))
            self._reused[piece.leaf] = (pieces + 1, nbytes + piece.nbytes)

    def reused(self) -> dict[str, _manifest.ReusedLeaf]:
        """By name of the leaf, what it shares with the step before."""
        return {
            self._job.tree.leaves[leaf].name: _manifest.ReusedLeaf(
                pieces, nbytes, self._reuse.saves(leaf)
            )
            for leaf, (pieces, nbytes) in self._reused.items()
            if self._reuse is not None
        }

    def _small_files(self) -> Iterator[tuple[str, bytes]]:
        attempt, filed = self._job.attempt, _filed_leaves(self._job)
        group = _zarr.to_bytes(_zarr.group_metadata())
        for path in _zarr.group_paths([layout for _, layout in filed]):
            yield f"{attempt}/data/{path}/zarr.json".replace("//", "/"), group
        for leaf, layout in filed:
            metadata = _zarr.array_metadata(leaf, layout, self._job.options.compression)
            yield f"{attempt}/data/{layout.path}/zarr.json", _zarr.to_bytes(metadata)
        plan = self._job.plan
        if plan.segments:
            metadata = _zarr.pack_metadata(plan.segment_bytes, plan.segments)
            yield f"{_source.pack_dir(attempt, 0)}/zarr.json", _zarr.to_bytes(metadata)

    def _file_request(self, key: str, data: Any) -> Request:
        def start() -> _transfer.Future:
            self._syncing.write(key, data)
            return _transfer.done()

        return Request(len(data), start, _ignore, _as_it_is)

    def _pack_requests(self, staged: Iterator[Staged | None]) -> Iterator[Request | None]:
        """One request for each file of the pack, assembled in memory while others are written."""
        plan = self._job.plan
        if not plan.segments:
            return
        # Memory that was touched before is faster than new: a ring of buffers, used again.
        free: list[Any] = [None] * PACK_BUFFERS
        for segment, stretches in enumerate(plan.stretches()):
            while not free:
                yield None
            buffer = free.pop()
            if buffer is None:
                buffer = _buffers.empty((plan.segment_bytes,), np.dtype(np.uint8))
            start, end = segment * plan.segment_bytes, 0
            for stretch in stretches:
                while (item := _next(staged)) is None:
                    yield None
                end = self._put(item, stretch, buffer, start, end)
            buffer[end:] = 0
            yield self._segment_request(segment, buffer, free)

    def _segment_request(self, segment: int, buffer: Any, free: list[Any]) -> Request:
        file = _source.pack_file(self._job.attempt, 0, segment)
        return Request(
            len(buffer),
            lambda: self._syncing.write_parts(file, [(buffer,)]),
            lambda _: free.append(buffer),
            lambda error: _tensors.write_error(error, None, file),
        )

    def _put(
        self, staged: Staged, stretch: _plan.Stretch, buffer: Any, start: int, end: int
    ) -> int:
        """Copy a stretch of entries into the file that is being assembled, zeros between them.

        Returns:
          Where the last entry ends; `end` is where the one before the stretch did.
        """
        leaf = self._job.tree.leaves[stretch.leaf]
        per_byte = layout_of(leaf).per_byte
        stored = [_dtypes.to_stored(part, str(leaf.dtype), per_byte) for part in staged.values]
        offsets = self._offsets[stretch.first : stretch.stop]
        for raw, offset in zip(map(_tensors.raw_bytes, stored), offsets, strict=True):
            at = offset - start
            if at > end:
                buffer[end:at] = 0
            end = at + len(raw)
            buffer[at:end] = raw
            self._entry_digests.append(_table.digest_of(raw))
        staged.release()
        return end

    def table(self) -> _table.Table:
        """The table of this process; every file is durable by now."""
        job, plan = self._job, self._job.plan
        self._pieces.sort()
        pieces = np.zeros(len(self._pieces), _table.PIECE)
        for row, (leaf, number, digests) in enumerate(self._pieces):
            size = self._size(_piece_file(job, leaf, number))
            pieces[row] = (leaf, len(digests), number, size)
        tile_digests = [digest for *_, tiles in self._pieces for _, digest in tiles]
        for segment in range(plan.segments):
            self._size(_source.pack_file(job.attempt, 0, segment))
        entries = np.zeros(len(plan.entries), _table.ENTRY)
        for field in ("leaf", "tile", "offset", "nbytes"):
            entries[field] = plan.entries[field]
        entries["digest"] = np.frombuffer(b"".join(self._entry_digests), _table.DIGEST)
        return _table.Table(
            0,
            pieces,
            np.frombuffer(b"".join(tile_digests), _table.DIGEST),
            entries,
            plan.segment_bytes,
            plan.segments,
        )

    def _size(self, file: str) -> int:
        """Length of a file that was written; it may be gone if somebody took us for dead."""
        size = self._job.store.size(file)
        if size is None:
            raise StorageError(
                f"{self._job.store.url}: {file!r} was removed while the save was going on",
                path=self._job.store.url,
                hint="is another job writing to the same place?",
            )
        return size

    def leaves(self) -> tuple[LeafSpec, ...]:
        """The leaves as the manifest keeps them."""
        sums = [0] * len(self._job.tree.leaves)
        for leaf, _, digests in self._pieces:
            sums[leaf] += _table.leaf_digest(digests)
        entries = self._job.plan.entries
        tiles = zip(entries["tile"].tolist(), self._entry_digests, strict=True)
        for leaf, tile in zip(entries["leaf"].tolist(), tiles, strict=True):
            sums[leaf] += _table.tile_part(*tile)
        return tuple(
            leaf if leaf.layout is None else leaf._replace(digest=_table.digest_text(sums[i]))
            for i, leaf in enumerate(self._job.tree.leaves)
        )


class SnapshotStoppedError(Exception):
    """The snapshot ended early, because the caller failed or gave up."""


def _next(staged: Iterator[Staged | None]) -> Staged | None:
    try:
        return next(staged)
    except StopIteration:
        raise SnapshotStoppedError from None


def _ignore(_: Any) -> None:
    pass


def _as_it_is(error: Exception) -> Exception:
    return error
