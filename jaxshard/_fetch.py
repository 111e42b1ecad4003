"""Boxes of leaves of one checkpoint into host buffers, each tile read once and verified.

Between the plan (`_plan.plan_load`) and the values: allocates the buffers, reads slabs within the
byte budget, compares the digest of every tile, and hands each leaf over as soon as it is whole.
Knows nothing of jax.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxshard import _dtypes, _plan, _tensors, _transfer
from jaxshard._boxes import Box
from jaxshard._errors import CheckpointReplacedError, CorruptionError
from jaxshard._source import HINT, Source, layout_of, pack_file
from jaxshard._spec import Layout, LeafSpec
from jaxshard._table import digest_of
from jaxshard._tensors import Array, IoMode
from jaxshard._transfer import Request

HOST_BYTES_MAX = 256 << 20


class Want(NamedTuple):
    """Boxes (in elements of the leaf) that are wanted, and who gets them when they are there."""

    leaf: int
    boxes: list[Box]
    done: Callable[[dict[Box, Array]], None]


@dataclasses.dataclass(slots=True)
class Traffic:
    """What was read: bytes of the wanted boxes, and bytes taken from storage for them."""

    bytes_needed: int = 0
    bytes_read: int = 0


def fetch(
    source: Source,
    wants: Iterable[Want],
    *,
    host_bytes_max: int = HOST_BYTES_MAX,
    io_mode: IoMode = "auto",
    timeout_s: float | None = None,
) -> Traffic:
    """Read all that is wanted; each `done` is called in the calling thread, in order.

    Raises:
      CorruptionError: bytes are missing, cut, changed or in the wrong place.
      CheckpointReplacedError: a writer replaced or deleted the checkpoint meanwhile.
      StorageError: the store failed, or `timeout_s` passed.
    """
    job = _Job(source, host_bytes_max, io_mode)
    try:
        _transfer.run(job.requests(wants), bytes_max=host_bytes_max, timeout_s=timeout_s)
    except (CorruptionError, FileNotFoundError) as e:
        raise_if_replaced(source, e)
        if isinstance(e, FileNotFoundError):
            raise _tensors.missing_file("?", str(e.filename)) from e
        raise
    if job.traffic.bytes_read > _tensors.TRIM_BYTES:
        _tensors.trim_heap()
    return job.traffic


def raise_if_replaced(source: Source, cause: Exception | None) -> None:
    """What looks like damage may be that the checkpoint is not there any more.

    Raises:
      CheckpointReplacedError: its manifest is gone or another one.
    """
    if source.replaced():
        raise CheckpointReplacedError(
            f"{source.store.url}: the checkpoint was replaced or deleted while it was read",
            path=source.store.url,
            hint="open it again",
        ) from cause


class _Assembly:
    """The buffers of one want, allocated when its first bytes are about to arrive."""

    def __init__(self, leaf: LeafSpec, want: Want) -> None:
        self.layout = layout_of(leaf)
        self.leaf = leaf
        self.want = want
        self.stored_boxes = [_plan.stored_box(box, self.layout) for box in want.boxes]
        self.pending = 0
        self.sealed = False
        self._buffers: list[Array] | None = None

    @property
    def buffers(self) -> list[Array]:
        if self._buffers is None:
            dtype = _dtypes.numpy_dtype(self.layout.dtype)
            self._buffers = [_tensors.empty(box.shape, dtype) for box in self.stored_boxes]
        return self._buffers

    def part(self, target: int, box: Box) -> Array:
        """View of one buffer at a box of the array."""
        part: Array = self.buffers[target][box.relative_to(self.stored_boxes[target]).slices]
        return part

    def scatter(self, values: Array, box: Box, targets: Iterable[int]) -> None:
        """Copy what several buffers need of a tile."""
        for target in targets:
            common = box.intersect(self.stored_boxes[target])
            assert common is not None
            self.part(target, common)[...] = values[common.relative_to(box).slices]

    def arrived(self) -> None:
        self.pending -= 1
        self.finish_if_whole()

    def finish_if_whole(self) -> None:
        if self.pending == 0 and self.sealed:
            per_byte = self.layout.per_byte
            out = {}
            for box, stored, buffer in zip(
                self.want.boxes, self.stored_boxes, self.buffers, strict=True
            ):
                last = slice(None)
                if per_byte > 1:
                    start = box.offset[-1] - stored.offset[-1] * per_byte
                    last = slice(start, start + box.shape[-1])
                out[box] = _dtypes.from_stored(buffer, str(self.leaf.dtype), per_byte, last)
            self._buffers = None
            self.want.done(out)


class _Job:
    """One call of `fetch`: turns wants into requests."""

    def __init__(self, source: Source, host_bytes_max: int, io_mode: IoMode) -> None:
        self.source = source
        self.io_mode = io_mode
        self.traffic = Traffic()
        self._segments: set[tuple[int, int]] = set()  # files of packs whose length was checked
        # A slab in flight holds its bytes as they are stored and decoded; several must fit.
        self.slab_bytes_max = max(1, host_bytes_max // 8)

    def requests(self, wants: Iterable[Want]) -> Iterator[Request]:
        for want in wants:
            number = self.source.resolve(want.leaf)
            leaf = self.source.leaf(number)
            assembly = _Assembly(leaf, want)
            layout = assembly.layout
            if layout.nbytes:
                self.source.require_complete(number)
            self.traffic.bytes_needed += layout.itemsize * sum(
                box.size for box in assembly.stored_boxes
            )
            make = self._packed if layout.packed else self._filed
            for request in make(number, leaf, assembly):
                assembly.pending += 1
                yield request
            assembly.sealed = True
            assembly.finish_if_whole()

    # Pieces in files of their own

    def _filed(self, number: int, leaf: LeafSpec, assembly: _Assembly) -> Iterator[Request]:
        manifest = self.source.manifest
        slabs = _plan.plan_load(
            assembly.layout, assembly.stored_boxes, slab_bytes_max=self.slab_bytes_max
        )
        for piece in dict.fromkeys(slab.piece for slab in slabs):
            self._check_length(number, leaf, piece)
        if slabs:
            array = _tensors.open_for_reading(
                self.source.store, manifest.attempt, leaf, manifest.compression, self.io_mode
            )
        for slab in slabs:
            yield self._slab_request(number, leaf, assembly, array, slab)

    def _check_length(self, number: int, leaf: LeafSpec, piece: int) -> None:
        """The file is as long as it must be: before memory is taken or mapped for it."""
        file = self._file(leaf, piece)
        expected = self.source.file_bytes(number, piece)
        found = self.source.store.size(file)
        if found is None:
            raise _tensors.missing_file(leaf.name, file)
        if found != expected:
            raise CorruptionError(
                f"leaf {leaf.name!r}, piece {piece}, file {file!r}: expected {expected} bytes, "
                f"found {found}",
                path=file,
                hint=HINT,
            )

    def _file(self, leaf: LeafSpec, piece: int) -> str:
        layout = layout_of(leaf)
        position = _plan.piece_lattice(layout).position(piece)
        return _tensors.piece_file(self.source.manifest.attempt, layout, position)

    def _slab_request(
        self, number: int, leaf: LeafSpec, assembly: _Assembly, array: Any, slab: _plan.Slab
    ) -> Request:
        layout = assembly.layout
        scratch: list[Array] = []

        def start() -> _transfer.Future:
            if slab.target is None:
                into = np.empty(slab.box.shape, _dtypes.numpy_dtype(layout.dtype))
            else:
                into = assembly.part(slab.target, slab.box)
            scratch.append(into)
            return _tensors.read_box(array, slab.box, into)

        def finish(_: Any) -> None:
            values = scratch.pop()
            self._compare(number, leaf, slab, values)
            if slab.target is None:
                assembly.scatter(values, slab.box, slab.targets)
            self._count(layout, slab)
            assembly.arrived()

        file = self._file(leaf, slab.piece)
        return Request(
            2 * slab.box.size * layout.itemsize,
            start,
            finish,
            lambda error: _tensors.read_error(error, leaf.name, file),
        )

    def _compare(self, number: int, leaf: LeafSpec, slab: _plan.Slab, values: Array) -> None:
        tiles = _plan.tile_lattice(layout_of(leaf))
        for tile, digest in _tensors.tile_digests(values, slab.box, tiles):
            if digest != self.source.tile_digest(number, slab.piece, tile):
                raise self._wrong(leaf, self._file(leaf, slab.piece), tile)

    def _wrong(self, leaf: LeafSpec, file: str, tile: int) -> CorruptionError:
        return CorruptionError(
            f"leaf {leaf.name!r}, tile {tile}, file {file!r}: its bytes are not those that were "
            "written (changed, or the file is in another one's place)",
            path=file,
            hint=HINT,
        )

    def _count(self, layout: Layout, slab: _plan.Slab) -> None:
        self.traffic.bytes_read += _plan.file_bytes(layout, slab.box)

    # Tiles in packs

    def _packed(self, number: int, leaf: LeafSpec, assembly: _Assembly) -> Iterator[Request]:
        tiles = _plan.tile_lattice(assembly.layout)
        needed = sorted({t for box in assembly.stored_boxes for t in tiles.touching(box)})
        rows = sorted(self.source.entry_row(number, t) for t in needed)
        for process, row in rows:
            self._require_segment(leaf, process, row)
        run: list[tuple[int, int]] = []
        for process, row in rows:
            if run and not self._joins(run, process, row):
                yield self._run_request(leaf, assembly, run)
                run = []
            run.append((process, row))
        if run:
            yield self._run_request(leaf, assembly, run)

    def _joins(self, run: list[tuple[int, int]], process: int, row: int) -> bool:
        """Whether an entry lies right behind a run of entries, in the same file."""
        table = self.source.tables[process]
        (first_process, first), (_, last) = run[0], run[-1]
        if process != first_process or row != last + 1:
            return False
        start = int(table.entries[first]["offset"])
        end = int(table.entries[row]["offset"]) + int(table.entries[row]["nbytes"])
        same_file = start // table.segment_bytes == (end - 1) // table.segment_bytes
        return same_file and end - start <= self.slab_bytes_max

    def _run_request(
        self, leaf: LeafSpec, assembly: _Assembly, run: list[tuple[int, int]]
    ) -> Request:
        process = run[0][0]
        table = self.source.tables[process]
        entries = table.entries[run[0][1] : run[-1][1] + 1]
        start = int(entries[0]["offset"])
        nbytes = int(entries[-1]["offset"]) + int(entries[-1]["nbytes"]) - start
        segment, offset = divmod(start, table.segment_bytes)
        file = pack_file(self.source.manifest.attempt, process, segment)

        def finish(data: Array) -> None:
            for entry in entries:
                at = int(entry["offset"]) - start
                self._place(leaf, assembly, entry, data[at : at + int(entry["nbytes"])], file)
            self.traffic.bytes_read += nbytes
            assembly.arrived()

        return Request(
            nbytes,
            lambda: _Done(self._read_pack(file, offset, nbytes)),
            finish,
            lambda error: _tensors.read_error(error, leaf.name, file),
        )

    def _require_segment(self, leaf: LeafSpec, process: int, row: int) -> None:
        """The file of an entry is as long as it must be: before memory is taken for its leaf."""
        table = self.source.tables[process]
        segment = int(table.entries[row]["offset"]) // table.segment_bytes
        if (process, segment) in self._segments:
            return
        file = pack_file(self.source.manifest.attempt, process, segment)
        size = self.source.store.size(file)
        if size is None:
            raise _tensors.missing_file(leaf.name, file)
        if size != table.segment_bytes:
            raise CorruptionError(
                f"leaf {leaf.name!r}, file {file!r}: expected {table.segment_bytes} bytes, "
                f"found {size}",
                path=file,
                hint=HINT,
            )
        self._segments.add((process, segment))

    def _read_pack(self, file: str, offset: int, nbytes: int) -> Array:
        data = np.empty(nbytes, np.uint8)
        self.source.store.read_range(file, offset, data.data)
        return data

    def _place(
        self, leaf: LeafSpec, assembly: _Assembly, entry: Any, data: Array, file: str
    ) -> None:
        layout = assembly.layout
        tile = int(entry["tile"])
        box = _plan.tile_lattice(layout).box(tile)
        fits = len(data) == box.size * layout.itemsize
        if not fits or digest_of(data) != entry["digest"].tobytes():
            raise self._wrong(leaf, file, tile)
        values = data.view(_dtypes.numpy_dtype(layout.dtype)).reshape(box.shape)
        hits = [i for i, b in enumerate(assembly.stored_boxes) if b.intersect(box)]
        assembly.scatter(values, box, hits)


class _Done(NamedTuple):
    """A future whose value is there."""

    value: Any

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002
        return self.value
