"""Tiles of pieces in files of their own: read, compared with their digests, put where they go.

What is not compressed is read straight from where the writer put it, a few tiles in each call, on
threads: between the read, the digest and the copy a tile stays in the cache of a core. Against
reads by TensorStore, which verify a checksum more and leave digests to one thread, *big* came in
0.19 s instead of 0.42 s on the same mesh, in 0.21 s instead of 0.5 to 0.7 s on others.
(benchmarks/load.py)

What is compressed, or is not found where it should be, is read by TensorStore.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxshard import _buffers, _dtypes, _piecefile, _places, _plan, _tensors
from jaxshard._assembly import Assembly
from jaxshard._boxes import Box
from jaxshard._buffers import Array
from jaxshard._places import TileRun
from jaxshard._source import Source, not_what_was_written
from jaxshard._tensors import IoMode
from jaxshard._threads import Workers
from jaxshard._transfer import Future, Request

_RUN_BYTES_MAX = 8 << 20  # of one request


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
        self._straight = source.manifest.compression is None and io_mode == "auto"
        self._bytes_max = min(bytes_max, _RUN_BYTES_MAX)
        self._workers = workers
        self._count = count
        self._scratch = _buffers.Scratch()
        self._hasher = _tensors.TileHasher(self._scratch)

    def requests(self, assembly: Assembly) -> Iterator[Request]:
        """All of a leaf."""
        layout = assembly.layout._replace(path="")
        runs = _places.tile_runs(layout, assembly.stored_boxes, self._bytes_max)
        pieces = dict.fromkeys(run.piece for run in runs)
        digests = {piece: self._source.piece_digests(assembly.number, piece) for piece in pieces}
        array = functools.cache(functools.partial(self._open, assembly))
        for run in runs:
            assembly.pending += 1
            yield self._request(assembly, array, run, digests[run.piece])
        assembly.seal()

    def _open(self, assembly: Assembly) -> Any:
        manifest = self._source.manifest
        return _tensors.open_for_reading(
            self._source.store,
            manifest.attempt,
            assembly.leaf,
            manifest.compression,
            self._io_mode,
        )

    def _file(self, assembly: Assembly, piece: int) -> str:
        position = _plan.piece_lattice(assembly.layout).position(piece)
        return _tensors.piece_file(self._source.manifest.attempt, assembly.layout, position)

    def _request(
        self,
        assembly: Assembly,
        array: Callable[[], Any],
        run: TileRun,
        digests: list[bytes],
    ) -> Request:
        file = self._file(assembly, run.piece)
        length = self._source.file_bytes(assembly.number, run.piece)
        each = _plan.stored_tile_bytes(assembly.layout)
        nbytes = len(run.places) * each

        def start() -> Future:
            targets = [assembly.targets(place) for place in run.places]
            return self._workers.start(
                lambda: self._read(assembly, array, file, length, run, digests, targets)
            )

        def finish(_: Any) -> None:
            self._count(nbytes)
            assembly.arrived()

        return Request(
            nbytes + each,  # a tile at the edge is gathered for its digest
            start,
            finish,
            lambda e: _tensors.read_error(e, assembly.leaf.name, file),
        )

    # On the threads

    def _read(
        self,
        assembly: Assembly,
        array: Callable[[], Any],
        file: str,
        length: int,
        run: TileRun,
        digests: list[bytes],
        targets: list[list[Array]],
    ) -> None:
        """Read tiles, compare them, and put them where they go."""
        layout = assembly.layout
        each = _plan.stored_tile_bytes(layout)
        dtype = _dtypes.numpy_dtype(layout.dtype)
        with self._scratch.lend(len(run.places) * each) as raw:
            store = self._source.store
            if self._straight:
                found: int | None = store.read_range(file, run.position * each, raw.data)
            else:
                found = store.size(file)  # before TensorStore maps it or takes memory for it
            _tensors.require_length(assembly.leaf.name, file, found, length)
            for i, place in enumerate(run.places):
                tile, checksum = np.split(raw[i * each : (i + 1) * each], [-_plan.CHECKSUM_BYTES])
                values = tile.view(dtype).reshape(layout.tile)[_corner(place.box)]
                digest = digests[run.position + i]
                sound = self._straight and self._hasher.digest(values) == digest
                if sound and self._checksums:
                    sound = _piecefile.checksum(tile) == checksum.tobytes()
                if not sound:
                    # The index of the file, which TensorStore reads, may say another place.
                    values = _buffers.empty(place.box.shape, dtype)
                    _tensors.read_box(array(), place.box, values).result()
                    if self._hasher.digest(values) != digest:
                        raise not_what_was_written(assembly.leaf.name, file, place.tile)
                for target, part in zip(targets[i], place.parts, strict=True):
                    target[...] = values[part.inside]


def _corner(box: Box) -> tuple[slice, ...]:
    """Of a stored tile, which is whole, what lies inside the array."""
    return tuple(slice(n) for n in box.shape)
