"""Do two loaders give the same batches? The first place where they do not."""

from typing import Any, NamedTuple

import numpy as np

from jaxshard.data import _batches
from jaxshard.data._loader import ElasticLoader

Array = np.ndarray[Any, Any]


class BatchDifference(NamedTuple):
    """The first batch that two loaders do not share.

    Attributes:
      step: batches before it.
      what: in which way it differs, in words.
      rows: its rows in both, from the first one that differs; empty where they are not known.
    """

    step: int
    what: str
    rows: tuple[list[Any], list[Any]]


class Compared(NamedTuple):
    """What was compared, and what came of it.

    Attributes:
      batches: how many are the same, from the first one that was looked at.
      difference: the next one, if that is not the same.
    """

    batches: int
    difference: BatchDifference | None


def compare(
    a: ElasticLoader, b: ElasticLoader, *, step: int, count: int, read: bool = True
) -> Compared:
    """Compare batches of two loaders: numbers of rows, and elements bit by bit.

    Args:
      a: one loader.
      b: another one, e.g. on another mesh; both must not be in use.
      step: the first batch.
      count: how many.
      read: whether elements are compared too; numbers of rows need no reading.
    """
    for at in range(step, step + count):
        ends = [_is_past_end(loader, at) for loader in (a, b)]
        if all(ends):
            return Compared(at - step, None)
        if any(ends):
            what = f"the {'first' if ends[0] else 'second'} loader ends here"
            return Compared(at - step, BatchDifference(at, what, ([], [])))
        found = _difference(a, b, at, read=read)
        if found is not None:
            return Compared(at - step, found)
    return Compared(count, None)


def _is_past_end(loader: ElasticLoader, step: int) -> bool:
    return loader.batches is not None and step >= loader.batches


def _difference(a: ElasticLoader, b: ElasticLoader, step: int, *, read: bool) -> Any:
    if not a.is_stream and not b.is_stream:
        mine, other = a.rows(step), b.rows(step)
        if mine.shape[0] != other.shape[0]:
            what = f"{len(mine)} rows in the first, {len(other)} in the second"
            return BatchDifference(step, what, (mine.tolist(), other.tolist()))
        if mine.shape != other.shape or (mine != other).any():
            first = _first_difference(mine, other)
            rows = (mine[first:].tolist(), other[first:].tolist())
            return BatchDifference(step, f"other rows from place {first} of the batch", rows)
    if not read:
        return None
    left, right = a.make(step), b.make(step)
    if left is None or right is None:
        if left is right:
            return None
        what = f"the {'first' if left is None else 'second'} loader ends here"
        return BatchDifference(step, what, ([], []))
    if batch_bits(left) != batch_bits(right):
        return BatchDifference(step, "the same rows, and other elements in them", ([], []))
    return None


def _first_difference(a: Array, b: Array) -> int:
    if a.ndim != b.ndim:
        return 0
    return int((a != b).reshape(len(a), -1).any(axis=1).argmax())


def batch_bits(batch: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each leaf of a batch."""
    found: list[tuple[str, tuple[int, ...], bytes]] = []

    def add(leaf: Any) -> None:
        array = np.asarray(leaf)
        found.append((array.dtype.name, array.shape, array.tobytes()))

    _batches.map_leaves(add, batch)
    return found
