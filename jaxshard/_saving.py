"""Check and plan a save: all that happens before a byte is written.

`prepare` looks at the tree and refuses what cannot be saved; what it returns is all that
`_writing` needs. The synchronous and the asynchronous door both begin here.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshard import (
    _arrays,
    _commit,
    _dtypes,
    _grid,
    _keypaths,
    _manifest,
    _plan,
    _trees,
)
from jaxshard._epochs import Epoch
from jaxshard._errors import (
    DisagreementError,
    UnsupportedLeafError,
    counted,
    rate_text,
    size_text,
)
from jaxshard._manifest import Manifest
from jaxshard._options import SaveOptions
from jaxshard._registry import Shown
from jaxshard._reuse import Marks, Reuse, Sharing, marks_of
from jaxshard._spec import Layout, LeafSpec, TreeSpec, stored_shape
from jaxshard._store import Store, storage_errors

PACK_BUFFERS = 4  # files of a pack in memory: one is filled while the others are written
_WINDOW_BYTES = 128 << 20  # of pieces in flight, and of tiles that are gathered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(Shown):
    """What a save did.

    Attributes:
      path: the checkpoint.
      step: its step, if it has one.
      nbytes: bytes of all elements, those of shared arrays once.
      files: number of files with data.
      seconds: wall time from the call to the commit.
      blocked_s: how long the caller was kept; less than `seconds` for `save_async`.
      reused_nbytes: of the elements, bytes in files that are also those of the step before:
        these were not written.
    """

    path: str
    step: int | None
    nbytes: int
    files: int
    seconds: float
    blocked_s: float
    reused_nbytes: int = 0

    @property
    def bytes_per_s(self) -> float:
        """Bytes by second of wall time."""
        return self.nbytes / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        what = f"{size_text(self.nbytes)} in {counted(self.files, 'file')}"
        if self.reused_nbytes:
            what += f" ({size_text(self.reused_nbytes)} of it unchanged, and not written)"
        text = f"{self.path}: saved {what}, {self.seconds:.2f} s"
        text += f" ({rate_text(self.nbytes, self.seconds)})"
        waited = self.blocked_s < self.seconds
        return f"{text}, the caller waited {self.blocked_s:.3f} s" if waited else text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """A save that was checked and planned; nothing has been written.

    `draft` is what the manifest says but for the files, if that is not of a new save; `may_commit`
    is called right before the commit, and may raise.
    """

    store: Store
    attempt: str
    tree: TreeSpec
    values: Sequence[Any]
    plan: _plan.ProcessPlan
    options: SaveOptions
    metadata: Mapping[str, Any]
    step: int | None
    epoch: Epoch | None
    reuse: Reuse | None
    marks: Marks
    overwrite: bool
    began: float
    draft: Manifest | None = None
    may_commit: Callable[[], None] | None = None

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
    epoch: Epoch | None = None,
    sharing: Sharing | None = None,
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
    share = _window_bytes(options) // PACK_BUFFERS
    segment = min(_plan.PACK_SEGMENT_BYTES, max(_plan.PACK_ALIGN, share))
    plan = _plan.plan_save(leaves, [None] * len(leaves), segment_bytes_max=segment).of(0)
    return SaveJob(
        store=store,
        attempt=_commit.new_attempt(),
        tree=dataclasses.replace(flat.spec, leaves=leaves),
        values=flat.values,
        plan=plan,
        options=options,
        metadata=metadata,
        step=step,
        epoch=epoch,
        reuse=None if sharing is None else sharing.of(leaves, flat.values, options),
        marks={} if sharing is None else marks_of(leaves, flat.values),
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
    piece_bytes_max, pack_below = _piece_bytes_max(options), options.pack_below
    layouts = {
        i: layout_for(
            str(leaves[i].dtype),
            leaves[i].array_shape or (),
            _arrays.partitions(leaves[i], values[i]),
            piece_bytes_max,
            pack_below,
        )._replace(path=path)
        for i, path in zip(stored, paths, strict=True)
    }
    return tuple(leaf._replace(layout=layouts.get(i)) for i, leaf in enumerate(leaves))


@functools.lru_cache(maxsize=1024)
def layout_for(
    dtype: str,
    shape: tuple[int, ...],
    partitions: tuple[int, ...],
    piece_bytes_max: int,
    pack_below: int,
) -> Layout:
    """The layout of all leaves of one kind; without a path."""
    per_byte = _dtypes.elements_per_byte(dtype)
    if not shape or (partitions[-1] > 1 and shape[-1] // partitions[-1] % per_byte):
        per_byte = 1  # boxes would not fall on byte edges
    stored_type = _dtypes.stored_dtype(dtype)
    itemsize = _dtypes.numpy_dtype(stored_type).itemsize
    stored = stored_shape(shape, per_byte)
    piece, tile = _grid.choose(stored, partitions, itemsize, piece_bytes_max=piece_bytes_max)
    piece_bytes = itemsize * math.prod(min(p, n) for p, n in zip(piece, stored, strict=True))
    packed = piece_bytes < pack_below
    return Layout("", stored_type, per_byte, stored, piece, tile, packed)


def report(job: SaveJob, reused_nbytes: int = 0, *, blocked_s: float | None = None) -> SaveReport:
    """The report of a job that was committed just now."""
    seconds = time.monotonic() - job.began
    return SaveReport(
        path=job.store.url,
        step=job.step,
        nbytes=sum(leaf.nbytes for leaf in job.tree.leaves if leaf.layout is not None),
        files=len(job.plan.pieces) + job.plan.segments,
        seconds=seconds,
        blocked_s=seconds if blocked_s is None else blocked_s,
        reused_nbytes=reused_nbytes,
    )
