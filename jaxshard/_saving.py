"""Write one attempt: from a planned tree to a committed manifest.

`prepare` is the part that looks at the tree and refuses what cannot be saved; `write` does the
I/O, in the order that docs/format.md promises, and commits. Both the synchronous and the
asynchronous door go through them.
"""

import dataclasses
import datetime
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshard import (
    _arrays,
    _commit,
    _dtypes,
    _grid,
    _keypaths,
    _manifest,
    _plan,
    _source,
    _table,
    _tensors,
    _transfer,
    _trees,
    _zarr,
)
from jaxshard._errors import (
    DisagreementError,
    Kind,
    StorageError,
    UnsupportedLeafError,
)
from jaxshard._options import SaveOptions
from jaxshard._snapshot import Staged
from jaxshard._spec import Layout, LeafSpec, TreeSpec
from jaxshard._store import Store, storage_errors
from jaxshard._transfer import Request

_WINDOW_BYTES = 128 << 20  # of pieces in flight; TensorStore copies those with narrow tiles
_SPARE_BYTES = 1 << 20  # for what is not counted: directories, indices, tables, the manifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did.

    Attributes:
      path: the checkpoint.
      step: its step, if it has one.
      nbytes: bytes of all elements, those of shared arrays once.
      files: number of files with data.
      seconds: wall time from the call to the commit.
      blocked_s: how long the caller was kept; less than `seconds` for `save_async`.
    """

    path: str
    step: int | None
    nbytes: int
    files: int
    seconds: float
    blocked_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes by second of wall time."""
        return self.nbytes / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """A save that was checked and planned; nothing has been written."""

    store: Store
    attempt: str
    tree: TreeSpec
    values: Sequence[Any]
    plan: _plan.ProcessPlan
    options: SaveOptions
    metadata: Mapping[str, Any]
    step: int | None
    overwrite: bool
    began: float

    @property
    def window_bytes(self) -> int:
        """Bytes of pieces and pack files in flight; the other half of a budget is for copies."""
        return _window_bytes(self.options)


def require_one_process() -> None:
    """Refuse to work as one of several processes.

    Raises:
      DisagreementError: `jax.distributed` is running with more than one process.
    """
    import jax  # noqa: PLC0415

    if jax.process_count() > 1:
        raise DisagreementError(
            f"expected one process, found {jax.process_count()} (jax.process_count())",
            hint="this version saves and loads from one process with any number of devices",
        )


