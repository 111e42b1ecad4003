"""Kill a training run, resume it, and prove that nothing was lost.

Trains `train_lm.py` five times in processes of its own: undisturbed; killed with SIGKILL in
mid-training; and resumed from what the kill left on disk, on the same mesh of simulated devices
and on two others. Every sentence with a tick is checked here; one that fails makes the exit
code 1. Logs, checkpoints and the picture `loss.png` go to `demo/` in the current directory.

    python examples/demo.py          # about two minutes on two CPU cores
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jaxshard

mpl.use("Agg")  # a picture file, on machines without a display too
import matplotlib.pyplot as plt  # noqa: E402

STEPS, SAVE_EVERY, KILL_AT = 100, 20, 53
# Another mesh adds the same numbers in another order, so its losses drift by rounding alone.
# Forgetting any part of the state (say, Adam's moments) moves them by percents.
RELATIVE_BOUND = 1e-3
OUT = Path("demo")


@dataclass(frozen=True)
class Run:
    """One training run: its files are in `demo/<name>/`."""

    name: str
    mesh: str
    title: str

    @property
    def folder(self) -> Path:
        return OUT / self.name

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("train_lm.py"))]
        command += ["--run", str(self.folder / "run"), "--log", str(self.folder / "log.jsonl")]
        command += ["--mesh", self.mesh, "--check-restored"]
        command += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        with (self.folder / "output.txt").open("wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def records(self) -> list[dict]:
        """The log so far; a line that is still being written is left out."""
        log = self.folder / "log.jsonl"
        return [json.loads(s) for s in log.read_text().split("\n")[:-1]] if log.exists() else []

    def by_step(self) -> dict[int, dict]:
        return {record["step"]: record for record in self.records() if "step" in record}

    def resumed(self) -> dict:
        return next(record for record in self.records() if "resumed_from" in record)

    def checkpoint(self, step: int) -> Path:
        return self.folder / "run" / f"step_{step:08d}"


REFERENCE = Run("reference", "2x4", "uninterrupted, mesh 2x4")
KILLED = Run("killed", "2x4", "killed, mesh 2x4")
SAME_MESH = Run("same-mesh", "2x4", "resumed, same mesh 2x4")
OTHER_MESH = Run("other-mesh", "4x2", "resumed, mesh 4x2")
TWO_DEVICES = Run("two-devices", "2x1", "resumed, 2 devices (2x1)")
RESUMED = (SAME_MESH, OTHER_MESH, TWO_DEVICES)


class Story:
    """What the reader sees, and the claims that turned out false."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)  # plain text unless on a terminal
        self.false_claims: list[str] = []

    def chapter(self, title: str) -> None:
        self.console.print(f"\n[bold]{title}[/]")

    def claim(self, holds: bool, sentence: str) -> None:
        mark = "[green]✓[/]" if holds else "[bold red]✗ not true:[/]"
        self.console.print(f"  {mark} {sentence}")
        if not holds:
            self.false_claims.append(sentence)

    def train(self, *runs: Run, kill_at: int | None = None) -> None:
        """Train side by side, with a bar for each run; SIGKILL once step `kill_at` is logged."""
        started = time.monotonic()
        columns = ("  {task.description:26}", "loss {task.fields[loss]:6.3f}")
        bars = Progress(
            TextColumn(columns[0]),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(columns[1]),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        with bars:
            tasks = [bars.add_task(run.title, total=STEPS, loss=float("nan")) for run in runs]
            processes = [run.start() for run in runs]
            try:
                follow(runs, processes, kill_at, lambda i, r: bars.update(tasks[i], **r))
            finally:
                for process in processes:
                    process.kill()
        if not self.console.is_terminal:
            names = " and ".join(run.title for run in runs)
            self.console.print(f"  trained: {names} ({time.monotonic() - started:.0f} s)")


def follow(
    runs: tuple[Run, ...],
    processes: list[subprocess.Popen[bytes]],
    kill_at: int | None,
    show: Callable[[int, dict], None],
) -> None:
    """Watch the logs until all processes have ended; a run that fails ends the demo."""
    running = True
    while running:
        running = any(process.poll() is None for process in processes)
        for i, run in enumerate(runs):
            if steps := run.by_step():
                last = max(steps)
                show(i, {"completed": last, "loss": steps[last]["loss"]})
                if kill_at is not None and last >= kill_at:
                    processes[i].send_signal(signal.SIGKILL)
        time.sleep(0.02)
    for run, process in zip(runs, processes, strict=True):
        expected = 0 if kill_at is None else -signal.SIGKILL
        if process.returncode != expected:
            output = (run.folder / "output.txt").read_text()[-3000:]
            sys.exit(f"{output}\n{run.title}: exit code {process.returncode}, expected {expected}")


def all_equal(field: str, run: Run, steps: range) -> bool:
    ours, reference = run.by_step(), REFERENCE.by_step()
    return all(ours[step][field] == reference[step][field] for step in steps)


def differences(run: Run) -> dict[int, float]:
    """|loss - loss of the uninterrupted run| by step."""
    reference = REFERENCE.by_step()
    return {step: abs(r["loss"] - reference[step]["loss"]) for step, r in run.by_step().items()}


def tell_killed(story: Story) -> int:
    """Returns the step from which a resume has to start."""
    last = max(KILLED.by_step())
    newest = last // SAVE_EVERY * SAVE_EVERY
    story.claim(
        newest < last < STEPS,
        f"killed (SIGKILL) after step {last}, {last - newest} steps past the checkpoint {newest}",
    )
    story.claim(
        all_equal("loss_hex", KILLED, range(1, last + 1)),
        f"until then each of its {last} losses had the bits of the uninterrupted run",
    )
    return newest


def tell_resumed(story: Story, run: Run, newest: int) -> None:
    """What holds for a resume on any mesh."""
    resumed, rest = run.resumed(), range(newest + 1, STEPS + 1)
    story.claim(
        resumed["resumed_from"] == newest and sorted(run.by_step()) == list(rest),
        f"{run.title}: went on from step {newest} and ran the steps {rest[0]} to {STEPS}",
    )
    leaves = resumed.get("leaves_identical", 0)
    story.claim(
        leaves > 0,
        f"all {leaves} restored leaves (weights, Adam, dropout keys, counters, data position) "
        "have the saved bits",
    )
    story.claim(all_equal("rows", run, rest), f"all {len(rest)} batches hold the same rows")


def tell_same_mesh(story: Story, newest: int) -> None:
    rest = range(newest + 1, STEPS + 1)
    story.claim(
        all_equal("loss_hex", SAME_MESH, rest),
        f"all {len(rest)} losses are bitwise those of the uninterrupted run, "
        f"the last one {SAME_MESH.by_step()[STEPS]['loss_hex']}",
    )
    report = jaxshard.diff(REFERENCE.checkpoint(STEPS), SAME_MESH.checkpoint(STEPS))
    story.claim(report.identical, f"the final checkpoints (step {STEPS}) are bitwise equal too")


def tell_other_mesh(story: Story, run: Run) -> None:
    reference, difference = REFERENCE.by_step(), differences(run)
    relative = max(d / reference[step]["loss"] for step, d in difference.items())
    story.claim(
        relative < RELATIVE_BOUND,
        f"losses differ by rounding only: at most {max(difference.values()):.1e} "
        f"(relative {relative:.1e}, allowed {RELATIVE_BOUND:.0e})",
    )


def plot(path: Path, newest: int) -> None:
    """Loss curves above, their distance from the uninterrupted run below."""
    styles = {
        REFERENCE: {"color": "0.8", "lw": 7, "solid_capstyle": "round"},
        KILLED: {"color": "black", "lw": 1.5},
        SAME_MESH: {"color": "#0072b2", "lw": 3},
        OTHER_MESH: {"color": "#e69f00", "lw": 1.5, "ls": "--"},
        TWO_DEVICES: {"color": "#009e73", "lw": 2, "ls": ":"},
    }
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 6.5), height_ratios=(3, 1.3), layout="constrained"
    )
    for run, style in styles.items():
        steps = run.by_step()
        top.plot(steps.keys(), [r["loss"] for r in steps.values()], label=run.title, **style)
    for run in RESUMED:
        distance = differences(run)
        bottom.plot(distance.keys(), distance.values(), label=run.title, **styles[run])
    mark_kill(top, newest)
    top.set(ylabel="loss (nats per byte)", title="Killed at any moment, resumed on any mesh")
    top.legend(frameon=False)
    bottom.set_yscale("symlog", linthresh=1e-7)
    bottom.set(xlabel="step", ylabel="|difference to\nuninterrupted|", xlim=(0, STEPS + 1))
    bottom.set_ylim(bottom=-2e-8)
    bottom.annotate("same mesh: exactly 0", (STEPS * 0.7, 0), (0, 6), textcoords="offset points")
    figure.savefig(path, dpi=150)


