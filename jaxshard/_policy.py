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
    """Keep the newest `last` steps and each multiple of `every_steps`; others are deleted.

    The newest committed step is always kept. `Keep()` keeps all.

    Attributes:
      last: how many of the newest; None says nothing of them.
      every_steps: multiples of this are kept for good; None says nothing of them.

    Example:
      >>> import jaxshard
      >>> sorted(jaxshard.Keep(last=2).kept([10, 20, 30]))
      [20, 30]
      >>> sorted(jaxshard.Keep(last=1, every_steps=20).kept([10, 20, 30, 40, 50]))
      [20, 40, 50]
    """

    last: int | None = None
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ValueError(f"Keep: last must be at least 1: {self.last}\nhint: Keep(last=3)")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(
                f"Keep: every_steps must be at least 1: {self.every_steps}\n"
                "hint: Keep(last=3, every_steps=1000)"
            )

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Of these committed steps, the ones to keep."""
        ordered = sorted(set(steps))
        if self.last is None and self.every_steps is None:
            return set(ordered)
        multiples = {s for s in ordered if self.every_steps and s % self.every_steps == 0}
        return multiples | set(ordered[-(self.last or 1) :])
