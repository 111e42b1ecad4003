"""Boxes of leaves of one checkpoint into host buffers, each tile read once and verified.

Between what is wanted and the values: reads within the byte budget, and hands each leaf over as
soon as it is whole. Knows nothing of jax.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from jaxshard import _buffers, _tensors, _transfer
from jaxshard._assembly import Assembly, Want
from jaxshard._errors import CheckpointReplacedError, CorruptionError
from jaxshard._packs import PackReader
from jaxshard._pieces import PieceReader
from jaxshard._source import Source
from jaxshard._tensors import IoMode
from jaxshard._threads import Workers, cores
from jaxshard._transfer import Request

HOST_BYTES_MAX = 256 << 20
# What is in the memory of the machine comes fastest with a thread for each core; a disk, and even
# more a store that is far away, wants more requests.
_READ_THREADS_MAX = 16
_END_S = 5.0  # a disk may hang


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
    checksums: bool = False,
) -> Traffic:
    """Read all that is wanted; each `done` is called in the calling thread, in order.

    Digests are always compared; with `checksums` also those of the Zarr codec.

    Raises:
      CorruptionError: bytes are missing, cut, changed or in the wrong place.
      CheckpointReplacedError: a writer replaced or deleted the checkpoint meanwhile.
      StorageError: the store failed, or `timeout_s` passed.
    """
    workers = Workers("jaxshard-read", min(cores(), _READ_THREADS_MAX), _READ_THREADS_MAX)
    job = _Job(source, host_bytes_max, io_mode, workers, checksums=checksums)
    try:
        _transfer.run(job.requests(wants), bytes_max=host_bytes_max, timeout_s=timeout_s)
    except (CorruptionError, FileNotFoundError) as e:
        raise_if_replaced(source, e)
        if isinstance(e, FileNotFoundError):
            raise _tensors.missing_file("data", str(e.filename)) from e
        raise
    finally:
        workers.end(_END_S)
    if not job.is_straight and job.traffic.bytes_read > _buffers.TRIM_BYTES:
        _buffers.trim_heap()
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

    def __init__(
        self,
        source: Source,
        host_bytes_max: int,
        io_mode: IoMode,
        workers: Workers,
        *,
        checksums: bool,
    ) -> None:
        self.source = source
        self.traffic = Traffic()
        bytes_max = max(1, host_bytes_max // 8)  # several requests must fit
        self._packs = PackReader(source, bytes_max, workers, self._count)
        self._pieces = PieceReader(
            source, io_mode, bytes_max, workers, self._count, checksums=checksums
        )
        self.is_straight = self._pieces.is_straight

    def requests(self, wants: Iterable[Want]) -> Iterator[Request]:
        for want in wants:
            number = self.source.resolve(want.leaf)
            assembly = Assembly(number, self.source.leaf(number), want)
            layout = assembly.layout
            if layout.nbytes:
                self.source.require_complete(number)
            self.traffic.bytes_needed += layout.itemsize * sum(
                box.size for box in assembly.stored_boxes
            )
            if layout.packed:
                yield from self._packs.add(assembly)
            else:
                yield from self._pieces.requests(assembly)
        yield from self._packs.flush()

    def _count(self, nbytes: int) -> None:
        self.traffic.bytes_read += nbytes
