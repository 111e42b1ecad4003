"""How many rows each batch has: one number, or a schedule of them."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

_WHERE = "jaxshard.data.ElasticLoader"


class Schedule:
    """Sizes of batches.

    Args:
      sizes: a number of rows; or `[(from_step, rows), ...]`, rising, the first from step 0.

    Raises:
      TypeError: neither.
      ValueError: sizes are not positive, or steps do not rise from 0.
    """

    def __init__(self, sizes: Any) -> None:
        pairs = [(0, int(sizes))] if _is_int(sizes) else _pairs(sizes)
        steps = [step for step, _ in pairs]
        if steps[:1] != [0] or steps != sorted(set(steps)) or min(rows for _, rows in pairs) < 1:
            raise ValueError(
                f"{_WHERE}: global_batch={sizes!r}: expected sizes of 1 or more, from steps that "
                "rise from 0\nhint: global_batch=[(0, 256), (10_000, 512)]"
            )
        self.pairs = pairs
        self._steps = steps
        self._offsets = [0]  # rows before each part
        for (begin, rows), (end, _) in itertools.pairwise(pairs):
            self._offsets.append(self._offsets[-1] + (end - begin) * rows)

    def size(self, step: int) -> int:
        """Rows of the batch after `step` batches."""
        return self.pairs[bisect.bisect_right(self._steps, step) - 1][1]

    def offset(self, step: int) -> int:
        """Rows of the first `step` batches."""
        part = bisect.bisect_right(self._steps, step) - 1
        begin, rows = self.pairs[part]
        return self._offsets[part] + (step - begin) * rows

    def batches(self, total: int, *, keep_last: bool) -> int:
        """How many batches so many rows make; a shorter one at the end counts if it is kept."""
        part = bisect.bisect_right(self._offsets, total) - 1
        begin, rows = self.pairs[part]
        left = total - self._offsets[part]
        return begin + (-(-left // rows) if keep_last else left // rows)

    def before(self, step: int) -> list[list[int]]:
        """What was in force for the first `step` batches."""
        merged: list[list[int]] = []
        for begin, rows in self.pairs:
            if begin < step and (not merged or merged[-1][1] != rows):
                merged.append([begin, rows])
        return merged


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _pairs(sizes: Any) -> list[tuple[int, int]]:
    if isinstance(sizes, Sequence) and not isinstance(sizes, str) and sizes:
        pairs = [tuple(p) for p in sizes if isinstance(p, Sequence)]
        if len(pairs) == len(sizes) and all(len(p) == 2 and all(map(_is_int, p)) for p in pairs):
            return [(int(step), int(rows)) for step, rows in pairs]
    raise TypeError(
        f"{_WHERE}: expected global_batch to be a number of rows, or [(from_step, rows), ...], "
        f"found {sizes!r}\nhint: global_batch=256"
    )
