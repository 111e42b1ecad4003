"""A keyed permutation of the numbers below n that needs no memory: position -> row.

A Feistel network over the bits of n, walked until it lands below n (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002). Integer arithmetic alone, so that the order of rows is the
same on every machine and with every version of NumPy.
"""

import functools
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_ROUNDS = 8
# Over a few bits a Feistel network shows structure; so short a list is sorted by hashes instead.
_SORTED_MAX = 4096
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(x: Array) -> Array:
    """64 bits to 64 bits, one to one: the finalizer of SplitMix64 (Steele et al., 2014)."""
    x = (x ^ (x >> _S30)) * _C1
    x = (x ^ (x >> _S27)) * _C2
    mixed: Array = x ^ (x >> _S31)
    return mixed


def derive_key(*parts: int) -> int:
    """One key of 64 bits from several numbers."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        low, high = part & 0xFFFFFFFFFFFFFFFF, part >> 64 & 0xFFFFFFFFFFFFFFFF
        for word in (low, high):
            key = mix(key + _GOLDEN + np.uint64(word))
    return int(key[0])


class Permutation:
    """A permutation of `range(n)`, another one for each key.

    Args:
      n: how many numbers, below 2^62.
      key: any integer.

    Example:
      >>> import numpy as np
      >>> sorted(Permutation(5, key=7)(np.arange(5)).tolist())
      [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self._sorted = _by_hash(n, key) if n <= _SORTED_MAX else None
        bits = max(2, (n - 1).bit_length())
        self._right_bits = np.uint64(bits // 2)
        self._right_mask = np.uint64((1 << bits // 2) - 1)
        self._left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [np.uint64(derive_key(key, r)) for r in range(_ROUNDS)]

    def __call__(self, positions: Array) -> Array:
        """Rows (int64) at positions (int64, in `[0, n)`), of the same shape."""
        if self._sorted is not None:
            return self._sorted[positions]
        rows = self._once(positions.astype(np.uint64))
        n = np.uint64(self.n)
        while len(outside := np.flatnonzero(rows >= n)):
            rows[outside] = self._once(rows[outside])
        return rows.astype(np.int64)

    def _once(self, x: Array) -> Array:
        left, right = x >> self._right_bits, x & self._right_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                right = right ^ (mix(left + key) & self._right_mask)
            else:
                left = left ^ (mix(right + key) & self._left_mask)
        return left << self._right_bits | right


@functools.lru_cache(maxsize=64)
def _by_hash(n: int, key: int) -> Array:
    hashes = mix(np.arange(n, dtype=np.uint64) + np.uint64(derive_key(key)))
    return np.argsort(hashes, kind="stable").astype(np.int64)
