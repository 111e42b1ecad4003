"""A contender under the clock; lives in the contender's own process.

After a load everything is compared with what was saved, bit for bit, outside of the clock.
"""

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _contenders, _states
from benchmarks._process import timed


class Measured:
    """One contender and its state."""

    def __init__(self, name: str, state: str) -> None:
        self._contender = _contenders.CONTENDERS[name](state)
        self.ready = {"version": self._contender.version()}

    def save(self, path: str) -> dict[str, Any]:
        """Save, and return when it is durable."""
        seconds = timed(self._contender.save, path)[1]
        return {"seconds": seconds, "bytes": bytes_below(path)}

    def save_async(self, path: str) -> dict[str, Any]:
        """Save arrays that are as new; how long the call kept us, and how long the rest took."""
        self._contender.state = _states.fresh(self._contender.state)
        gc.collect()
        wait, blocked = timed(self._contender.save_async, path)
        return {"seconds": blocked, "rest": timed(wait)[1]}

    def load(self, path: str, mesh: tuple[int, int] = _states.MESH) -> dict[str, Any]:
        """Load everything on a mesh."""
        loaded, seconds = timed(self._contender.load, path, mesh)
        self._compare(loaded, self._contender.expected())
        return {"seconds": seconds}

    def subset(self, path: str, prefix: str) -> dict[str, Any]:
        """Load one part; also the bytes that it read, where the contender says so."""
        loaded, seconds = timed(self._contender.subset, path, prefix)
        wanted = {k: v for k, v in self._contender.expected().items() if k.startswith(prefix)}
        self._compare(loaded, wanted)
        report = getattr(self._contender, "report", None)
        read = {} if report is None else {"read": report.bytes_read, "needed": report.bytes_needed}
        return {"seconds": seconds, **read}

    def verify(self, path: str) -> dict[str, Any]:
        """Look whether all is sound."""
        return {"seconds": timed(self._contender.verify, path)[1]}

    def remove(self, path: str) -> dict[str, Any]:
        """Delete a checkpoint; nobody after us pays for it."""
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        return {}

    def _compare(self, loaded: Any, wanted: dict[str, Any]) -> None:
        found = _states.named_leaves(loaded)
        if found.keys() != wanted.keys():
            raise ValueError(f"other names: {sorted(found.keys() ^ wanted.keys())[:5]}")
        for name, value in wanted.items():
            got, want = _states.host(found[name]), _states.host(value)
            if got.dtype != want.dtype or not np.array_equal(_bits(got), _bits(want)):
                raise ValueError(f"other values in {name}")


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bytes_below(path: str) -> int:
    """Bytes of all files below a directory."""
    return sum(p.stat().st_size for p in Path(path).rglob("*") if p.is_file())


def peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and how far resident memory rose above what was there before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _status("VmRSS")
    result = call()
    return result, _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
