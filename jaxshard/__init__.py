"""Save the complete state of a JAX training run as shards, and bring it back exactly.

`save`, `save_async` and `load` handle one checkpoint, `open` looks into one, `verify`, `diff` and
`stats` check them, `ResumeManager` keeps a run, `report` says how well it used its time, and
`prune` frees what nobody needs. `jaxshard.data` has loaders whose position moves with the mesh.
`jaxshard` on the command line does all but the saving.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from jaxshard import _registry

if TYPE_CHECKING:
    from jaxshard._checkpoint import load, save, save_async
    from jaxshard._diff import DiffReport, diff
    from jaxshard._errors import (
        CheckpointReplacedError,
        ConflictError,
        CorruptionError,
        DisagreementError,
        FormatError,
        JaxshardError,
        LeafMismatchError,
        NotCommittedError,
        NotFoundError,
        StorageError,
        StorageTimeoutError,
        UnsupportedLeafError,
    )
    from jaxshard._keep import Keep
    from jaxshard._options import LoadOptions, LoadReport, SaveOptions
    from jaxshard._pending import PendingSave
    from jaxshard._policy import Every, YoungDaly
    from jaxshard._prune import PruneReport, prune
    from jaxshard._reader import Checkpoint, LeafInfo
    from jaxshard._report import RunReport, report
    from jaxshard._resume import ResumeManager
    from jaxshard._run import Run, open  # noqa: A004  (jaxshard.open, as in gzip.open)
    from jaxshard._saving import SaveReport
    from jaxshard._stats import LeafStats, StatsReport, stats
    from jaxshard._verify import VerifyReport, verify

__version__ = "0.1.0"

if sys.byteorder != "little":  # files and digests are of little-endian bytes, as they lie in memory
    raise ImportError("jaxshard: expected a little-endian machine, found a big-endian one")

__all__ = [
    "Checkpoint",
    "CheckpointReplacedError",
    "ConflictError",
    "CorruptionError",
    "DiffReport",
    "DisagreementError",
    "Every",
    "FormatError",
    "JaxshardError",
    "Keep",
    "LeafInfo",
    "LeafMismatchError",
    "LeafStats",
    "LoadOptions",
    "LoadReport",
    "NotCommittedError",
    "NotFoundError",
    "PendingSave",
    "PruneReport",
    "ResumeManager",
    "Run",
    "RunReport",
    "SaveOptions",
    "SaveReport",
    "StatsReport",
    "StorageError",
    "StorageTimeoutError",
    "UnsupportedLeafError",
    "VerifyReport",
    "YoungDaly",
    "diff",
    "load",
    "open",
    "prune",
    "report",
    "save",
    "save_async",
    "stats",
    "verify",
]

# Where each name lives; nothing is imported before it is asked for.
_ROOMS = {
    "_checkpoint": ("load", "save", "save_async"),
    "_diff": ("DiffReport", "diff"),
    "_errors": (
        "CheckpointReplacedError", "ConflictError", "CorruptionError", "DisagreementError",
        "FormatError", "JaxshardError", "LeafMismatchError", "NotCommittedError", "NotFoundError",
        "StorageError", "StorageTimeoutError", "UnsupportedLeafError",
    ),
    "_keep": ("Keep",),
    "_options": ("LoadOptions", "LoadReport", "SaveOptions"),
    "_pending": ("PendingSave",),
    "_policy": ("Every", "YoungDaly"),
    "_prune": ("PruneReport", "prune"),
    "_reader": ("Checkpoint", "LeafInfo"),
    "_report": ("RunReport", "report"),
    "_resume": ("ResumeManager",),
    "_run": ("Run", "open"),
    "_saving": ("SaveReport",),
    "_stats": ("LeafStats", "StatsReport", "stats"),
    "_verify": ("VerifyReport", "verify"),
}  # fmt: skip
_PACKAGES = (
    "data",
    "display",
    "monitoring",
    "testing",
)  # `jaxshard.testing` needs no import of its own
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

_registry.displays.update(
    {
        "Checkpoint": "jaxshard.display._outline:checkpoint",
        "DiffReport": "jaxshard.display._reports:diff_report",
        "DrillReport": "jaxshard.display._run_report:drill_report",
        "Leaf": "jaxshard.display._leaf:leaf",
        "LoadReport": "jaxshard.display._reports:load_report",
        "PruneReport": "jaxshard.display._reports:prune_report",
        "Run": "jaxshard.display._steps:run",
        "RunReport": "jaxshard.display._run_report:run_report",
        "SaveReport": "jaxshard.display._reports:save_report",
        "StatsReport": "jaxshard.display._reports:stats_report",
        "VerifyReport": "jaxshard.display._reports:verify_report",
    }
)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"jaxshard.{name}")
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'jaxshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxshard.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
