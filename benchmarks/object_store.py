"""How long does a load take from a store that is far away, and how many requests does it make?

Sketch: bytes / bandwidth, if enough requests are in flight: 805 MB at 200 MB/s are 4 s; and a few
round trips before the first byte of data: manifest, table, pieces. 50 ms for each request; what
asks one thing at a time pays for every one of them, 1,500 small leaves 75 s and more.

`slow_files.c` (LD_PRELOAD) delays the calls for the files below one directory: opening, asking for
the size, listing, reading. A real object store would answer some of them together; it is the same
for all. Nothing is delayed while the checkpoint is written.
"""

import functools
import mmap
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks import _rounds, _states
from benchmarks._process import Contender
from benchmarks._results import US, Result
from benchmarks._rounds import ORBAX, Ask

STATES = ("big", *(s for s in _states.NAMES if s != "big"))
DELAY_S = 0.05
BYTES_PER_S = 200_000_000
# struct control of slow_files.c
_CONTROL = struct.Struct("=11Q")
_KINDS = ("open", "stat", "list", "read", "write", "sync", "change")
_COMPILER = "cc"


class SlowFiles:
    """The files below a directory, for processes that have `env`, slow on demand."""

    def __init__(self, below: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-slow-")
        library = Path(self._folder.name, "slow_files.so")
        source = Path(__file__).with_name("slow_files.c")
        command = [_COMPILER, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        control = Path(self._folder.name, "control")
        control.write_bytes(bytes(_CONTROL.size))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL.size)
        self.env = {
            "LD_PRELOAD": str(library),
            "SLOW_FILES_BELOW": below,
            "SLOW_FILES_CONTROL": str(control),
        }

    def set(self, delay_s: float) -> None:
        """From now on each request takes so long (0: nothing is slow); counting begins anew."""
        numbers = (int(delay_s * 1e9), BYTES_PER_S, 0, 0, *[0] * len(_KINDS))
        self._control[:] = _CONTROL.pack(*numbers)

    def counts(self) -> dict[str, int]:
        """Requests by kind, and bytes."""
        *_, nbytes, open_, stat, list_, read, write, sync, change = _CONTROL.unpack(
            self._control[:]
        )
        counted = zip(_KINDS, (open_, stat, list_, read, write, sync, change), strict=True)
        return {"bytes": nbytes, **dict(counted)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._control.close()
        self._folder.cleanup()


def run(ask: Ask, delay_s: float = DELAY_S) -> list[Result]:
    """Save fast, load slowly, in turn."""
    result = Result("object_store", ask.state, "s", {})
    if shutil.which(_COMPILER) is None:
        result.notes.append(f"{_COMPILER} is not installed; skipped")
        return [result]
    counts: dict[str, dict[str, int]] = {}
    _rounds.touch(5 * _states.nbytes(ask.state))
    with _rounds.folder(ask.where) as folder, SlowFiles(folder) as slow:
        slow.set(0)
        starts = {
            name: functools.partial(Contender, name, ask.state, env=slow.env)
            for name in ask.among((US, *ORBAX))
        }
        with _rounds.started(starts, result.notes) as running:
            for name, contender in running.items():
                contender.ask("save", path=f"{folder}/{name}")

            def measure(name: str) -> float:
                slow.set(delay_s)
                answer = running[name].ask("load", path=f"{folder}/{name}")
                counts[name] = slow.counts()
                return float(answer["seconds"])

            result.values = _rounds.in_turn({n: n for n in running}, ask.rounds, measure)
            slow.set(0)
    for name, found in counts.items():
        nbytes = found.pop("bytes")
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.items() if count)
        requests = f"{sum(found.values())} requests ({kinds}), {nbytes / 1e6:.1f} MB"
        result.notes.append(f"{name}: {requests}")
    return [result]


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
