"""Draw the loss curves of the demo: `demo.py` calls `draw`, there is nothing to run here."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # draws into a file: works without a display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Curve = dict[int, float]  # loss by step

# The curves lie on each other: from wide at the bottom to narrow on top, where the killed one is.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "0.8", "lw": 9, "solid_capstyle": "round"},
    {"color": "black", "lw": 1, "marker": "o", "ms": 3, "zorder": 4},
    {"color": "#0072b2", "lw": 4},
    {"color": "#f5c242", "lw": 2},
    {"color": "#a0104e", "lw": 2, "ls": (0, (1, 2))},
)
KILL = "#d55e00"


def draw(path: Path, curves: dict[str, Curve], *, saved: int) -> None:
    """Loss curves above, their distance from the uninterrupted run below.

    Args:
      path: The PNG file to write.
      curves: By title: the uninterrupted run, the killed one, then three resumed ones, the first
        of them on the same mesh.
      saved: The step from which they resumed.
    """
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(10, 7.5), height_ratios=(3, 1), layout="constrained"
    )
    draw_losses(top, curves, saved)
    top.set(ylabel="loss (nats per byte)", title="Killed in mid-training, resumed on three meshes")
    top.legend(frameon=False, loc="upper right")

    reference, *_, same_mesh, _, _ = curves.values()
    zoom = top.inset_axes((0.13, 0.36, 0.52, 0.58))
    draw_losses(zoom, curves, saved)
    window = range(saved - 4, saved + 25)
    losses = [loss for step, loss in reference.items() if step in window]
    zoom.set(xlim=(window[0], window[-1]), ylim=(min(losses) - 0.1, max(losses) + 0.1))
    top.indicate_inset_zoom(zoom, edgecolor="0.4")

    draw_distances(bottom, curves)
    bottom.set(xlabel="step", xlim=(0, max(same_mesh) + 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_losses(axes: Axes, curves: dict[str, Curve], saved: int) -> None:
    """All curves, the kill, and the steps that it undid."""
    for (title, curve), style in zip(curves.items(), STYLES, strict=True):
        axes.plot(curve.keys(), curve.values(), label=title, **style)
    killed = list(curves.values())[1]
    last = max(killed)
    marker = {"color": KILL, "ms": 12, "mec": "white", "ls": "", "zorder": 5}
    axes.plot(last, killed[last], "X", label=f"SIGKILL after step {last}", **marker)
    undone = f"undone: resumed from step {saved}"
    axes.axvspan(saved, last, color=KILL, alpha=0.12, lw=0, label=undone)


def draw_distances(axes: Axes, curves: dict[str, Curve]) -> None:
    """How far each resumed run is from the uninterrupted one, zero included."""
    reference, _, *resumed = curves.values()
    for curve, style in zip(resumed, STYLES[2:], strict=True):
        distance = [abs(loss - reference[step]) for step, loss in curve.items()]
        line = {"lw": 5} if curve is resumed[0] else {"ls": "", "marker": ".", "ms": 7}
        axes.plot(curve.keys(), distance, color=style["color"], **line)
    axes.set_yscale("symlog", linthresh=1e-7)  # linear around zero, logarithmic above
    axes.set(ylabel="|difference to\nuninterrupted|", ylim=(-5e-8, 1e-5))
    axes.grid(axis="y", alpha=0.3)
    left = {"x": min(resumed[0]) - 2, "ha": "right", "va": "center"}
    axes.text(y=0, s="same mesh: exactly 0", color=STYLES[2]["color"], **left)
    axes.text(y=5e-7, s="other meshes: rounding", **left)
