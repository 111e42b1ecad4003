"""PRNG keys of rows, on the host: threefry 2x32 in NumPy, the same bits as `jax.random`.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; JAX's
`threefry2x32` and `fold_in`, with which tests compare it.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def row_keys(seed: int, positions: Array) -> Array:
    """A key for each position of the stream.

    Args:
      seed: of the loader, in 64 bits.
      positions: int64 `[n]`.

    Returns:
      uint32 `[n, 2]`: the words of `fold_in(fold_in(key(seed), position >> 32), position % 2**32)`.
    """
    positions = positions.astype(np.uint64)
    seed %= 1 << 64
    key = (np.uint32(seed >> 32), np.uint32(seed & 0xFFFFFFFF))
    high = (positions >> np.uint64(32)).astype(np.uint32)
    low = (positions & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    zeros = np.zeros_like(low)
    first = _threefry(np.full_like(low, key[0]), np.full_like(low, key[1]), zeros, high)
    return np.stack(_threefry(*first, zeros, low), axis=-1)


def _threefry(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation) | x1 >> np.uint32(32 - rotation)) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