def mark_kill(axes: plt.Axes, newest: int) -> None:
    killed = KILLED.by_step()
    last = max(killed)
    axes.plot(last, killed[last]["loss"], "X", color="#d55e00", ms=12, zorder=5)
    axes.annotate(
        f"SIGKILL after step {last}",
        (last, killed[last]["loss"]),
        (last + 3, killed[last]["loss"] + 1.0),
        arrowprops={"arrowstyle": "-", "color": "#d55e00"},
        color="#d55e00",
    )
    axes.axvspan(newest, last, color="#d55e00", alpha=0.08, lw=0)
    axes.annotate(f"checkpoint {newest}", (newest, axes.get_ylim()[1]), rotation=90, va="top")


def main() -> None:
    started, story = time.monotonic(), Story()
    for run in (REFERENCE, KILLED, *RESUMED):
        shutil.rmtree(run.folder, ignore_errors=True)

    story.chapter(f"1. Train {STEPS} steps on 8 simulated devices, a checkpoint every {SAVE_EVERY}")
    story.train(REFERENCE)

    story.chapter("2. The same again, but with SIGKILL in mid-training")
    story.train(KILLED, kill_at=KILL_AT)
    newest = tell_killed(story)
    for run in RESUMED:
        shutil.copytree(KILLED.folder / "run", run.folder / "run")

    story.chapter("3. Start it again in a new process: the same mesh")
    story.train(SAME_MESH)
    tell_resumed(story, SAME_MESH, newest)
    tell_same_mesh(story, newest)

    story.chapter("4. Start it again on other meshes: 4x2 and 2x1, from the same checkpoint")
    story.train(OTHER_MESH, TWO_DEVICES)
    for run in (OTHER_MESH, TWO_DEVICES):
        tell_resumed(story, run, newest)
        tell_other_mesh(story, run)

    plot(OUT / "loss.png", newest)
    seconds = time.monotonic() - started
    story.console.print(f"\nThe curves are in {OUT / 'loss.png'} ({seconds:.0f} s in all).")
    if story.false_claims:
        sys.exit(
            f"{len(story.false_claims)} claims are not true, the first: {story.false_claims[0]}"
        )


if __name__ == "__main__":
    main()
