"""Boxes of leaves of one checkpoint into host buffers, each tile read once and verified.

Between the plan (`_slabs.plan_load`) and the values: allocates the buffers, reads slabs within the
byte budget, compares the digest of every tile, and hands each leaf over as soon as it is whole.
Knows nothing of jax.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jaxshard import _dtypes, _plan, _slabs, _tensors, _transfer
from jaxshard._assembly import Assembly, Want
from jaxshard._errors import CheckpointReplacedError, CorruptionError
from jaxshard._packs import PackReader
from jaxshard._source import HINT, Source, not_what_was_written
from jaxshard._spec import LeafSpec, layout_of
from jaxshard._tensors import Array, IoMode
from jaxshard._transfer import Request

HOST_BYTES_MAX = 256 << 20


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


class _Job:
    """One call of `fetch`: turns wants into requests."""

    def __init__(self, source: Source, host_bytes_max: int, io_mode: IoMode) -> None:
        self.source = source
        self.io_mode = io_mode
        self.traffic = Traffic()
        self._hasher = _tensors.TileHasher()
        self._scratch = _tensors.Scratch()
        # A slab in flight holds its bytes as they are stored and decoded; several must fit.
        self.slab_bytes_max = max(1, host_bytes_max // 8)

    def requests(self, wants: Iterable[Want]) -> Iterator[Request]:
        packs = PackReader(self.source, self.slab_bytes_max, self._count)
        for want in wants:
            number = self.source.resolve(want.leaf)
            assembly = Assembly(number, self.source.leaf(number), want)
            layout = assembly.layout
            if layout.nbytes:
                self.source.require_complete(number)
            self.traffic.bytes_needed += layout.itemsize * sum(
                box.size for box in assembly.stored_boxes
            )
            yield from packs.add(assembly) if layout.packed else self._filed(assembly)
        yield from packs.flush()

    def _count(self, nbytes: int) -> None:
        self.traffic.bytes_read += nbytes

    # Pieces in files of their own

    def _filed(self, assembly: Assembly) -> Iterator[Request]:
        number, leaf, manifest = assembly.number, assembly.leaf, self.source.manifest
        slabs = _slabs.plan_load(
            assembly.layout, assembly.stored_boxes, slab_bytes_max=self.slab_bytes_max
        )
        for piece in dict.fromkeys(slab.piece for slab in slabs):
            self._check_length(number, leaf, piece)
        if slabs:
            array = _tensors.open_for_reading(
                self.source.store, manifest.attempt, leaf, manifest.compression, self.io_mode
            )
        for slab in slabs:
            assembly.pending += 1
            yield self._slab_request(assembly, array, slab)
        assembly.seal()

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

    def _slab_request(self, assembly: Assembly, array: Any, slab: _slabs.Slab) -> Request:
        number, leaf, layout = assembly.number, assembly.leaf, assembly.layout
        reading: list[Array] = []

        def start() -> _transfer.Future:
            if slab.target is None:
                into = self._scratch.take(slab.box.shape, _dtypes.numpy_dtype(layout.dtype))
            else:
                into = assembly.part(slab.target, slab.box)
            reading.append(into)
            return _tensors.read_box(array, slab.box, into)

        def finish(_: Any) -> None:
            values = reading.pop()
            self._compare(number, leaf, slab, values)
            if slab.target is None:
                assembly.scatter(values, slab.box, slab.targets)
                self._scratch.give_back(values)
            self._count(_plan.file_bytes(layout, slab.box))
            assembly.arrived()

        file = self._file(leaf, slab.piece)
        return Request(
            2 * slab.box.size * layout.itemsize,
            start,
            finish,
            lambda error: _tensors.read_error(error, leaf.name, file),
        )

    def _compare(self, number: int, leaf: LeafSpec, slab: _slabs.Slab, values: Array) -> None:
        tiles = _plan.tile_lattice(layout_of(leaf))
        for tile, digest in self._hasher.digests(values, slab.box, tiles):
            if digest != self.source.tile_digest(number, slab.piece, tile):
                raise not_what_was_written(leaf.name, self._file(leaf, slab.piece), tile)
