"""What can be tuned in a save and in a load; every default is meant to be right. Pure."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from jaxshard._errors import counted, rate_text, size_text
from jaxshard._registry import Shown

Snapshot = Literal["auto", "view", "copy"]
Compression = Literal["zstd"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
      host_bytes_max: upper limit, in bytes, of host memory that the save takes beyond the arrays:
        copies of the snapshot and buffers in flight. None: for copies the smaller of what is to be
        copied and half of the free host memory (cgroups respected), for buffers 128 MiB.
      piece_bytes_max: upper limit of one file, in bytes, as far as the sharding allows it.
      pack_below: pieces smaller than this many bytes share the files of a pack; 0 gives every
        piece a file of its own, readable by any Zarr v3 reader.
      compression: `"zstd"`, or None (weights hardly compress, and it costs 5 to 15 times the time).
      snapshot: how `save_async` keeps values from the next training step. `"view"`: hold views of
        the arrays, which costs nothing until a step donates them (then XLA copies); `"copy"`: copy
        to host memory first; `"auto"`: views on CPU, copies elsewhere.
      timeout_s: limit for all reading and writing, in seconds.

    Example:
      >>> SaveOptions(pack_below=0).pack_below
      0
    """

    host_bytes_max: int | None = None
    piece_bytes_max: int = 64 << 20
    pack_below: int = 1 << 20
    compression: Compression | None = None
    snapshot: Snapshot = "auto"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        _require(self.host_bytes_max is None or self.host_bytes_max > 0, "host_bytes_max", self)
        _require(self.piece_bytes_max > 0, "piece_bytes_max", self)
        _require(self.pack_below >= 0, "pack_below", self)
        _require(self.compression in (None, "zstd"), "compression", self)
        _require(self.snapshot in ("auto", "view", "copy"), "snapshot", self)
        _require(self.timeout_s is None or self.timeout_s > 0, "timeout_s", self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Shown):
    """What a load did.

    Attributes:
      path: the checkpoint.
      step: its step, if it has one.
      bytes_needed: bytes of the boxes that the devices of this process needed, each once.
      bytes_read: bytes taken from storage for them, checksums and indices included.
      filled: names of leaves that kept the value of `like` (`fill_missing=True`).
      cast: names of leaves whose elements were converted (`cast=True`).
      seconds: wall time.
    """

    path: str
    step: int | None
    bytes_needed: int
    bytes_read: int
    filled: tuple[str, ...]
    cast: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        rate = rate_text(self.bytes_needed, self.seconds)
        size = f"{size_text(self.bytes_needed)} ({size_text(self.bytes_read)} read)"
        text = f"{self.path}: loaded {size} in {self.seconds:.2f} s ({rate})"
        filled = f"{counted(len(self.filled), 'leaf')} kept from like" if self.filled else ""
        cast = f"{counted(len(self.cast), 'leaf')} converted" if self.cast else ""
        return "\n  ".join(filter(None, [text, filled, cast]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is read.

    Attributes:
      host_bytes_max: upper limit, in bytes, of what is in flight beyond the arrays themselves; one
        tile (about 2 MiB) more may be.
      io_mode: `"auto"` reads straight from the files and compares the digest of every tile.
        `"pread"` and `"memmap"` read through TensorStore, which verifies its own checksums too and
        takes about twice as long; `"memmap"` maps the files, and ends the process if the disk
        fails. Compressed checkpoints are always read through TensorStore, by `"auto"` with
        `"memmap"` on local file systems and with `"pread"` elsewhere.
      donatable: give arrays that own their memory, so that the first jitted step can take it over.
        (On CPU an array may otherwise share the buffer that was read into.)
      release_like: free the device memory of each leaf of `like` as soon as its replacement has
        been read, so that two states never lie side by side. `like` is unusable afterwards.
      timeout_s: limit for all reading, in seconds.
      on_report: called with a `LoadReport` at the end.

    Example:
      >>> LoadOptions(io_mode="pread").io_mode
      'pread'
    """

    host_bytes_max: int = 256 << 20
    io_mode: Literal["auto", "memmap", "pread"] = "auto"
    donatable: bool = False
    release_like: bool = False
    timeout_s: float | None = None
    on_report: Callable[[LoadReport], None] | None = None

    def __post_init__(self) -> None:
        _require(self.host_bytes_max > 0, "host_bytes_max", self)
        _require(self.io_mode in ("auto", "memmap", "pread"), "io_mode", self)
        _require(self.timeout_s is None or self.timeout_s > 0, "timeout_s", self)


def _require(condition: bool, field: str, options: object) -> None:  # noqa: FBT001  (as `assert` reads)
    if not condition:
        raise ValueError(
            f"{type(options).__name__}: {field} cannot be {getattr(options, field)!r}\n"
            f"hint: help(jaxshard.{type(options).__name__}) says what it can be"
        )
