"""Rows -> arrays with a leading axis: dicts, lists and tuples are kept, everything else stacked."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def map_leaves(call: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply a function to values of one place of trees of dicts, lists and tuples.

    Raises:
      ValueError: one tree has what another one has not.
    """
    if isinstance(first, Mapping):
        for other in others:
            if not isinstance(other, Mapping) or other.keys() != first.keys():
                raise ValueError(f"expected keys {list(first)}, found {_keys(other)}")
        return {key: map_leaves(call, *(tree[key] for tree in (first, *others))) for key in first}
    if isinstance(first, tuple | list) and not _is_numbers(first):
        for other in others:
            if not isinstance(other, tuple | list) or len(other) != len(first):
                raise ValueError(f"expected {len(first)} parts, found {_keys(other)}")
        parts = [map_leaves(call, *those) for those in zip(first, *others, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*parts)
        return type(first)(parts)
    return call(first, *others)


def _is_numbers(value: Sequence[Any]) -> bool:
    """A plain list of numbers is one row of an array, as Hugging Face datasets give it."""
    return type(value) is list and bool(value) and isinstance(value[0], (int, float, np.number))


def _keys(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(list(value))
    return f"{len(value)} parts" if isinstance(value, tuple | list) else type(value).__name__


def stack(rows: Sequence[Any]) -> Any:
    """One tree of arrays of several rows.

    Raises:
      ValueError: rows differ in their keys or shapes; says in what.
    """
    return map_leaves(_stack, *rows)


def _stack(*values: Any) -> Array:
    arrays = [np.asarray(value) for value in values]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        two = sorted(shapes)[:2]
        raise ValueError(
            f"rows have different shapes: {two[0]} and {two[1]}\nhint: pad or cut them in "
            "transform=, stack them yourself in batch_fn=, or pack=Pack(seq_len) for tokens"
        )
    return np.stack(arrays)


def concatenate(blocks: Sequence[Any]) -> Any:
    """One tree of the rows of several, along the leading axis."""
    return blocks[0] if len(blocks) == 1 else map_leaves(lambda *a: np.concatenate(a), *blocks)


def take(batch: Any, index: Any) -> Any:
    """Rows of a batch."""
    return map_leaves(lambda array: array[index], batch)
