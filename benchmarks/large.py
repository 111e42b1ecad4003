"""How long do a save and a load take when no cache can hide the disk?

Sketch: 8.6 GB / what the disk writes with fsync (0.35-1.3 GB/s) and reads (1-2 GB/s): 7-25 s to
save, 4-9 s to load. The disk decides, and everybody is close to `raw`; what is left to lose is time
in which the disk waits.

Each measurement is in a fresh process, since one state and its loaded copy take 17 GB; before the
load the kernel is told to forget the files.
"""

import os
import shutil
import sys
from pathlib import Path

from benchmarks import _rounds, _states
from benchmarks._process import AbsentError, Contender
from benchmarks._results import US, Result
from benchmarks._rounds import RAW, Ask

STATES = ("big8", *(s for s in _states.NAMES if s != "big8"))
_SPARE_BYTES = 2 << 30


def run(ask: Ask) -> list[Result]:
    """Save, forget, load, remove; in turn."""
    nbytes = _states.nbytes(ask.state)
    save = Result("large", f"{ask.state}, save", "s", {})
    load = Result("large", f"{ask.state}, load", "s", {})
    lacking = _lacking(nbytes, ask.where)
    if lacking:
        save.notes.append(lacking)
        return [save]
    _rounds.touch(2 * nbytes)
    for _ in range(ask.rounds):
        for name in ask.among((US, "orbax-tuned", "raw-16")):
            try:
                saved, loaded = _once(name, ask)
            except AbsentError:
                save.notes = [_rounds.absent(name)]
                continue
            save.values.setdefault(name, []).append(saved)
            load.values.setdefault(name, []).append(loaded)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    limit = save.best(RAW)
    if limit is not None and ask.state in _states.LARGE:
        save.expect_ratio((limit,), 0.85)
    return [save, load]


def _lacking(nbytes: int, where: str | None) -> str:
    """What the machine is too small for; empty if it is not."""
    free, memory = shutil.disk_usage(where or ".").free, _rounds.available_bytes()
    if free < 2 * nbytes + _SPARE_BYTES:
        return f"needs {2 * nbytes / 1e9:.0f} GB of disk, found {free / 1e9:.0f} GB; skipped"
    if memory < 2 * nbytes + _SPARE_BYTES:
        return f"needs {2 * nbytes / 1e9:.0f} GB of memory, found {memory / 1e9:.0f} GB; skipped"
    return ""


def _once(name: str, ask: Ask) -> tuple[float, float]:
    """Seconds of a save, and of a load from the disk."""
    with _rounds.folder(ask.where) as folder:
        path = f"{folder}/{name}"
        with Contender(name, ask.state) as contender:
            saved = contender.ask("save", path=path)["seconds"]
            _forget(path)
            loaded = contender.ask("load", path=path)["seconds"]
            contender.ask("remove", path=path)
    return saved, loaded


def _forget(path: str) -> None:
    """Let the kernel drop the pages of all files from its cache."""
    os.sync()
    for file in Path(path).rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


if __name__ == "__main__":
    _rounds.main(__doc__, run, STATES)
