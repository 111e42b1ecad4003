"""When to save and what to keep: pure functions of (step, clock, history).

No clock and no disk here, so that every policy can be tested against a simulated run.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class SavedStep(NamedTuple):
    """One committed save of this process: its step, and the clock when it was asked for."""

    step: int
    clock_s: float


SavePolicy = Callable[[int, float, Sequence[SavedStep]], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Save at each multiple of `steps`.

    Attributes:
      steps: completed updates between two saves.

    Example:
      >>> import jaxshard
      >>> due = jaxshard.Every(steps=100)
      >>> [step for step in range(1, 301) if due(step, 0.0, [])]
      [100, 200, 300]
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"Every: steps must be at least 1: {self.steps}\nhint: Every(steps=100)"
            )

    def __call__(self, step: int, clock_s: float, history: Sequence[SavedStep]) -> bool:
        """Whether to save after update number `step`."""
        del clock_s, history
        return step % self.steps == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Keep the newest `last` steps; older ones are deleted behind each save.

    The newest committed step is always kept.

    Attributes:
      last: how many; None keeps all.

    Example:
      >>> import jaxshard
      >>> sorted(jaxshard.Keep(last=2).kept([10, 20, 30]))
      [20, 30]
    """

    last: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ValueError(f"Keep: last must be at least 1: {self.last}\nhint: Keep(last=3)")

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Of these committed steps, the ones to keep."""
        ordered = sorted(set(steps))
        return set(ordered if self.last is None else ordered[-self.last :])
