"""Which row stands at which position of the stream: a pure function of (seed, epoch, position).

The stream goes on over the epochs without a gap: a batch may hold the last rows of one and the
first rows of the next. Positions are numbers of rows since the beginning.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxshard.data._mixture import Pattern
from jaxshard.data._permutation import Permutation, derive_key

Array = np.ndarray[Any, Any]


class Order:
    """The rows of one source, or of several that are mixed, in the order of the stream.

    Args:
      lengths: rows of each source.
      weights: of each source; whole numbers.
      seed: of the permutations.
      shuffle: whether rows are permuted, anew in each epoch.
      epochs: passes; None for no end.
      until: with several sources, whether the `"first_exhausted"` or `"all_exhausted"` ends it.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        until: str = "first_exhausted",
    ) -> None:
        self.lengths = tuple(lengths)
        self._pattern = Pattern(weights)
        self._seed = seed
        self._shuffle = shuffle
        self.total = None if epochs is None else self._end(epochs, until)
        # Two epochs of each source may meet in a batch.
        self._permutation = functools.lru_cache(maxsize=2 * len(lengths) + 2)(self._make)

    def _end(self, epochs: int, until: str) -> int:
        """How many rows there are in so many epochs."""
        rows = [epochs * length for length in self.lengths]
        if until == "first_exhausted":
            return min(self._pattern.position_of(s, n) for s, n in enumerate(rows))
        return max(self._pattern.position_of(s, n - 1) + 1 for s, n in enumerate(rows))

    def _make(self, source: int, epoch: int) -> Permutation:
        return Permutation(self.lengths[source], derive_key(self._seed, source, epoch))

    def at(self, positions: Array) -> tuple[Array, Array]:
        """Sources and rows (int64) at positions (int64, one axis)."""
        sources, numbers = self._pattern.at(positions)
        rows = np.empty_like(numbers)
        for source in np.unique(sources).tolist():
            mine = np.flatnonzero(sources == source)
            rows[mine] = self._rows_of(source, numbers[mine])
        return sources, rows

    def _rows_of(self, source: int, numbers: Array) -> Array:
        epochs, inside = np.divmod(numbers, self.lengths[source])
        if not self._shuffle:
            return inside
        rows = np.empty_like(inside)
        for epoch in np.unique(epochs).tolist():
            mine = np.flatnonzero(epochs == epoch)
            rows[mine] = self._permutation(source, epoch)(inside[mine])
        return rows

    def epochs_at(self, position: int) -> list[int]:
        """Full passes over each source that lie behind a position."""
        if len(self.lengths) == 1:
            return [position // self.lengths[0]]
        return [self._count(s, position) // n for s, n in enumerate(self.lengths)]

    def _count(self, source: int, position: int) -> int:
        """Rows of a source before a position."""
        low, high = 0, position
        while low < high:
            middle = (low + high) // 2
            if self._pattern.position_of(source, middle) < position:
                low = middle + 1
            else:
                high = middle
        return low
