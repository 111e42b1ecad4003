"""`drill`: run a real training, kill it at random moments, and measure what a failure costs.

The training is any command that uses `ResumeManager`; with JAXSHARD_DRILL_ROOT in its environment
that writes to a directory of the drill instead of its own, and beats ten times a second, so that it
is known how far it had come.
"""

import dataclasses
import datetime
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxshard import _branching, _diff, _epochs, _ledger
from jaxshard._errors import Kind, StorageError, bullet_list, counted, size_text
from jaxshard._goodput import Goodput, JobStart
from jaxshard._registry import Shown
from jaxshard._report import RunReport, duration_text, report
from jaxshard._store import open_store

_POLL_S = 0.05
_LOG_SHOWN = 2000


class Targets(NamedTuple):
    """What the drill is held to; None: not asked.

    Attributes:
      max_lost_s: seconds of training that one kill may lose.
      max_resume_s: seconds from a start to the first new step.
      min_goodput: share of the time in useful steps.
      max_storage: bytes below the root.
      max_slowdown: time with saving, as a multiple of that without.
      exact: the end state is that of the run which nobody killed, bit for bit.
    """

    max_lost_s: float | None = None
    max_resume_s: float | None = None
    min_goodput: float | None = None
    max_storage: float | None = None
    max_slowdown: float | None = None
    exact: bool = True


class KillCost(NamedTuple):
    """What one kill has cost.

    Attributes:
      step: that it had come to.
      lost_steps: that were done again.
      lost_s: that these had taken.
      resume_s: from the next start of the process to its first new step.
    """

    step: int
    lost_steps: int
    lost_s: float
    resume_s: float


class TargetCheck(NamedTuple):
    """One target: its name, what was asked for, what was found, and whether it is reached."""

    name: str
    target: float
    found: float
    ok: bool

    @property
    def words(self) -> tuple[str, str, str]:
        """Name, target and what was found, for people."""
        name = self.name.removesuffix("_s").replace("_", "-")
        return name, self._text(self.target), self._text(self.found)

    def _text(self, value: float) -> str:
        if self.name.endswith("_s"):
            return duration_text(value)
        if self.name == "max_storage":
            return size_text(value)
        return f"{value:.0f}" if self.name == "differences" else f"{value:.3g}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport(Shown):
    """What a drill has found.

    Attributes:
      path: the run that was killed.
      kills: what each kill has cost.
      whole_s: seconds that the run took which nobody killed.
      goodput: of the run that was killed.
      starts: of that run.
      storage: bytes below its root, at most.
      differences: leaves of the end state that are not as without kills.
      targets: what it was held to.
    """

    path: str
    kills: tuple[KillCost, ...]
    whole_s: float
    goodput: Goodput
    starts: tuple[JobStart, ...]
    storage: int
    differences: tuple[str, ...]
    targets: Targets

    @property
    def slowdown(self) -> float:
        """Time in steps with saving, as a multiple of that without."""
        useful_s = self.goodput.useful_s
        return 1 + self.goodput.saving_s / useful_s if useful_s > 0 else 1.0

    @property
    def checks(self) -> tuple[TargetCheck, ...]:
        """Each target that was asked for."""
        lost_s = max((kill.lost_s for kill in self.kills), default=0.0)
        resume_s = max((kill.resume_s for kill in self.kills), default=0.0)
        least = ("min_goodput", self.targets.min_goodput, self.goodput.goodput)
        most = (
            ("max_lost_s", self.targets.max_lost_s, lost_s),
            ("max_resume_s", self.targets.max_resume_s, resume_s),
            ("max_storage", self.targets.max_storage, float(self.storage)),
            ("max_slowdown", self.targets.max_slowdown, self.slowdown),
            ("differences", 0.0 if self.targets.exact else None, float(len(self.differences))),
        )
        name, wanted, found = least
        checks = [] if wanted is None else [TargetCheck(name, wanted, found, found >= wanted)]
        checks += [
            TargetCheck(name, wanted, found, found <= wanted)
            for name, wanted, found in most
            if wanted is not None
        ]
        return tuple(checks)

    @property
    def summary(self) -> str:
        """What it comes to, in a line."""
        return (
            f"{self.goodput.goodput:.1%} of the time was useful; without kills it took "
            f"{duration_text(self.whole_s)}; saving costs {self.slowdown - 1:.1%}; "
            f"{size_text(self.storage)} on disk"
        )

    def __str__(self) -> str:
        lines = [
            f"{name}: {found}, wanted {wanted}: {'reached' if check.ok else 'missed'}"
            for check in self.checks
            for name, wanted, found in [check.words]
        ]
        lines += self.differences
        return bullet_list(f"{self.path}: {self.summary}", tuple(lines))

    @property
    def ok(self) -> bool:
        """Whether every target is reached."""
        return all(check.ok for check in self.checks)


