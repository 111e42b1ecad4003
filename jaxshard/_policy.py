"""When to save: pure functions of (step, clock, history).

No clock and no disk here, so that every policy can be tested against a simulated run.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

_COSTS = 9  # that the next interval is made of: the median of the last ones


class SavedStep(NamedTuple):
    """A save that this process began; the first one of a history is where the process itself began.

    Attributes:
      step: completed updates.
      clock_s: the clock when it was asked for, in seconds.
      took_s: seconds until it had ended, well or not; None while it goes on; 0 of the first.
      cost_s: seconds that it took from training: for which the call blocked, and by which steps
        beside it were slower; None of one that goes on or has failed, and of the first.
    """

    step: int
    clock_s: float
    took_s: float | None = None
    cost_s: float | None = None


SavePolicy = Callable[[int, float, Sequence[SavedStep]], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Save at each multiple of `steps`, or each time that `minutes` have passed, or both.

    Attributes:
      steps: completed updates between two saves.
      minutes: time between two saves, and from the start to the first.

    Example:
      >>> import jaxshard
      >>> due = jaxshard.Every(steps=100)
      >>> [step for step in range(1, 301) if due(step, 0.0, [])]
      [100, 200, 300]
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("Every: expected steps or minutes\nhint: Every(steps=100)")
        if self.steps is not None and self.steps < 1:
            raise ValueError(
                f"Every: steps must be at least 1: {self.steps}\nhint: Every(steps=100)"
            )
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(
                f"Every: minutes must be more than 0: {self.minutes}\nhint: Every(minutes=10)"
            )

    def __call__(self, step: int, clock_s: float, history: Sequence[SavedStep]) -> bool:
        """Whether to save after update number `step`."""
        if self.steps is not None and step % self.steps == 0:
            return True
        if self.minutes is None or not history:
            return False
        return clock_s - history[-1].clock_s >= 60 * self.minutes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YoungDaly:
    """Save as often as loses the least time, by what saves were seen to cost this run.

    A rare save loses much work at a failure, a frequent one slows training down. Where saves cost
    `C` seconds and failures come every `M` seconds, the best time between two saves is about
    `sqrt(2 C M)` (Young). Daly's formula of higher order, which is used here, also holds where `C`
    is not small beside `M`. `C` is measured: the seconds for which a save blocked training, and
    those by which steps beside it were slower; the median of the last nine. The first save comes
    after `min_steps`; none begins while one goes on.

    Attributes:
      mtbf_hours: mean time between failures of the whole job, in hours: that of one machine divided
        by the number of machines.
      min_steps: at least so many updates between two saves.
      max_minutes: at most so long between two saves.

    Source:
      J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974);
      J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
      Future Generation Computer Systems 22 (2006), equation 37.

    Example:
      >>> import jaxshard
      >>> due = jaxshard.YoungDaly(mtbf_hours=24)
      >>> round(due.interval_s(cost_s=0.5))
      294
    """

    mtbf_hours: float
    min_steps: int = 1
    max_minutes: float = 60.0

    def __post_init__(self) -> None:
        if not (self.mtbf_hours > 0 and self.min_steps >= 1 and self.max_minutes > 0):
            raise ValueError(
                f"YoungDaly: mtbf_hours={self.mtbf_hours}, min_steps={self.min_steps}, "
                f"max_minutes={self.max_minutes}: all must be more than 0\n"
                "hint: YoungDaly(mtbf_hours=24)"
            )

    def interval_s(self, cost_s: float) -> float:
        """The best time between the end of one save and the beginning of the next, in seconds."""
        mtbf_s = 3600 * self.mtbf_hours
        share = cost_s / (2 * mtbf_s)
        if share >= 1:
            return mtbf_s
        return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s

    def __call__(self, step: int, clock_s: float, history: Sequence[SavedStep]) -> bool:
        """Whether to save after update number `step`."""
        if not history:
            return step >= self.min_steps
        last = history[-1]
        if last.took_s is None or step - last.step < self.min_steps:
            return False
        since_s = clock_s - last.clock_s
        if since_s >= 60 * self.max_minutes:
            return True
        costs = [saved.cost_s for saved in history if saved.cost_s is not None][-_COSTS:]
        import statistics  # noqa: PLC0415  (5 ms, which no start has to wait for)

        cost_s = statistics.median(costs or [last.took_s])
        return since_s - (last.cost_s or 0.0) >= self.interval_s(cost_s)
