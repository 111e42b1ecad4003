"""One picture for each question: bars by contender, or curves where a size grows."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks._results import US, Result

_OURS, _PEERS, _LIMIT = "#c2410c", "#64748b", "#cbd5e1"
_LIMITS = ("raw", "read", "bare", "no save", "cp", "python")
_BAR_INCHES = 0.24


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw all; the files that were made."""
    drawn = []
    for question, group in itertools.groupby(results, lambda r: r.question):
        cases = [result for result in group if result.values]
        if cases:
            figure = _curves(cases) if question == "scale" else _bars(cases)
            drawn.append(folder / f"{question}.png")
            figure.savefig(drawn[-1], dpi=110)
            plt.close(figure)
    return drawn


def _bars(results: Sequence[Result]) -> Any:
    """One panel for each case: medians, with a line from the least to the largest value."""
    heights = [len(result.values) + 2 for result in results]
    figure, panels = plt.subplots(
        len(results), squeeze=False, layout="constrained", height_ratios=heights,
        figsize=(8, _BAR_INCHES * sum(heights) + 0.4),
    )  # fmt: skip
    for panel, result in zip(panels[:, 0], results, strict=True):
        names = list(result.values)
        medians = [result.median(name) for name in names]
        low = [m - min(result.values[name]) for name, m in zip(names, medians, strict=True)]
        high = [max(result.values[name]) - m for name, m in zip(names, medians, strict=True)]
        panel.barh(names, medians, xerr=(low, high), color=[_colour(n) for n in names],
                   error_kw={"elinewidth": 0.8}, height=0.7)  # fmt: skip
        panel.set_xlim(0, 1.18 * max(m + h for m, h in zip(medians, high, strict=True)) or 1)
        for at, (median, more) in enumerate(zip(medians, high, strict=True)):
            panel.annotate(f"{median:.3g}", (median + more, at), (4, 0), fontsize=7, va="center",
                           textcoords="offset points")  # fmt: skip
        panel.invert_yaxis()
        panel.tick_params(labelsize=8)
        panel.set_title(f"{result.question}: {result.case}", fontsize=9, loc="left")
        panel.set_xlabel(f"{result.unit} (median, least to largest)", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _curves(results: Sequence[Result]) -> Any:
    """Seconds by the number of leaves, both logarithmic."""
    figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for result in results:
        leaves = [int(name.split()[0]) for name in result.values]
        panel.loglog(leaves, [result.median(n) for n in result.values], "o-", label=result.case)
    panel.set_xlabel("leaves")
    panel.set_ylabel("seconds")
    panel.set_title("scale: planning a save, and the manifest", fontsize=10, loc="left")
    panel.grid(which="both", alpha=0.25)
    panel.legend(fontsize=8)
    return figure


def _colour(name: str) -> str:
    if US in name:
        return _OURS
    return _LIMIT if name.startswith(_LIMITS) else _PEERS
