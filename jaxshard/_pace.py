"""How long training takes for a step, and what saves cost it. Pure: it is told the time."""

from collections import deque

_QUIET = 101  # steps without a save beside them that are remembered


class Pace:
    """The steps of a training loop, some of them beside a save.

    Example:
      >>> pace = Pace()
      >>> for clock in (0.0, 1.0, 2.0, 3.0):
      ...     pace.step_ended(clock, beside_save=False)
      ...     pace.step_begins(clock)
      >>> pace.save_began(blocked_s=0.5)
      >>> pace.step_begins(3.5)
      >>> pace.step_ended(5.5, beside_save=True)
      >>> pace.save_cost_s()
      1.5
    """

    def __init__(self) -> None:
        self._began: float | None = None  # the step that goes on
        self._quiet: deque[float] = deque(maxlen=_QUIET)
        self._beside: list[float] = []
        self._blocked_s = 0.0

    def step_ended(self, clock_s: float, *, beside_save: bool) -> None:
        """A step is over; whether a save was going on when it began."""
        if self._began is not None:
            (self._beside if beside_save else self._quiet).append(clock_s - self._began)
        self._began = None

    def step_begins(self, clock_s: float) -> None:
        """The next one goes on."""
        self._began = clock_s

    def save_began(self, blocked_s: float) -> None:
        """A save was begun, for which training stood still."""
        self._beside.clear()
        self._blocked_s = blocked_s

    def save_cost_s(self) -> float:
        """What the last save cost: it blocked, and steps beside it were slower than others."""
        if not self._beside or not self._quiet:
            return self._blocked_s
        import statistics  # noqa: PLC0415  (5 ms, which no start has to wait for)

        usual_s = statistics.median(self._quiet)
        return self._blocked_s + max(0.0, sum(self._beside) - usual_s * len(self._beside))

    @property
    def step_s(self) -> float:
        """The longest of the last steps, in seconds; 0 before the first."""
        return max([*self._quiet, *self._beside], default=0.0)
