"""Where the time of a run went: events of its ledger in, numbers out."""

import datetime
import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxshard._policy import YoungDaly

Event = Mapping[str, Any]


class Goodput(NamedTuple):
    """Where the time of a run went; all parts add up to `wall_s`.

    Attributes:
      wall_s: from the first start to the last sign of life, without the time between the end of
        training and a start that went on beyond it.
      useful_s: in steps that count.
      saving_s: what saves cost training: blocked, and slower steps beside them.
      lost_s: in steps that had to be done again, since they had not been saved; as far as the last
        beat knows, which is five seconds old at most.
      restoring_s: from a start to the state being there.
      down_s: between an end and the next start.
      starts: how often the job was started.
      failures: how many of them were killed, or ended with an error after they had begun.
      lost_steps: steps that had to be done again.
      saves: committed ones.
      failed_saves: others.
      nbytes: that were saved.
      reused_nbytes: of these, in files that the step before has too: not written.
      save_cost_s: what one save costs, the median; None if there was none.
      mtbf_s: mean time between failures; None if there was none.
    """

    wall_s: float
    useful_s: float
    saving_s: float
    lost_s: float
    restoring_s: float
    down_s: float
    starts: int
    failures: int
    lost_steps: int
    saves: int
    failed_saves: int
    nbytes: int
    reused_nbytes: int
    save_cost_s: float | None
    mtbf_s: float | None

    @property
    def goodput(self) -> float:
        """Share of the time that was useful, from 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def best_interval_s(self) -> float | None:
        """How often saves would have lost the least time; None without a failure or a save."""
        if self.save_cost_s is None or self.mtbf_s is None:
            return None
        return YoungDaly(mtbf_hours=self.mtbf_s / 3600).interval_s(self.save_cost_s)


class JobStart(NamedTuple):
    """One start of the job, up to its end; times are seconds since the first start.

    Attributes:
      began_s: when.
      ready_s: when its state was there; None if it never was.
      resumed: the step that it came back to.
      saves: when each step was committed, and its number.
      last_s: its last sign of life.
      last_step: how far it is known to have come.
      ended: whether it ended well.
      kept: of its steps, the last one that was not done again.
    """

    began_s: float
    ready_s: float | None
    resumed: int
    saves: tuple[tuple[float, int], ...]
    last_s: float
    last_step: int
    ended: bool
    kept: int


class Save(NamedTuple):
    """A save that was committed: when, and its event."""

    at: float
    event: Event


class _Start:
    """One start of the job, up to its end."""

    def __init__(self, event: Event, idle_s: float) -> None:
        self._idle_s = idle_s  # between the end of training and its next start: nobody's time
        self.began = _seconds(event) - idle_s
        self.ready: float | None = None
        self.resumed = 0
        self.saves: list[Save] = []
        self.failed_saves = 0
        self.last = self.began  # sign of life
        self.last_step = 0
        self.ended = False
        self.is_done = False  # training had come to its end
        self.is_false = False  # it ended with an error before it had begun: a wrong argument

    def add(self, event: Event) -> None:
        """Take note of an event of this start."""
        self.last = max(self.last, _seconds(event) - self._idle_s)
        match event["event"]:
            case "resume" | "fresh":
                self.ready = _seconds(event) - self._idle_s
                self.resumed = self.last_step = int(event.get("step", 0))
            case "save":
                self.saves.append(Save(_seconds(event) - self._idle_s, event))
                self.seen(int(event["step"]))
            case "save-failed":
                self.failed_saves += 1
                self.seen(int(event["step"]))
            case "stop":
                self.seen(int(event["step"]))
            case "end":
                self.ended = "error" not in event
                self.is_done = event.get("done") is True
                self.is_false = self.ready is None and not self.ended
                self.seen(int(event.get("step") or 0))

    def seen(self, step: int, at: float | None = None) -> None:
        """It had come to a step."""
        self.last_step = max(self.last_step, step)
        self.last = max(self.last, (at or 0.0) - self._idle_s)

    def kept_until(self, step: int) -> float:
        """When the state of a step was there, which a later start has come back to."""
        ready = self.ready if self.ready is not None else self.last
        at = [save.at for save in self.saves if save.event["step"] <= step]
        return max(at, default=ready) if step > self.resumed else ready


def goodput(events: Iterable[Event], step: int | None = None, seen: str | None = None) -> Goodput:
    """What the events of a run add up to.

    Args:
      events: in their order.
      step: that the last start is known to have come to, beyond its events.
      seen: when, ISO 8601.
    """
    starts = _starts(events, step, seen)
    saves = [save.event for start in starts for save in start.saves]
    costs = [float(save.get("cost_s") or 0.0) for save in saves]
    wall_s = starts[-1].last - starts[0].began if starts else 0.0
    restoring_s = sum((s.ready if s.ready is not None else s.last) - s.began for s in starts)
    down_s = lost_s = 0.0
    lost_steps = failures = 0
    for before, after in itertools.pairwise(starts):
        failures += not (before.ended or before.is_false)
        down_s += max(0.0, after.began - before.last)
        if after.ready is not None and after.resumed < before.last_step:
            lost_steps += before.last_step - after.resumed
            lost_s += max(0.0, before.last - before.kept_until(after.resumed))
    rest_s = max(0.0, wall_s - down_s - restoring_s - lost_s)
    saving_s = min(rest_s, sum(costs))
    up_s = wall_s - down_s
    return Goodput(
        wall_s=wall_s,
        useful_s=rest_s - saving_s,
        saving_s=saving_s,
        lost_s=lost_s,
        restoring_s=restoring_s,
        down_s=down_s,
        starts=len(starts),
        failures=failures,
        lost_steps=lost_steps,
        saves=len(saves),
        failed_saves=sum(start.failed_saves for start in starts),
        nbytes=sum(int(save.get("nbytes") or 0) for save in saves),
        reused_nbytes=sum(int(save.get("reused") or 0) for save in saves),
        save_cost_s=statistics.median(costs) if costs else None,
        mtbf_s=up_s / failures if failures and up_s > 0 else None,
    )


def job_starts(
    events: Iterable[Event], step: int | None = None, seen: str | None = None
) -> tuple[JobStart, ...]:
    """The starts of a run; arguments as for `goodput`."""
    starts = _starts(events, step, seen)
    nexts = [after.resumed if after.ready is not None else None for after in starts[1:]]
    zero = starts[0].began if starts else 0.0
    return tuple(
        JobStart(
            began_s=start.began - zero,
            ready_s=None if start.ready is None else start.ready - zero,
            resumed=start.resumed,
            saves=tuple((save.at - zero, int(save.event["step"])) for save in start.saves),
            last_s=start.last - zero,
            last_step=start.last_step,
            ended=start.ended or start.is_false,
            kept=start.last_step if kept is None else min(kept, start.last_step),
        )
        for start, kept in zip(starts, [*nexts, None], strict=False)
    )


def _starts(events: Iterable[Event], step: int | None, seen: str | None) -> list[_Start]:
    starts: list[_Start] = []
    idle_s = 0.0
    for event in events:
        if event["event"] == "start":
            if starts and event.get("last_step") is not None:
                starts[-1].seen(int(event["last_step"]), _at(event.get("last_seen")))
            if starts and starts[-1].is_done:
                idle_s += max(0.0, _seconds(event) - idle_s - starts[-1].last)
            starts.append(_Start(event, idle_s))
        elif starts:
            starts[-1].add(event)
    if starts and step is not None:
        starts[-1].seen(step, _at(seen))
    return starts


def _seconds(event: Event) -> float:
    return _at(event["at"]) or 0.0


def _at(text: str | None) -> float | None:
    return None if text is None else datetime.datetime.fromisoformat(text).timestamp()
