"""What to keep: pure functions of the steps that are there.

What is kept stays kept when the rest is deleted and the question is asked again.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from jaxshard._patterns import check_patterns

_NO_METRICS: Mapping[str, float] = MappingProxyType({})


class KeptStep(NamedTuple):
    """A committed step, as far as it matters for what is kept.

    Attributes:
      step: completed updates.
      saved_s: when it was saved, in seconds since 1970.
      metrics: numbers that belong to it.
      protected: somebody said that it must stay.
    """

    step: int
    saved_s: float = 0.0
    metrics: Mapping[str, float] = _NO_METRICS
    protected: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which steps to keep: all that any of the rules names; others are deleted.

    The newest committed step and protected ones are always kept. `Keep()` keeps all.

    With `thin_to`, of the older ones only a part is kept: they become checkpoints of that part,
    which can be loaded, but not resumed from.

    Attributes:
      last: how many of the newest.
      every_steps: multiples of this, for good.
      every_hours: one step in so many hours, for good.
      best: how many with the best `metric`.
      metric: name of a number that came with `maybe_save`, `save` or `record`.
      mode: whether the smallest or the largest are best. NaN is never among them.
      thin_to: patterns of the leaves that stay of older steps, as in `select`: `"params/**"`.
      full_last: with `thin_to`, how many of the newest stay whole; 2 if it is not given, so that
        there is one more when the newest is damaged. Protected ones stay whole too.

    Example:
      >>> import jaxshard
      >>> from jaxshard import Keep
      >>> keep = Keep(last=1, best=1, metric="loss")
      >>> losses = {10: 0.3, 20: 0.1, 30: 0.2}
      >>> sorted(keep.kept([KeptStep(n, metrics={"loss": loss}) for n, loss in losses.items()]))
      [20, 30]
    """

    last: int | None = None
    every_steps: int | None = None
    every_hours: float | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    thin_to: str | Sequence[str] | None = None
    full_last: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every_steps", "best", "full_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Keep: {name} must be at least 1: {value}\nhint: Keep({name}=3)")
        if self.every_hours is not None and not self.every_hours > 0:
            raise ValueError(
                f"Keep: every_hours must be more than 0: {self.every_hours}\n"
                "hint: Keep(last=3, every_hours=6)"
            )
        if (self.best is None) != (self.metric is None):
            raise ValueError(
                f"Keep: best={self.best}, metric={self.metric!r}: expected both or neither\n"
                'hint: Keep(last=3, best=2, metric="loss", mode="min")'
            )
        if self.full_last is not None and self.thin_to is None:
            raise ValueError(
                f"Keep: full_last={self.full_last} is for thin_to=, which is not given\n"
                'hint: Keep(last=5, thin_to="params/**", full_last=2)'
            )
        if self.thin_to is not None and not check_patterns(self.thin_to):
            raise ValueError(
                'Keep: thin_to has no pattern\nhint: Keep(last=5, thin_to="params/**", full_last=2)'
            )
        if self.mode not in ("min", "max"):
            raise ValueError(
                f'Keep: mode must be "min" or "max": {self.mode!r}\n'
                'hint: Keep(best=2, metric="loss", mode="min")'
            )

    def kept(self, steps: Iterable[KeptStep]) -> set[int]:
        """Of these committed steps, the numbers of those to keep."""
        ordered = sorted(steps, key=lambda s: s.step)
        if self.keeps_all:
            return {s.step for s in ordered}
        kept = {s.step for s in ordered if s.protected}
        kept |= {s.step for s in ordered[-(self.last or 1) :]}
        if self.every_steps is not None:
            kept |= {s.step for s in ordered if s.step % self.every_steps == 0}
        if self.every_hours is not None:
            kept |= _spaced(ordered, 3600 * self.every_hours)
        if self.best is not None:
            kept |= {s.step for s in self.ranked(ordered)[: self.best]}
        return kept

    def thinned(self, steps: Iterable[KeptStep]) -> set[int]:
        """Of these committed steps, the numbers of those to keep a part of."""
        if self.thin_to is None:
            return set()
        ordered = sorted(steps, key=lambda s: s.step)
        whole = {s.step for s in ordered[-(self.full_last or 2) :]}
        whole |= {s.step for s in ordered if s.protected}
        return self.kept(ordered) - whole

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return (self.last, self.every_steps, self.every_hours, self.best) == (None,) * 4

    @property
    def looks_inside(self) -> bool:
        """Whether a rule needs times or metrics, which the manifests hold."""
        return self.every_hours is not None or self.best is not None

    def ranked(self, steps: Iterable[KeptStep]) -> list[KeptStep]:
        """The steps that have the metric, the best first; of equal ones the newest."""
        values = ((s.metrics.get(str(self.metric), math.nan), s) for s in steps)
        known = [(value, s) for value, s in values if not math.isnan(value)]
        sign = 1 if self.mode == "min" else -1
        return [s for _, s in sorted(known, key=lambda pair: (sign * pair[0], -pair[1].step))]


def _spaced(ordered: list[KeptStep], gap_s: float) -> set[int]:
    """From the oldest on, each that is at least so much younger than the one before."""
    kept: set[int] = set()
    after = -math.inf
    for one in ordered:
        if one.saved_s >= after:
            kept.add(one.step)
            after = one.saved_s + gap_s
    return kept
