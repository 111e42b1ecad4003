"""What came out: medians, ratios within a round, one table for each question."""

import dataclasses
import itertools
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

US = "jaxshard"
_PACKAGES = ("jaxshard", "jax", "jaxlib", "tensorstore", "numpy", "flax", "orbax-checkpoint",
             "torch", "safetensors")  # fmt: skip


@dataclasses.dataclass
class Result:
    """The answer to one question in one case.

    Attributes:
      question: the module that asked, e.g. `save`.
      case: the state, and what else was special: `big, mesh 4x2`.
      unit: of the values, e.g. `s`.
      values: by contender, one value a round; for memory and scale there may be one only.
      targets: what was aimed at, with what was found, and whether it was reached.
      notes: contenders that were absent, and what else the numbers do not say.
    """

    question: str
    case: str
    unit: str
    values: dict[str, list[float]]
    targets: list[tuple[str, bool]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def median(self, name: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.values[name])

    def ratio(self, name: str, to: str = US) -> float:
        """Median over the rounds of `name` / `to`, each round's pair for itself."""
        pairs = zip(self.values[name], self.values[to], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def difference(self, name: str, to: str) -> float:
        """Median over the rounds of `name` - `to`, each round's pair for itself."""
        pairs = zip(self.values[name], self.values[to], strict=True)
        return statistics.median(a - b for a, b in pairs)

    def best(self, names: Sequence[str]) -> str | None:
        """The contender with the least median."""
        return min((n for n in names if n in self.values), key=self.median, default=None)

    def expect(self, what: str, found: float, *, at_most: float) -> None:
        """Note a target, what was found, and whether it was reached."""
        self.targets.append((f"{what} <= {at_most:.4g}: {found:.4g}", found <= at_most))

    def expect_ratio(self, names: Sequence[str], at_least: float) -> None:
        """Note the target that each of these takes so many times as long as jaxshard."""
        for name in names:
            if name in self.values and US in self.values:
                found = self.ratio(name)
                self.targets.append(
                    (f"{name} / {US} >= {at_least:.4g}: {found:.4g}", found >= at_least)
                )

    def rows(self) -> Iterator[list[str]]:
        """One row of the table for each contender."""
        for name, values in self.values.items():
            numbers = [f"{x:.4g}" for x in (self.median(name), min(values), max(values))]
            comparable = US in self.values and all(self.values[US])
            ratio = f"{self.ratio(name):.2f}" if comparable else ""
            yield [self.case, name, *numbers, self.unit, ratio]


def markdown(results: Sequence[Result]) -> str:
    """A table for each question, with what was aimed at and what was found."""
    parts = [
        _section(question, list(group))
        for question, group in itertools.groupby(results, lambda r: r.question)
    ]
    return "\n".join(parts)


def _section(question: str, results: list[Result]) -> str:
    head = ["case", "contender", "median", "min", "max", "unit", f"÷ {US}"]
    lines = [f"### {question}", "", _row(head), "|" + " --- |" * len(head)]
    lines += [_row(row) for result in results for row in result.rows()]
    remarks = [
        f"* {'reached' if reached else '**missed**'}: {r.case}: {what}"
        for r in results
        for what, reached in r.targets
    ]
    remarks += [f"* {r.case}: {note}" for r in results for note in r.notes]
    return "\n".join([*lines, "", *remarks, *([""] if remarks else [])])


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def summary(results: Sequence[Result]) -> str:
    """How many targets were reached, and which were not."""
    targets = [(r, what, reached) for r in results for what, reached in r.targets]
    missed = [f"* {r.question}: {r.case}: {what}" for r, what, reached in targets if not reached]
    if not targets:
        return "No target is set for these states."
    title = f"{len(targets) - len(missed)} of {len(targets)} targets reached"
    return "\n".join([f"{title}; missed:" if missed else f"{title}.", "", *missed])


def as_json(results: Sequence[Result]) -> str:
    """All numbers, with the versions and the machine."""
    body = {"machine": machine(), "results": [dataclasses.asdict(r) for r in results]}
    return json.dumps(body, indent=1)


def from_json(text: str) -> list[Result]:
    """What `as_json` wrote."""
    results = json.loads(text)["results"]
    return [Result(**{**r, "targets": [(w, ok) for w, ok in r["targets"]]}) for r in results]


def machine() -> dict[str, Any]:
    """What the numbers are measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "packages": {p: v for p in _PACKAGES if (v := _version(p))},
    }


def machine_text(machine: dict[str, Any]) -> str:
    """The same in one paragraph."""
    packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}; {packages}."
    )


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "?")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
