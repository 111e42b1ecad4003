"""Packed tiles of many leaves, read in a few large requests.

What lies side by side in a file of a pack is read at once, whatever leaves it belongs to: 1,500
leaves of 64 KiB in a dozen reads instead of 1,500. A tile that is all of a wanted box is not copied
again: the buffer of its box is a view of what was read.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxshard import _dtypes, _plan, _tensors
from jaxshard._assembly import Assembly
from jaxshard._boxes import Box
from jaxshard._errors import CorruptionError
from jaxshard._source import HINT, Source, not_what_was_written, pack_file
from jaxshard._spec import Layout
from jaxshard._table import digest_of
from jaxshard._tensors import Array
from jaxshard._transfer import Request, done

# Of one request; also what one small array can keep alive at most, since it may be a view of it.
_READ_BYTES_MAX = 8 << 20


class PackReader:
    """Collects wanted leaves and turns them into requests.

    Args:
      source: the open checkpoint.
      bytes_max: upper limit of a request of more than one tile.
      count: told the bytes that each request has read.
    """

    def __init__(self, source: Source, bytes_max: int, count: Callable[[int], None]) -> None:
        self._source = source
        self._bytes_max = min(bytes_max, _READ_BYTES_MAX)
        self._count = count
        self._waiting: list[Assembly] = []
        self._waiting_bytes = 0
        self._checked: set[tuple[int, int]] = set()  # files whose length was looked at

    def add(self, assembly: Assembly) -> Iterator[Request]:
        """Take a leaf; gives requests once enough has come together."""
        self._waiting.append(assembly)
        self._waiting_bytes += assembly.layout.nbytes
        if self._waiting_bytes >= self._bytes_max:
            yield from self.flush()

    def flush(self) -> Iterator[Request]:
        """Requests for all leaves that were taken."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        parts = [_tile_places(a.layout._replace(path=""), a.stored_boxes) for a in waiting]
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

    def _request(self, rows: Array, wanted: "Sequence[tuple[Assembly, _Place]]") -> Request:
        entries = self._source.entries
        process, segment = entries.file_of(int(rows[0]))
        file = pack_file(self._source.manifest.attempt, process, segment)
        start = int(entries.offset[rows[0]])
        sizes = entries.nbytes[rows].tolist()
        offsets = (entries.offset[rows] - start).tolist()
        nbytes = offsets[-1] + sizes[-1]
        digests = entries.digest[rows].tobytes()
        assemblies = list({id(a): a for a, _ in wanted}.values())
        self._require_length(assemblies[0], process, segment, file)
        for assembly in assemblies:
            assembly.pending += 1

        def read() -> Array:
            data = _tensors.empty((nbytes,), np.dtype(np.uint8))
            at = start - segment * entries.segment_bytes(process)
            self._source.store.read_range(file, at, data.data)
            return data

        def finish(data: Array) -> None:
            parts = [data[o : o + n] for o, n in zip(offsets, sizes, strict=True)]
            found = [digest_of(part) for part in parts]
            if b"".join(found) != digests:
                self._raise_wrong(found, digests, wanted, file)
            for (assembly, place), part in zip(wanted, parts, strict=True):
                values = part.view(_dtypes.numpy_dtype(assembly.layout.dtype))
                values = values.reshape(place.box.shape)
                if place.only is not None:
                    assembly.give(place.only, values)
                else:
                    assembly.scatter(values, place.box, place.targets)
            self._count(nbytes)
            for assembly in assemblies:
                assembly.arrived()

        name = assemblies[0].leaf.name
        return Request(
            nbytes, lambda: done(read()), finish, lambda e: _tensors.read_error(e, name, file)
        )

    def _require_length(self, assembly: Assembly, process: int, segment: int, file: str) -> None:
        """The file is as long as it must be: before memory is taken for what is in it."""
        if (process, segment) in self._checked:
            return
        size, expected = self._source.store.size(file), self._source.entries.segment_bytes(process)
        if size is None:
            raise _tensors.missing_file(assembly.leaf.name, file)
        if size != expected:
            raise CorruptionError(
                f"leaf {assembly.leaf.name!r}, file {file!r}: expected {expected} bytes, "
                f"found {size}",
                path=file,
                hint=HINT,
            )
        self._checked.add((process, segment))

    def _raise_wrong(
        self,
        found: list[bytes],
        digests: bytes,
        wanted: "Sequence[tuple[Assembly, _Place]]",
        file: str,
    ) -> None:
        for i, digest in enumerate(found):
            if digest != digests[16 * i : 16 * (i + 1)]:
                assembly, place = wanted[i]
                raise not_what_was_written(assembly.leaf.name, file, place.tile)


class _Place(NamedTuple):
    """Where one tile goes: `only` is the box that it is all of, else it is copied to `targets`."""

    tile: int
    box: Box
    only: int | None
    targets: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _tile_places(layout: Layout, boxes: tuple[Box, ...]) -> tuple[Array, tuple[_Place, ...]]:
    """Numbers of the tiles that the boxes need, and where each goes.

    Made once for all leaves with the same grid and boxes.
    """
    tiles = _plan.tile_lattice(layout)
    places = []
    for tile in sorted({t for box in boxes for t in tiles.touching(box)}):
        box = tiles.box(tile)
        targets = tuple(i for i, wanted in enumerate(boxes) if wanted.intersect(box))
        only = targets[0] if len(targets) == 1 and boxes[targets[0]] == box else None
        places.append(_Place(tile, box, only, targets))
    return np.array([p.tile for p in places], np.int64), tuple(places)
