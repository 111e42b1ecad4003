"""`report`: how well a run used its time."""

import dataclasses

from jaxshard import _commit, _epochs, _ledger, _reader
from jaxshard._errors import NotFoundError, counted, size_text
from jaxshard._goodput import Goodput, JobStart, goodput, job_starts
from jaxshard._registry import Shown
from jaxshard._store import PathLike, open_store, storage_errors


@dataclasses.dataclass(frozen=True, slots=True)
class RunReport(Shown):
    """What the ledger of a run says.

    Attributes:
      path: the run.
      goodput: where its time went; see its fields.
      starts: each start of its job.
      begun_with: the checkpoint that it began with (`init_from`), None if it began afresh.
    """

    path: str
    goodput: Goodput
    starts: tuple[JobStart, ...] = ()
    begun_with: str | None = None

    def __str__(self) -> str:
        g = self.goodput
        starts, failures = counted(g.starts, "start"), counted(g.failures, "failure")
        saved = f"{counted(g.saves, 'save')}, {size_text(g.nbytes - g.reused_nbytes)} written"
        if g.reused_nbytes:
            saved += f", {size_text(g.reused_nbytes)} unchanged since the save before"
        lines = [
            f"{self.path}: {g.goodput:.1%} of {duration_text(g.wall_s)} in useful steps",
            *(f"  {name:<10} {duration_text(s):>9} {share:>6.1%}" for name, s, share in self.parts),
            f"  {starts}, {failures}, {counted(g.lost_steps, 'step')} done again",
            f"  {saved}, {g.failed_saves} failed",
        ]
        if self.begun_with is not None:
            lines.append(f"  began with {self.begun_with}")
        if g.save_cost_s is not None:
            lines.append(f"  a save costs training {duration_text(g.save_cost_s)}")
        if g.best_interval_s is not None and g.mtbf_s is not None:
            lines.append(
                f"  with a failure every {duration_text(g.mtbf_s)} the least is lost by a save "
                f"every {duration_text(g.best_interval_s)} (YoungDaly)"
            )
        return "\n".join(lines)

    @property
    def parts(self) -> list[tuple[str, float, float]]:
        """Name, seconds and share of each part of the time; they add up."""
        g = self.goodput
        seconds = {
            "useful": g.useful_s,
            "saving": g.saving_s,
            "lost": g.lost_s,
            "restoring": g.restoring_s,
            "down": g.down_s,
        }
        return [(name, s, s / g.wall_s if g.wall_s > 0 else 0.0) for name, s in seconds.items()]


def duration_text(seconds: float) -> str:
    """Seconds for people: `12 ms`, `1.5 s`, `3 min 20 s`, `5 h 2 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def report(root: PathLike) -> RunReport:
    """Say how well a run used its time: what was useful, lost, and spent on saving and coming back.

    Args:
      root: the directory of a run; also while it is being written to.

    Returns:
      The report; `print` it, or look at `report.goodput`.

    Raises:
      NotFoundError: nothing is at `root`, or no run.
      StorageError: the store failed.

    Example:
      >>> import jaxshard, numpy as np
      >>> with jaxshard.ResumeManager("memory://doc/report") as run:
      ...     state, _ = run.resume({"w": np.zeros(4)})
      ...     for step in run.steps(10):
      ...         _ = run.maybe_save(step, state)
      >>> jaxshard.report("memory://doc/report").goodput.saves
      1
    """
    store = open_store(root)
    with storage_errors("reading", store.url):
        found = _commit.look(store)
        if found is _commit.Found.CHECKPOINT:
            raise NotFoundError(
                f"{store.url}: expected a run, found one checkpoint",
                path=store.url,
                hint="give the directory of a ResumeManager",
            )
        if found is not _commit.Found.RUN:
            raise _reader.why_not_there(store)
        epoch = _epochs.newest(store)
        step, seen = (None, None) if epoch is None else (epoch.step, epoch.seen)
        events = _ledger.read(store)
        starts = job_starts(events, step, seen)
        begun = [e["init_from"] for e in events if e["event"] == "fresh" and e.get("init_from")]
        begun_with = begun[-1] if begun else None
        return RunReport(store.url, goodput(events, step, seen), starts, begun_with)
