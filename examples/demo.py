"""Kill a training run, resume it, and prove that nothing was lost.

Trains `train_lm.py` five times, each in a process of its own: undisturbed; killed with SIGKILL in
mid-training; and resumed from what the kill left on disk, on the same mesh of simulated devices
and on two others. Every sentence with a tick is computed from the logs and checkpoints; one that
is not true makes the exit code 1. Everything goes to `demo/` in the current directory, the
picture to `demo/loss.png`.

    python examples/demo.py          # under two minutes on two CPU cores
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loss_plot
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jaxshard

OUT = Path("demo")
STEPS, SAVE_EVERY, KILL_AT = 80, 20, 53
# On another mesh the same numbers are added in another order, so losses differ by rounding, about
# 1e-6. Were a single dropout key forgotten, they would by 2e-3; Adam's first moments, by 1e-2.
RELATIVE_BOUND = 1e-4


@dataclass(frozen=True)
class Run:
    """One training run; its files are in `demo/<name>/`."""

    name: str
    mesh: str
    title: str

    @property
    def folder(self) -> Path:
        """Where its log, its output and its run directory are."""
        return OUT / self.name

    def start(self) -> subprocess.Popen[bytes]:
        """Run the training script, in the background."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("train_lm.py"))]
        command += ["--run", str(self.folder / "run"), "--log", str(self.folder / "log.jsonl")]
        command += ["--mesh", self.mesh, "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        command += ["--check-restored"]
        with (self.folder / "output.txt").open("wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def log(self) -> list[dict[str, Any]]:
        """What it logged so far; a line that is still being written is left out."""
        path = self.folder / "log.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def steps(self) -> dict[int, dict[str, Any]]:
        """The logged steps by their number."""
        return {line["step"]: line for line in self.log() if "step" in line}

    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {step: line["loss"] for step, line in self.steps().items()}

    def checkpoint(self, step: int) -> Path:
        """The directory of one checkpoint."""
        return self.folder / "run" / f"step_{step:08d}"


REFERENCE = Run("reference", "2x4", "uninterrupted, mesh 2x4")
KILLED = Run("killed", "2x4", "killed, mesh 2x4")
SAME_MESH = Run("same-mesh", "2x4", "resumed, same mesh 2x4")
OTHER_MESH = Run("other-mesh", "4x2", "resumed, mesh 4x2")
TWO_DEVICES = Run("two-devices", "2x1", "resumed, 2 devices (2x1)")
RUNS = (REFERENCE, KILLED, SAME_MESH, OTHER_MESH, TWO_DEVICES)


class Story:
    """What the reader sees, and how many of its claims are true."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)  # colours only on a terminal
        self.n_claims = self.n_untrue = 0

    def claim(self, sentence: str, *, holds: bool) -> None:
        """Print a sentence with the verdict on it."""
        self.console.print(f"  {'[green]✓[/]' if holds else '[bold red]NOT TRUE:[/]'} {sentence}")
        self.n_claims += 1
        self.n_untrue += not holds

    def train(self, chapter: str, *runs: Run, kill_at: int | None = None) -> None:
        """Train side by side under a title, with a progress bar each on a terminal."""
        self.console.print(f"\n[bold]{chapter}[/]")
        started, quiet = time.monotonic(), not self.console.is_terminal
        note = TextColumn("{task.fields[note]}")
        columns = ("  {task.description:24}", BarColumn(), MofNCompleteColumn(), note)
        with Progress(*columns, TimeElapsedColumn(), console=self.console, disable=quiet) as bars:
            tasks = {run: bars.add_task(run.title, total=STEPS, note="starting") for run in runs}
            for run, step, loss in follow(runs, kill_at):
                bars.update(tasks[run], completed=step, note=f"loss {loss:.3f}")
        if quiet:
            titles = " | ".join(run.title for run in runs)
            self.console.print(f"  trained in {time.monotonic() - started:.0f} s: {titles}")


def follow(runs: tuple[Run, ...], kill_at: int | None) -> Iterator[tuple[Run, int, float]]:
    """Start the runs, tell how far they are, SIGKILL each once step `kill_at` is in its log."""
    processes = {run: run.start() for run in runs}
    try:
        running = True
        while running:
            running = any(process.poll() is None for process in processes.values())
            for run, process in processes.items():
                if losses := run.losses():
                    last = max(losses)
                    yield run, last, losses[last]
                    if kill_at is not None and last >= kill_at:
                        process.kill()
            time.sleep(0.03)
    finally:
        for process in processes.values():
            process.kill()
    expected = 0 if kill_at is None else -signal.SIGKILL
    for run, process in processes.items():
        if process.returncode != expected:
            output = (run.folder / "output.txt").read_text()[-3000:]
            sys.exit(f"{output}\n{run.title}: exit code {process.returncode}, expected {expected}")


def all_equal(field: str, run: Run) -> bool:
    """Whether a field is the same as in the uninterrupted run at every step of `run`."""
    reference = REFERENCE.steps()
    return all(line[field] == reference[step][field] for step, line in run.steps().items())


def judge_killed(story: Story) -> int:
    """Returns the step from which a resume has to start."""
    last = max(KILLED.steps())
    newest = last // SAVE_EVERY * SAVE_EVERY
    story.claim(
        f"killed by SIGKILL after step {last}; the newest checkpoint is of step {newest}",
        holds=0 < newest < last < STEPS,
    )
    story.claim(
        f"control: until then all {last} losses have the bits of the uninterrupted run",
        holds=all_equal("loss_hex", KILLED),
    )
    return newest


def judge_resumed(story: Story, run: Run, newest: int) -> None:
    """What holds for a resume on any mesh."""
    header, steps = run.log()[0], list(run.steps())
    n_leaves = header.get("leaves_identical", 0)
    story.claim(
        f"{run.title}: went on from step {newest}, ran {newest + 1} to {STEPS}",
        holds=header["resumed_from"] == newest and steps == list(range(newest + 1, STEPS + 1)),
    )
    story.claim(
        f"all {n_leaves} restored leaves (weights, Adam, dropout keys, counters, data position) "
        "are bitwise what was saved",
        holds=n_leaves > 0,
    )
    story.claim(f"all {len(steps)} batches hold the same rows", holds=all_equal("rows", run))


def judge_same_mesh(story: Story) -> None:
    """What holds on the mesh that saved: everything, to the last bit."""
    steps = SAME_MESH.steps()
    story.claim(
        f"all {len(steps)} losses are bitwise those of the uninterrupted run "
        f"(the last one is {steps[STEPS]['loss_hex']})",
        holds=all_equal("loss_hex", SAME_MESH),
    )
    report = jaxshard.diff(REFERENCE.checkpoint(STEPS), SAME_MESH.checkpoint(STEPS))
    story.claim(f"the checkpoints of step {STEPS} are bitwise equal", holds=report.identical)


def judge_other_mesh(story: Story, run: Run) -> None:
    """What holds on another mesh: the same training, up to the rounding of sums."""
    reference, losses = REFERENCE.losses(), run.losses()
    relative = max(abs(loss / reference[step] - 1) for step, loss in losses.items())
    absolute = max(abs(loss - reference[step]) for step, loss in losses.items())
    story.claim(
        f"losses agree up to rounding: at most {absolute:.1e} apart "
        f"(relative {relative:.1e}, allowed {RELATIVE_BOUND:.0e})",
        holds=relative < RELATIVE_BOUND,
    )


def main() -> None:
    """Tell the story; exit with 1 if any of it is not true."""
    started, story = time.monotonic(), Story()
    for run in RUNS:
        shutil.rmtree(run.folder, ignore_errors=True)

    story.train(f"1. Train {STEPS} steps undisturbed, a checkpoint every {SAVE_EVERY}", REFERENCE)
    story.train("2. The same again, but killed in mid-training", KILLED, kill_at=KILL_AT)
    newest = judge_killed(story)
    for run in RUNS[2:]:
        shutil.copytree(KILLED.folder / "run", run.folder / "run")

    story.train("3. Start it again: a new process, the same mesh", SAME_MESH)
    judge_resumed(story, SAME_MESH, newest)
    judge_same_mesh(story)

    story.train("4. Start it again on two other meshes, at once", OTHER_MESH, TWO_DEVICES)
    for run in (OTHER_MESH, TWO_DEVICES):
        judge_resumed(story, run, newest)
        judge_other_mesh(story, run)

    curves = {run.title: run.losses() for run in RUNS}
    loss_plot.draw(OUT / "loss.png", curves, saved=newest)
    seconds = time.monotonic() - started
    story.console.print(f"\nThe curves are in {OUT / 'loss.png'}. All this took {seconds:.0f} s.")
    if story.n_untrue:
        sys.exit(
            f"{story.n_untrue} of {story.n_claims} claims are not true, see {OUT}/*/output.txt"
        )
    story.console.print(f"All {story.n_claims} claims hold.")


if __name__ == "__main__":
    main()
