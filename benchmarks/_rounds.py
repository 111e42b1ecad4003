"""Contenders in turn: A B C A B C …, so that a busy minute of the machine hits all of them.

Ratios are taken within each round and their median is reported. Before anything is measured, as
much memory as will be used is touched once (the first touch of a page since boot can cost ten
times the second), and every contender runs once without being counted.
"""

import argparse
import concurrent.futures
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from benchmarks import _states
from benchmarks._process import AbsentError, Contender
from benchmarks._results import US, Result, markdown

ORBAX = ("orbax", "orbax-tuned", "orbax-v1")
PEERS = (*ORBAX, "torch-dcp", "safetensors")
RAW = ("raw-2", "raw-4", "raw-16")
EVERYBODY = (US, *PEERS, *RAW)
_SPARE_BYTES = 4 << 30


class Closable(Protocol):
    """What lives in a process of its own."""

    def close(self) -> None:
        """End it."""


T = TypeVar("T")
W = TypeVar("W", bound=Closable)


class Ask(NamedTuple):
    """What to measure.

    Attributes:
      state: name of the state.
      rounds: that count.
      where: directory to write below; the current one if None.
      names: contenders that are wanted; all if None.
    """

    state: str
    rounds: int
    where: str | None = None
    names: tuple[str, ...] | None = None

    def among(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the names that are wanted, and jaxshard."""
        return tuple(n for n in names if self.names is None or n in self.names or n == US)


def main(doc: str | None, run: Callable[[Ask], list[Result]], states: Sequence[str]) -> None:
    """The command line that all questions have; the first of the states is the default."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "; ".join(f"{s}: {_states.WHAT[s]}" for s in states if s in _states.WHAT)
    parser.add_argument("--state", default=states[0], choices=states, help=what)
    parser.add_argument("--rounds", type=int, default=7, help="that count (default: 7)")
    add_shared_options(parser)
    options = parser.parse_args()
    print(markdown(run(Ask(options.state, options.rounds, options.dir, options.contenders))))


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """The options that one question and all of them have in common."""
    parser.add_argument("--dir", help="where to write checkpoints (default: here)")
    names = "comma-separated, e.g. orbax,raw-2 (default: all); jaxshard always"
    parser.add_argument("--contenders", type=_names, help=names)


def _names(text: str) -> tuple[str, ...]:
    from benchmarks._contenders import CONTENDERS

    names = tuple(text.split(","))
    unknown = sorted(set(names) - set(CONTENDERS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {unknown}; known: {', '.join(CONTENDERS)}")
    return names


@contextmanager
def folder(where: str | None) -> Iterator[str]:
    """A directory for checkpoints, on the disk under test; removed afterwards."""
    made = tempfile.mkdtemp(prefix="bench-", dir=where or ".")
    try:
        yield str(Path(made).absolute())
    finally:
        shutil.rmtree(made, ignore_errors=True)


_touched = 0


def touch(nbytes: int) -> None:
    """Touch memory once and give it back: what is free, and was not touched before."""
    global _touched  # noqa: PLW0603  (what the machine has found stays found)
    nbytes = min(nbytes, available_bytes() - _SPARE_BYTES)
    if nbytes <= _touched:
        return
    part = 1 << 30
    held = [np.ones(min(part, nbytes - at), np.uint8) for at in range(0, nbytes, part)]
    del held
    _touched = nbytes


def available_bytes() -> int:
    """Host memory that can still be taken."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))


def contenders(
    names: Sequence[str], state: str, notes: list[str]
) -> AbstractContextManager[dict[str, Contender]]:
    """Those that are installed, each in its process; memory for all of them has been touched."""
    touch(_states.nbytes(state) * (len(names) + 2))
    return started({name: functools.partial(Contender, name, state) for name in names}, notes)


@contextmanager
def started(starts: Mapping[str, Callable[[], W]], notes: list[str]) -> Iterator[dict[str, W]]:
    """What the calls return, made two at a time; a note instead of one that is not installed.

    All are closed in the end, whatever happens.
    """
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(start) for name, start in starts.items()}
    running: dict[str, W] = {}
    try:
        for name, future in futures.items():
            try:
                running[name] = future.result()
            except AbsentError:
                notes.append(absent(name))
        yield running
    finally:
        for future in futures.values():
            if future.exception() is None:
                future.result().close()


def absent(name: str) -> str:
    """The note on a contender that cannot be had."""
    return f"{name} is not installed; skipped"


def in_turn(
    running: dict[str, T], rounds: int, measure: Callable[[T], float]
) -> dict[str, list[float]]:
    """One uncounted run of each, then all in turn."""
    values: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds + 1):
        for name, contender in running.items():
            value = measure(contender)
            if number:
                values[name].append(value)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return values
