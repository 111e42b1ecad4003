"""The leaves of a tree as digests of their bits, whatever devices they lie on."""

from typing import Any

import numpy as np
import xxhash

from jaxshard import _arrays, _trees
from jaxshard._errors import bullet_list
from jaxshard._spec import LeafSpec


def leaf_digests(tree: Any) -> dict[str, str]:
    """For each leaf of a tree what it is, and a digest of its bits; equal on every mesh."""
    flat = _trees.flatten(tree)
    flat.require_sound("compared")
    pairs = zip(flat.spec.leaves, flat.values, strict=True)
    return {leaf.name: f"{leaf.describe()} {_bits(leaf, value)}" for leaf, value in pairs}


def _bits(leaf: LeafSpec, value: Any) -> str:
    if not leaf.has_array:
        return repr(leaf.value)
    shards = _arrays.shards(leaf, value)
    parts = [shards.host(i) for i in range(len(shards.boxes))]
    whole = np.empty(leaf.array_shape or (), parts[0].dtype if parts else np.uint8)
    for box, part in zip(shards.boxes, parts, strict=True):
        whole[box.slices] = part
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(whole).data)


def assert_trees_bitwise_equal(found: Any, expected: Any) -> None:
    """Compare two trees: names, kinds, dtypes, shapes, weak types and every bit; not placement.

    Args:
      found: any pytree that can be saved.
      expected: another one.

    Raises:
      AssertionError: they differ; names every leaf that does.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxshard.testing import assert_trees_bitwise_equal
      >>> assert_trees_bitwise_equal({"w": jnp.zeros(3), "n": 1}, {"w": jnp.zeros(3), "n": 1})
    """
    mine, other = leaf_digests(found), leaf_digests(expected)
    lines = differences(mine, other)
    if lines:
        raise AssertionError(bullet_list(f"{len(lines)} leaves differ:", tuple(lines)))


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """A line for each leaf that differs."""
    lines = []
    for name in dict.fromkeys([*expected, *found]):
        if name not in found:
            lines.append(f"{name!r}: expected, found nothing")
        elif name not in expected:
            lines.append(f"{name!r}: found, expected nothing")
        elif found[name] != expected[name]:
            mine, other = found[name].rpartition(" "), expected[name].rpartition(" ")
            same = mine[0] == other[0]
            what = "other bits" if same else f"expected {other[0]}, found {mine[0]}"
            lines.append(f"{name!r}: {what}")
    return lines
