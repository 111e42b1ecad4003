"""`Mixture`: several sources in fixed proportions, and which of them has the row at a position.

The proportions hold within one row at every prefix: the j-th row of a source of weight w has to
come in the window [floor((j-1)/w), ceil(j/w)), and of those that may come the one whose window ends
first is taken, which always finds a place for all (Baruah et al., "Proportionate progress",
Algorithmica 1996; for apportionment: Tijdeman, "The chairman assignment problem", 1980). With
weights as whole numbers the pattern repeats, so that one period of it serves every position.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Weight = int | float | Fraction

PERIOD_MAX = 100_000  # of rows until the pattern repeats: weights have five exact decimals


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """Several sources in fixed proportions, for `ElasticLoader`.

    At every moment each source has given its share of the rows, within one row. The order is a
    function of the position, so a mixture is sought in, saved and resumed like one source. Each
    source has a permutation and epochs of its own: a short one is read again, in another order,
    while a long one goes on.

    Args:
      parts: `(source, weight)` pairs; weights are positive and need not add up to 1. A float
        stands for the simple fraction that it means (0.1 is a tenth). They are used in the ratio of
        whole numbers that add up to 100,000 at most; see `weights`.
      stopping_strategy: where `epochs` of the loader is given, when to end: before the first source
        would have to be read once more (`"first_exhausted"`), or when every one has been read that
        often (`"all_exhausted"`). Names as in Hugging Face `interleave_datasets`.

    Attributes:
      sources: the sources.
      weights: whole numbers; of every `sum(weights)` rows each source gives as many.

    Raises:
      ValueError: no parts; a weight that is not positive and finite.

    Example:
      >>> from jaxshard.data import ElasticLoader, Mixture
      >>> mixture = Mixture([(range(100), 0.75), (range(1000, 1100), 0.25)])
      >>> mixture.weights
      (3, 1)
      >>> next(ElasticLoader(mixture, global_batch=4, shuffle=False)).tolist()
      [0, 1, 1000, 2]
    """

    sources: tuple[Any, ...]
    weights: tuple[int, ...]
    stopping_strategy: Literal["first_exhausted", "all_exhausted"]

    def __init__(
        self,
        parts: Sequence[tuple[Any, Weight]],
        *,
        stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
    ) -> None:
        if stopping_strategy not in {"first_exhausted", "all_exhausted"}:
            raise ValueError(
                f"Mixture: found stopping_strategy={stopping_strategy!r}\n"
                'hint: "first_exhausted" or "all_exhausted"'
            )
        pairs = [_pair(number, part) for number, part in enumerate(parts)]
        if not pairs:
            raise ValueError(
                "Mixture: expected (source, weight) pairs, found none\n"
                "hint: Mixture([(web, 0.8), (books, 0.2)])"
            )
        object.__setattr__(self, "sources", tuple(source for source, _ in pairs))
        object.__setattr__(self, "weights", _whole([weight for _, weight in pairs]))
        object.__setattr__(self, "stopping_strategy", stopping_strategy)


def _pair(number: int, part: Any) -> tuple[Any, Fraction]:
    try:
        source, weight = part
    except (TypeError, ValueError):
        raise ValueError(
            f"Mixture: part {number}: expected a pair (source, weight), found {part!r:.60}\n"
            "hint: Mixture([(web, 0.8), (books, 0.2)])"
        ) from None
    try:
        exact = weight if isinstance(weight, (int, Fraction)) else _fraction(float(weight))
    except (TypeError, ValueError, OverflowError):  # no number, NaN, infinite
        exact = Fraction(0)
    if isinstance(weight, bool) or exact <= 0:
        raise ValueError(
            f"Mixture: part {number}: expected a positive weight, found {weight!r}\n"
            "hint: leave out a source that is to give nothing"
        )
    return source, Fraction(exact)


def _fraction(weight: float) -> Fraction:
    """The simplest fraction near a float: 0.1 is a tenth, 1 / 3 a third."""
    exact = Fraction(weight)
    return exact.limit_denominator(1_000_000) or exact


def _whole(weights: list[Fraction]) -> tuple[int, ...]:
    """Weights as whole numbers without a common factor, `PERIOD_MAX` in all at most."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period > PERIOD_MAX:  # the nearest, by largest remainder
        ideal = [share * PERIOD_MAX for share in shares]
        whole = [max(1, math.floor(x)) for x in ideal]
        short = sorted(range(len(ideal)), key=lambda i: whole[i] - ideal[i])
        for i in short[: max(0, PERIOD_MAX - sum(whole))]:
            whole[i] += 1
    else:
        whole = [int(share * period) for share in shares]
    common = math.gcd(*whole)
    return tuple(x // common for x in whole)


class Pattern:
    """Which source has the row at a position, and which row of that source it is.

    Args:
      weights: whole numbers; their sum is the period.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = np.array(weights, np.int64)
        self.period = int(self._weights.sum())
        self._source = _one_period(weights)
        self._before = np.zeros(self.period, np.int64)  # rows of the same source before, in it
        self._places = []  # by source: where in the period its rows are
        for source in range(len(weights)):
            places = np.flatnonzero(self._source == source)
            self._before[places] = np.arange(len(places))
            self._places.append(places)

    def at(self, positions: Array) -> tuple[Array, Array]:
        """Source and number of the row in the stream of that source, by position."""
        periods, inside = np.divmod(positions, self.period)
        source = self._source[inside]
        return source, periods * self._weights[source] + self._before[inside]

    def position_of(self, source: int, number: int) -> int:
        """Where the row of that number of a source comes."""
        periods, inside = divmod(number, int(self._weights[source]))
        return periods * self.period + int(self._places[source][inside])


def _one_period(weights: Sequence[int]) -> Array:
    """The sources of one period, each as often as its weight says, evenly spread."""
    period = sum(weights)
    waiting = [(0, source, 0) for source in range(len(weights))]  # from, source, how many it had
    ready: list[tuple[int, int, int]] = []  # until, source, how many it had
    out = np.zeros(period, np.int64)
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, source, had = heapq.heappop(waiting)
            until = -(-(had + 1) * period // weights[source])
            heapq.heappush(ready, (until, source, had))
        _, source, had = heapq.heappop(ready)
        out[position] = source
        if had + 1 < weights[source]:
            begins = (had + 1) * period // weights[source]
            heapq.heappush(waiting, (begins, source, had + 1))
    return out
