"""Packed tiles of many leaves, read in a few large requests.

What lies side by side in a file of a pack is read at once, whatever leaves it belongs to: 1,500
leaves of 64 KiB in a dozen reads instead of 1,500. A tile that is all of a wanted box is not copied
again: the buffer of its box is a view of what was read.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxshard import _buffers, _dtypes, _places, _tensors
from jaxshard._assembly import Assembly
from jaxshard._buffers import Array
from jaxshard._places import Place
from jaxshard._source import Source, not_what_was_written, pack_file
from jaxshard._table import digest_of
from jaxshard._threads import Workers
from jaxshard._transfer import Request

# Of one request; also what one small array can keep alive at most, since it may be a view of it.
_READ_BYTES_MAX = 8 << 20


class PackReader:
    """Collects wanted leaves and turns them into requests.

    Args:
      source: the open checkpoint.
      bytes_max: upper limit of a request of more than one tile.
      workers: threads that read.
      count: told the bytes that each request has read.
    """

    def __init__(
        self, source: Source, bytes_max: int, workers: Workers, count: Callable[[int], None]
    ) -> None:
        self._source = source
        self._workers = workers
        self._bytes_max = min(bytes_max, _READ_BYTES_MAX)
        self._count = count
        self._waiting: list[Assembly] = []
        self._waiting_bytes = 0

    def add(self, assembly: Assembly) -> Iterator[Request]:
        """Take a leaf; gives requests once enough has come together."""
        self._waiting.append(assembly)
        self._waiting_bytes += assembly.layout.nbytes
        if self._waiting_bytes >= self._bytes_max:
            yield from self.flush()

    def flush(self) -> Iterator[Request]:
        """Requests for all leaves that were taken."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        parts = [_places.places(a.layout._replace(path=""), a.stored_boxes) for a in waiting]
        rows = [
            self._source.packed_rows(a.number)[tiles]
            for a, (tiles, _) in zip(waiting, parts, strict=True)
        ]
        wanted = [
            (assembly, place)
            for assembly, (_, places) in zip(waiting, parts, strict=True)
            for place in places
        ]
        requests = []
        if wanted:
            flat = np.concatenate(rows)
            order = np.argsort(flat, kind="stable")  # rows are by process and rising offset
            flat = flat[order]
            wanted = [wanted[i] for i in order.tolist()]
            for start, stop in self._runs(flat):
                requests.append(self._request(flat[start:stop], wanted[start:stop]))
        for assembly in waiting:
            assembly.seal()
        yield from requests

    def _runs(self, rows: Array) -> list[tuple[int, int]]:
        """Cut rows where they are not neighbours in one file, or are too much for one request."""
        entries = self._source.entries
        neighbours = (np.diff(rows) == 1) & (np.diff(entries.file[rows]) == 0)
        breaks = [0, *(np.flatnonzero(~neighbours) + 1).tolist(), len(rows)]
        starts, ends = entries.offset[rows], entries.offset[rows] + entries.nbytes[rows]
        runs = []
        for first, last in itertools.pairwise(breaks):
            at = first
            while at < last:
                stop = int(np.searchsorted(ends[at:last], starts[at] + self._bytes_max, "right"))
                runs.append((at, at + max(1, stop)))
                at = runs[-1][1]
        return runs

    def _request(self, rows: Array, wanted: Sequence[tuple[Assembly, Place]]) -> Request:
        entries = self._source.entries
        process, segment = entries.file_of(int(rows[0]))
        file = pack_file(self._source.manifest.attempt, process, segment)
        start = int(entries.offset[rows[0]])
        sizes = entries.nbytes[rows].tolist()
        offsets = (entries.offset[rows] - start).tolist()
        nbytes = offsets[-1] + sizes[-1]
        digests = entries.digest[rows].tobytes()
        assemblies = list({id(a): a for a, _ in wanted}.values())
        where = f"leaf {assemblies[0].leaf.name!r}"
        for assembly in assemblies:
            assembly.pending += 1

        def read() -> list[Array]:
            data = _buffers.empty((nbytes,), np.dtype(np.uint8))
            length = entries.segment_bytes(process)
            there = self._source.store.read_range(file, start - segment * length, data.data)
            _tensors.require_length(where, file, there, length)
            parts = [data[o : o + n] for o, n in zip(offsets, sizes, strict=True)]
            found = [digest_of(part) for part in parts]
            if b"".join(found) != digests:
                self._raise_wrong(found, digests, wanted, file)
            return parts

        def finish(parts: list[Array]) -> None:
            for (assembly, place), part in zip(wanted, parts, strict=True):
                values = part.view(_dtypes.numpy_dtype(assembly.layout.dtype))
                values = values.reshape(place.box.shape)
                if place.only is not None:
                    assembly.give(place.only, values)
                else:
                    for target, one in zip(assembly.targets(place), place.parts, strict=True):
                        target[...] = values[one.inside]
            self._count(nbytes)
            for assembly in assemblies:
                assembly.arrived()

        return Request(
            nbytes,
            lambda: self._workers.start(read),
            finish,
            lambda e: _tensors.read_error(e, where, file),
        )

    def _raise_wrong(
        self,
        found: list[bytes],
        digests: bytes,
        wanted: Sequence[tuple[Assembly, Place]],
        file: str,
    ) -> None:
        for i, digest in enumerate(found):
            if digest != digests[16 * i : 16 * (i + 1)]:
                assembly, place = wanted[i]
                raise not_what_was_written(f"leaf {assembly.leaf.name!r}", file, place.tile)
