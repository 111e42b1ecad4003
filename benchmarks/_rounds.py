"""Contenders in turn, and what came out of it: medians, ratios within a round, one table.

A B C A B C …, so that a busy minute of the machine hits all of them; ratios are taken within each
round and their median is reported. Before anything is measured, as much memory as will be used is
touched once (the first touch of a page since boot can cost ten times the second) and every
contender runs once without being counted.
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._process import AbsentError, Contender

US = "jaxshard"
PEERS = ("orbax", "orbax-tuned", "orbax-v1", "torch-dcp", "safetensors")
RAW = ("raw-2", "raw-4", "raw-16")


@dataclasses.dataclass
class Result:
    """The answer to one question.

    Attributes:
      question: e.g. `save`.
      state: name of the state.
      unit: of the values, e.g. `s`.
      values: by contender, one value a round; for memory and scale there may be one only.
      target: what PERFORMANCE asks for, and whether it was reached.
      notes: contenders that were absent, and why.
    """

    question: str
    state: str
    unit: str
    values: dict[str, list[float]]
    targets: list[tuple[str, bool]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def median(self, name: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.values[name])

    def ratio(self, name: str, to: str = US) -> float:
        """Median over the rounds of `name` / `to`."""
        pairs = zip(self.values[name], self.values[to], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def best(self, names: tuple[str, ...]) -> str | None:
        """The contender with the least median."""
        return min((n for n in names if n in self.values), key=self.median, default=None)

    def expect(self, what: str, reached: bool) -> None:  # noqa: FBT001
        """Note a target and whether it was reached."""
        self.targets.append((what, reached))

    def expect_ratio(self, names: tuple[str, ...], at_least: float) -> None:
        """Note the target that each of these takes so many times as long as jaxshard."""
        for name in names:
            if name in self.values and US in self.values:
                found = self.ratio(name)
                self.expect(f"{name} / jaxshard >= {at_least:g}: {found:.2f}", found >= at_least)

    def rows(self) -> Iterator[list[str]]:
        """One row of the table for each contender."""
        for name, values in self.values.items():
            ratio = f"{self.ratio(name):.2f}" if len(values) == len(self.values[US]) else ""
            low, high = min(values), max(values)
            numbers = [f"{x:.4g}" for x in (self.median(name), low, high)]
            yield [self.question, self.state, name, *numbers, self.unit, ratio]


def markdown(results: list[Result]) -> str:
    """All results as one table, then what was aimed at and what was found."""
    head = ["question", "state", "contender", "median", "min", "max", "", "÷ jaxshard"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for result in results for row in result.rows()]
    targets = [
        f"* {'reached' if ok else '**missed**'}: {r.question} {r.state}: {what}"
        for r in results
        for what, ok in r.targets
    ]
    notes = [f"* {r.question} {r.state}: {note}" for r in results for note in r.notes]
    return "\n".join([*lines, "", *targets, *notes, ""])


def as_json(results: list[Result]) -> str:
    """All numbers, with the versions and the machine."""
    body = {"machine": machine(), "results": [dataclasses.asdict(r) for r in results]}
    return json.dumps(body, indent=1)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    packages = ("jaxshard", "jax", "jaxlib", "tensorstore", "numpy", "flax", "orbax-checkpoint",
                "torch", "safetensors")  # fmt: skip
    return {
        "python": platform.python_version(),
        "kernel": os.uname().release,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "packages": {p: v for p in packages if (v := _version(p))},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "?")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def arguments(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The command line that all questions have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", default=defaults.get("state", "big"))
    parser.add_argument("--rounds", type=int, default=defaults.get("rounds", 7))
    parser.add_argument("--dir", default=None, help="where to write (default: a temporary one)")
    parser.add_argument("--contenders", default=None, help="comma-separated; default: all")
    return parser.parse_args()


@contextmanager
def folder(where: str | None) -> Iterator[str]:
    """A directory for checkpoints, on the disk under test; removed afterwards."""
    made = tempfile.mkdtemp(prefix="bench-", dir=where or ".")
    try:
        yield os.path.abspath(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def touch(nbytes: int) -> None:
    """Touch memory once and give it back."""
    part = 1 << 30
    held = [np.ones(min(part, nbytes - at), np.uint8) for at in range(0, nbytes, part)]
    del held


@contextmanager
def contenders(
    names: tuple[str, ...], state: str, notes: list[str]
) -> Iterator[dict[str, Contender]]:
    """Those that are installed, each in its process."""
    running: dict[str, Contender] = {}
    try:
        for name in names:
            try:
                running[name] = Contender(name, state)
            except AbsentError:
                notes.append(f"{name} is not installed; skipped")
        yield running
    finally:
        for contender in running.values():
            contender.close()


def in_turn(
    running: dict[str, Contender],
    rounds: int,
    measure: Callable[[Contender], float],
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


def chosen(asked: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """The contenders that the command line names; jaxshard always."""
    if asked is None:
        return default
    return tuple(dict.fromkeys([US, *asked.split(",")]))