def prepare(
    store: Store,
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    options: SaveOptions,
    step: int | None = None,
) -> SaveJob:
    """Check and plan a save; raises whatever speaks against it before a byte is written."""
    began = time.monotonic()
    require_one_process()
    metadata = _checked_metadata(metadata)
    flat = _trees.flatten(tree)
    flat.require_sound("stored; nothing was written")
    with storage_errors("looking at", store.url):
        _commit.require_writable(store, overwrite=overwrite)
    leaves = _with_layouts(flat.spec.leaves, flat.values, options)
    segment = min(_plan.PACK_SEGMENT_BYTES, max(_plan.PACK_ALIGN, _window_bytes(options) // 2))
    (plan,) = _plan.plan_save(leaves, [None] * len(leaves), segment_bytes_max=segment)
    return SaveJob(
        store=store,
        attempt=_commit.new_attempt(),
        tree=dataclasses.replace(flat.spec, leaves=leaves),
        values=flat.values,
        plan=plan,
        options=options,
        metadata=metadata,
        step=step,
        overwrite=overwrite,
        began=began,
    )


def _piece_bytes_max(options: SaveOptions) -> int:
    """Limit of a piece; under a small budget two must fit into the half that is in flight."""
    if options.host_bytes_max is None:
        return options.piece_bytes_max
    return min(options.piece_bytes_max, max(_grid.TILE_BYTES, options.host_bytes_max // 4))


def _window_bytes(options: SaveOptions) -> int:
    return _WINDOW_BYTES if options.host_bytes_max is None else max(1, options.host_bytes_max // 2)


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metadata as it will be read back."""
    metadata = dict(metadata or {})
    try:
        _manifest.canonical(metadata)
        strings = all(isinstance(key, str) for key in metadata)
    except (TypeError, ValueError) as e:
        raise UnsupportedLeafError(
            f"metadata: expected values that JSON has, found others: {e}",
            hint="NaN, arrays and objects belong into the tree",
        ) from e
    if not strings:
        raise UnsupportedLeafError("metadata: expected strings as keys", hint="use str(key)")
    return metadata


def _with_layouts(
    leaves: Sequence[LeafSpec], values: Sequence[Any], options: SaveOptions
) -> tuple[LeafSpec, ...]:
    stored = [i for i, leaf in enumerate(leaves) if leaf.has_array and leaf.same_as is None]
    paths = _keypaths.storage_paths(leaves[i].name for i in stored)
    layouts = {
        i: _layout(leaves[i], _arrays.partitions(leaves[i], values[i]), path, options)
        for i, path in zip(stored, paths, strict=True)
    }
    return tuple(dataclasses.replace(leaf, layout=layouts.get(i)) for i, leaf in enumerate(leaves))


def _layout(leaf: LeafSpec, partitions: tuple[int, ...], path: str, options: SaveOptions) -> Layout:
    dtype, shape = str(leaf.dtype), leaf.array_shape or ()
    per_byte = _dtypes.elements_per_byte(dtype)
    if not shape or (partitions[-1] > 1 and shape[-1] // partitions[-1] % per_byte):
        per_byte = 1  # boxes would not fall on byte edges
    stored_type = _dtypes.stored_dtype(dtype)
    itemsize = _dtypes.numpy_dtype(stored_type).itemsize
    stored_shape = _manifest.stored_shape(shape, per_byte)
    piece, tile = _grid.choose(
        stored_shape, partitions, itemsize, piece_bytes_max=_piece_bytes_max(options)
    )
    piece_bytes = itemsize * math.prod(min(p, n) for p, n in zip(piece, stored_shape, strict=True))
    packed = piece_bytes < options.pack_below
    return Layout(path, stored_type, per_byte, stored_shape, piece, tile, packed)


def write(job: SaveJob, staged: Iterable[Staged | None]) -> None:
    """Write everything and commit; on any error, remove the attempt and leave the rest alone.

    Raises:
      StorageError: the store failed; nothing was committed.
      ConflictError: another save committed at this path first.
    """
    try:
        with storage_errors("writing", job.store.url):
            _require_space(job)
            _write(job, staged)
    except BaseException:
        _commit.abandon(job.store, job.attempt)
        raise


def _require_space(job: SaveJob) -> None:
    free = job.store.free_bytes()
    needed = job.plan.nbytes + _SPARE_BYTES
    if free is not None and free < needed:
        raise StorageError(
            f"{job.store.url}: expected {needed:,} free bytes, found {free:,}",
            kind=Kind.NO_SPACE,
            path=job.store.url,
            hint="free some space, or save elsewhere; nothing was written",
        )


def _write(job: SaveJob, staged: Iterable[Staged | None]) -> None:
    job.store.make_dirs(_directories(job))
    record = _Record(job)
    _transfer.run(
        record.requests(iter(staged)),
        bytes_max=job.window_bytes,
        timeout_s=job.options.timeout_s,
    )
    if job.plan.nbytes > _tensors.TRIM_BYTES:
        _tensors.trim_heap()
    table = record.table().to_bytes()
    job.store.write(_source.table_file(job.attempt, 0), table)
    manifest = _manifest.Manifest(
        attempt=job.attempt,
        nonce=secrets.token_hex(16),
        step=job.step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        metadata=job.metadata,
        environment=_arrays.environment(),
        compression=job.options.compression,
        tree=dataclasses.replace(job.tree, leaves=record.leaves_with_digests()),
        processes=(_manifest.ProcessRecord(len(table), _table.digest_of(table).hex()),),
    )
    _commit.commit(job.store, manifest, overwrite=job.overwrite)


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
    for piece in job.plan.pieces:
        file = _piece_file(job, piece)
        directories.add(file.rpartition("/")[0])
    if job.plan.segments:
        directories.add(f"{_source.pack_dir(attempt, 0)}/c")
    return sorted(directories)


def _piece_file(job: SaveJob, piece: _plan.Piece) -> str:
    layout = _source.layout_of(job.tree.leaves[piece.leaf])
    position = _plan.piece_lattice(layout).position(piece.number)
    return _tensors.piece_file(job.attempt, layout, position)


class _Record:
    """What is being written, and what the table will say about it."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._arrays: dict[int, Any] = {}
        self._pieces: list[tuple[int, int, int, list[tuple[int, bytes]]]] = []
        self._entries: list[tuple[_plan.Entry, bytes]] = []

    def requests(self, staged: Iterator[Staged | None]) -> Iterator[Request | None]:
        """Pieces, then the small files (while pieces are in flight), then the pack.

        A None of `staged` (not there yet) is passed on.
        """
        for _ in self._job.plan.pieces:
            while (item := _next(staged)) is None:
                yield None
            yield self._piece_request(item)
        for key, data in self._small_files():
            yield self._file_request(key, data)
        yield from self._pack_requests(staged)

    def _piece_request(self, staged: Staged) -> Request:
        job, piece = self._job, staged.of
        assert isinstance(piece, _plan.Piece)
        leaf = job.tree.leaves[piece.leaf]
        layout = _source.layout_of(leaf)
        file = _piece_file(job, piece)
        release = staged.release
        # Here, so that the request does not hold the unpacked elements of a sub-byte leaf too.
        values = _dtypes.to_stored(staged.values, str(leaf.dtype), layout.per_byte)
        del staged

        def start() -> _transfer.Future:
            digests = _tensors.tile_digests(values, piece.box, _plan.tile_lattice(layout))
            self._pieces.append((piece.leaf, piece.number, len(self._pieces), digests))
            if piece.leaf not in self._arrays:
                self._arrays[piece.leaf] = _tensors.open_for_writing(
                    job.store, job.attempt, leaf, job.options.compression
                )
            return _tensors.write_box(self._arrays[piece.leaf], piece.box, values)

        return Request(
            piece.nbytes,
            start,
            lambda _: release(),
            lambda error: _tensors.write_error(error, leaf.name, file),
        )

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
            self._job.store.write(key, data)
            return _DONE

        return Request(len(data), start, _ignore, _as_it_is)

    def _pack_requests(self, staged: Iterator[Staged | None]) -> Iterator[Request | None]:
        """One request for each file of the pack, assembled in memory."""
        plan = self._job.plan
        entries = iter(plan.entries)
        entry = next(entries, None)
        for segment in range(plan.segments):
            buffer = _tensors.empty((plan.segment_bytes,), np.dtype(np.uint8))
            buffer[:] = 0
            end = (segment + 1) * plan.segment_bytes
            while entry is not None and entry.offset < end:
                while (item := _next(staged)) is None:
                    yield None
                self._put(item, entry, buffer, segment * plan.segment_bytes)
                entry = next(entries, None)
            yield self._file_request(_source.pack_file(self._job.attempt, 0, segment), buffer)

    def _put(self, staged: Staged, entry: _plan.Entry, buffer: Any, start: int) -> None:
        leaf = self._job.tree.leaves[entry.leaf]
        layout = _source.layout_of(leaf)
        values = _dtypes.to_stored(staged.values, str(leaf.dtype), layout.per_byte)
        raw = _tensors.raw_bytes(values)
        self._entries.append((entry, _table.digest_of(raw)))
        at = entry.offset - start
        buffer[at : at + entry.nbytes] = raw
        staged.release()

    def table(self) -> _table.Table:
        """The table of this process; every file is durable by now."""
        job = self._job
        self._pieces.sort()
        by_number = {(p.leaf, p.number): p for p in job.plan.pieces}
        pieces = np.zeros(len(self._pieces), _table.PIECE)
        for row, (leaf, index, _, digests) in enumerate(self._pieces):
            size = self._size(_piece_file(job, by_number[leaf, index]))
            pieces[row] = (leaf, len(digests), index, size)
        tile_digests = [digest for *_, tiles in self._pieces for _, digest in tiles]
        for segment in range(job.plan.segments):
            self._size(_source.pack_file(job.attempt, 0, segment))
        entries = np.zeros(len(self._entries), _table.ENTRY)
        for row, (entry, digest) in enumerate(self._entries):
            entries[row] = (entry.leaf, 0, entry.tile, entry.offset, entry.nbytes, digest)
        return _table.Table(
            0,
            pieces,
            np.frombuffer(b"".join(tile_digests), _table.DIGEST),
            entries,
            job.plan.segment_bytes,
            job.plan.segments,
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

    def leaves_with_digests(self) -> tuple[LeafSpec, ...]:
        """The leaves as the manifest keeps them."""
        tiles: dict[int, list[tuple[int, bytes]]] = {}
        for leaf, _, _, digests in self._pieces:
            tiles.setdefault(leaf, []).extend(digests)
        for entry, digest in self._entries:
            tiles.setdefault(entry.leaf, []).append((entry.tile, digest))
        return tuple(
            leaf
            if leaf.layout is None
            else dataclasses.replace(leaf, digest=f"{_table.leaf_digest(tiles.get(i, [])):032x}")
            for i, leaf in enumerate(self._job.tree.leaves)
        )


class SnapshotStoppedError(Exception):
    """The snapshot ended early, because the caller failed or gave up."""


def _next(staged: Iterator[Staged | None]) -> Staged | None:
    try:
        return next(staged)
    except StopIteration:
        raise SnapshotStoppedError from None


class _Written:
    """A future of something that is done already."""

    def result(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""


_DONE = _Written()


def _ignore(_: Any) -> None:
    pass


def _as_it_is(error: Exception) -> Exception:
    return error


def report(job: SaveJob, *, blocked_s: float | None = None) -> SaveReport:
    """The report of a job that was committed just now."""
    seconds = time.monotonic() - job.began
    return SaveReport(
        path=job.store.url,
        step=job.step,
        nbytes=sum(leaf.nbytes for leaf in job.tree.leaves if leaf.layout is not None),
        files=len(job.plan.pieces) + job.plan.segments,
        seconds=seconds,
        blocked_s=seconds if blocked_s is None else blocked_s,
    )
