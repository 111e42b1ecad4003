"""Tiles of pieces in files of their own: read, compared with their digests, put where they go.

What is not compressed is read straight from where the writer put it, a few tiles in each call, on
threads: between the read, the digest and the copy a tile stays in the cache of a core. Against
reads by TensorStore, which verify a checksum more and leave digests to one thread, *big* came in
0.24 s instead of 0.42 s on the same mesh, in 0.26 s instead of 0.5 to 0.7 s on others.
(benchmarks/load.py)

What is compressed, or is not found where it should be, is read by TensorStore.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxshard import _buffers, _dtypes, _piecefile, _places, _plan, _tensors
from jaxshard._assembly import Assembly
from jaxshard._boxes import Box
from jaxshard._buffers import Array
from jaxshard._places import Place, TileRun
from jaxshard._source import Source, not_what_was_written
from jaxshard._spec import Layout
from jaxshard._tensors import IoMode
from jaxshard._threads import Workers
from jaxshard._transfer import Future, Request

_RUN_BYTES_MAX = 8 << 20  # of one request
_LARGE_BYTES = 4 << 30


class PieceReader:
    """Turns wanted leaves into requests.

    Args:
      source: the open checkpoint.
      io_mode: `"auto"`, or how TensorStore is to read, whose checksums are verified then too.
      bytes_max: upper limit of a request of more than one tile.
      workers: threads that read.
      count: told the bytes that each request has read.
      checksums: compare those too that are there for other readers of Zarr.
    """

    def __init__(
        self,
        source: Source,
        io_mode: IoMode,
        bytes_max: int,
        workers: Workers,
        count: Callable[[int], None],
        *,
        checksums: bool,
    ) -> None:
        self._source = source
        self._checksums = checksums
        self._io_mode: IoMode = io_mode
        self.is_straight = source.manifest.compression is None and io_mode == "auto"
        self._bytes_max = min(bytes_max, _RUN_BYTES_MAX)
        self._workers = workers
        self._count = count
        self._scratch = _buffers.Scratch()
        self._hasher = _tensors.TileHasher(self._scratch)

    def requests(self, assembly: Assembly) -> Iterator[Request]:
        """All of a leaf."""
        layout = assembly.layout._replace(path="")
        self._require_there(assembly)
        runs = _places.tile_runs(layout, assembly.stored_boxes, self._bytes_max)
        pieces = dict.fromkeys(run.piece for run in runs)
        digests = {piece: self._source.piece_digests(assembly.number, piece) for piece in pieces}
        array = functools.cache(functools.partial(self._open, assembly))
        for run in runs:
            assembly.pending += 1
            yield self._request(assembly, array, run, digests[run.piece])
        assembly.seal()

    def _require_there(self, assembly: Assembly) -> None:
        """Of a large leaf there is a first file: a manifest may claim what no memory can hold."""
        if assembly.layout.nbytes > _LARGE_BYTES:
            file = _tensors.piece_file(self._source.manifest.attempt, assembly.layout, 0)
            found = self._source.store.size(file)
            expected = self._source.file_bytes(assembly.number, 0)
            _tensors.require_length(f"leaf {assembly.leaf.name!r}, piece 0", file, found, expected)

    def _open(self, assembly: Assembly) -> Any:
        manifest = self._source.manifest
        return _tensors.open_for_reading(
            self._source.store,
            manifest.attempt,
            assembly.leaf,
            manifest.compression,
            "pread" if self.is_straight else self._io_mode,  # what is damaged is not mapped
        )

    def _request(
        self,
        assembly: Assembly,
        array: Callable[[], Any],
        run: TileRun,
        digests: list[bytes],
    ) -> Request:
        attempt, layout = self._source.manifest.attempt, assembly.layout
        of = _Of(
            f"leaf {assembly.leaf.name!r}, piece {run.piece}",
            _tensors.piece_file(attempt, layout, run.piece),
            self._source.file_bytes(assembly.number, run.piece),
        )
        each = _plan.stored_tile_bytes(layout)
        nbytes = len(run.places) * each

        def start() -> Future:
            targets = [assembly.targets(place) for place in run.places]
            return self._workers.start(lambda: self._read(of, layout, array, run, digests, targets))

        def finish(_: Any) -> None:
            self._count(nbytes)
            assembly.arrived()

        return Request(
            nbytes + each,  # a tile at the edge is gathered for its digest
            start,
            finish,
            lambda e: _tensors.read_error(e, of.where, of.file),
        )

    # On the threads

    def _read(
        self,
        of: "_Of",
        layout: Layout,
        array: Callable[[], Any],
        run: TileRun,
        digests: list[bytes],
        targets: list[list[Array]],
    ) -> None:
        """Read tiles, compare them, and put them where they go."""
        expected = digests[run.position : run.position + len(run.places)]
        each = zip(run.places, expected, targets, strict=True)
        if not self.is_straight:
            # The length first: TensorStore maps the file, or takes memory for what is in it.
            found = self._source.store.size(of.file)
            _tensors.require_length(of.where, of.file, found, of.nbytes)
            for place, digest, into in each:
                _put(self._decoded(of, layout, array, place, digest), place, into)
            return
        stored = _plan.stored_tile_bytes(layout)
        dtype = _dtypes.numpy_dtype(layout.dtype)
        with self._scratch.lend(len(run.places) * stored) as raw:
            found = self._source.store.read_range(of.file, run.position * stored, raw.data)
            _tensors.require_length(of.where, of.file, found, of.nbytes)
            for i, (place, digest, into) in enumerate(each):
                tile, checksum = np.split(raw[i * stored :][:stored], [-_plan.CHECKSUM_BYTES])
                values = tile.view(dtype).reshape(layout.tile)[_corner(place.box)]
                sound = self._hasher.digest(values) == digest
                if sound and self._checksums:
                    sound = _piecefile.checksum(tile) == checksum.tobytes()
                if not sound:
                    # The index of the file, which TensorStore reads, may say another place.
                    values = self._decoded(of, layout, array, place, digest)
                _put(values, place, into)

    def _decoded(
        self, of: "_Of", layout: Layout, array: Callable[[], Any], place: Place, digest: bytes
    ) -> Array:
        """A tile, read by TensorStore."""
        values = _buffers.empty(place.box.shape, _dtypes.numpy_dtype(layout.dtype))
        _tensors.read_box(array(), place.box, values).result()
        if self._hasher.digest(values) != digest:
            raise not_what_was_written(of.where, of.file, place.tile)
        return values


class _Of(NamedTuple):
    """The file of a piece: whose it is, in words, its key, and its length."""

    where: str
    file: str
    nbytes: int


def _put(values: Array, place: Place, targets: list[Array]) -> None:
    for target, part in zip(targets, place.parts, strict=True):
        target[...] = values[part.inside]


def _corner(box: Box) -> tuple[slice, ...]:
    """Of a stored tile, which is whole, what lies inside the array."""
    return tuple(slice(n) for n in box.shape)