def drill(
    command: Sequence[str],
    root: Path,
    *,
    kills: int,
    targets: Targets,
    seed: int,
    say: Callable[[str], None],
) -> DrillReport:
    """Run a training whole, then again with kills, and compare.

    Args:
      command: that starts the training, and starts it again.
      root: a directory for the drill.
      kills: how many.
      targets: what it is held to.
      seed: of the moments of the kills.
      say: told how far it is.

    Raises:
      StorageError: the command failed by itself, or is over before it can be killed so often (kind
        `drill`).
    """
    rng = random.Random(seed)  # noqa: S311  (of moments)
    say("runs undisturbed")
    whole = _Job(command, root, "whole")
    whole.end()
    whole_s = time.monotonic() - whole.began
    steps_s = whole.steps_s()
    costs: list[KillCost] = []
    storage = 0
    say(f"took {whole_s:.1f} s; now with {counted(kills, 'kill')}")
    job = _Job(command, root, "killed")
    for number in range(1, kills + 1):
        job.wait_for_new_step()
        # All waits together are shorter than the steps took, so that it never ends before.
        job.wait(rng.uniform(0, steps_s / (kills + 1)))
        step = job.kill()
        storage = max(storage, _bytes_below(root / "killed"))
        lost_before = job.report().goodput.lost_s
        say(f"kill {number}: after step {step}")
        job = _Job(command, root, "killed", number)
        resume_s = job.wait_for_new_step()
        lost_s = job.report().goodput.lost_s - lost_before
        costs.append(KillCost(step, step - job.resumed_at(), lost_s, resume_s))
    job.end()
    storage = max(storage, _bytes_below(root / "killed"))
    difference = _diff.diff(_newest(root / "whole"), _newest(root / "killed"))
    return DrillReport(
        path=str(root / "killed"),
        kills=tuple(costs),
        whole_s=whole_s,
        goodput=job.report().goodput,
        starts=job.report().starts,
        storage=storage,
        differences=tuple(f"{d.name}: {d.what}" for d in difference.differences),
        targets=targets,
    )


class _Job:
    """One start of the training."""

    def __init__(
        self, command: Sequence[str], root: Path, name: str, number: int | None = None
    ) -> None:
        self._run = root / name
        self._starts = sum(e["event"] == "start" for e in self._events())
        self._log = root / (f"{name}.log" if number is None else f"{name}-{number}.log")
        self.began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  (the user's own command)
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, _epochs.DRILL_ROOT: str(self._run)},
            )

    def _events(self) -> list[_ledger.Event]:
        return _ledger.read(open_store(self._run)) if self._run.is_dir() else []

    def _of_this_start(self) -> list[_ledger.Event]:
        """Events since this start."""
        events = self._events()
        starts = [i for i, e in enumerate(events) if e["event"] == "start"]
        return events[starts[self._starts] :] if len(starts) > self._starts else []

    def wait_for_new_step(self) -> float:
        """Wait until it has made a step; how long that took from its start, in seconds."""
        while not any(e["event"] == "going" for e in self._of_this_start()):
            self._require_running()
            time.sleep(_POLL_S)
        return time.monotonic() - self.began

    def wait(self, seconds: float) -> None:
        """Let it run."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._require_running()
            time.sleep(min(_POLL_S, max(0.0, until - time.monotonic())))

    def _require_running(self) -> None:
        code = self._process.poll()
        if code == 0:
            raise StorageError(
                "the training ended before it could be killed so often",
                kind=Kind.DRILL,
                path=str(self._run),
                hint="fewer --kills, or a longer training: some seconds for each kill",
            )
        if code is not None:
            self._fail(code)

    def _fail(self, code: int) -> None:
        said = self._log.read_text(errors="replace")[-_LOG_SHOWN:]
        raise StorageError(
            f"the training ended with {code} by itself; the end of {self._log}:\n{said}",
            kind=Kind.DRILL,
            path=str(self._run),
            hint="run the command alone first",
        )

    def steps_s(self) -> float:
        """How long it went on after its first step."""
        found = self._of_this_start()
        going = [_seconds(e) for e in found if e["event"] == "going"]
        return max(map(_seconds, found)) - going[0] if going else 0.0

    def kill(self) -> int:
        """SIGKILL, to all of it; the step that it had come to."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        epoch = _epochs.newest(open_store(self._run))
        seen = [int(e["step"]) for e in self._events() if isinstance(e.get("step"), int)]
        return max([*seen, (epoch.step if epoch else None) or 0])

    def end(self) -> None:
        """Wait until it has ended well."""
        code = self._process.wait()
        if code != 0:
            self._fail(code)
        if not self._events():
            raise StorageError(
                f"expected the training to write a run to {_epochs.DRILL_ROOT}={self._run}, "
                "found none",
                kind=Kind.DRILL,
                path=str(self._run),
                hint="the command has to save with jaxshard.ResumeManager",
            )

    def resumed_at(self) -> int:
        """The step that this start came back to."""
        resumed = [e for e in self._of_this_start() if e["event"] in {"resume", "fresh"}]
        return int(resumed[-1].get("step", 0)) if resumed else 0

    def report(self) -> RunReport:
        """Of the run so far."""
        return report(self._run)


def _seconds(event: _ledger.Event) -> float:
    return datetime.datetime.fromisoformat(event["at"]).timestamp()


def _newest(run: Path) -> str:
    step_dir = _branching.find_step(_branching.look(open_store(run)).branch, None, str(run))
    return str(run / step_dir.name)


def _bytes_below(folder: Path) -> int:
    files = itertools.chain.from_iterable(
        (Path(here, name) for name in names) for here, _, names in os.walk(folder)
    )
    return sum(file.lstat().st_size for file in files)
