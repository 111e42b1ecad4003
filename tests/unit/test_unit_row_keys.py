"""Keys of rows have the bits that JAX's own functions give."""

import jax
import numpy as np
import pytest

from jaxshard.data._keys import row_keys


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31 - 1])
def test_keys_are_those_of_fold_in(seed):
    positions = np.array([0, 1, 2, 1000, 2**31, 2**32 - 1, 2**32, 2**33 + 7, 2**40])
    for position, words in zip(positions.tolist(), row_keys(seed, positions), strict=True):
        key = jax.random.fold_in(jax.random.key(seed), position >> 32)
        key = jax.random.fold_in(key, position & 0xFFFFFFFF)
        assert np.array_equal(jax.random.key_data(key), words)


def test_every_position_has_a_key_of_its_own():
    keys = row_keys(3, np.arange(20_000))
    assert keys.dtype == np.uint32
    assert len(np.unique(keys, axis=0)) == 20_000
    assert not np.array_equal(row_keys(3, np.arange(4)), row_keys(4, np.arange(4)))
    assert row_keys(-1, np.arange(3)).shape == (3, 2)


def test_numpy_and_jax_both_take_one():
    words = row_keys(0, np.array([5]))[0]
    assert np.random.default_rng(words).random() != np.random.default_rng(words + 1).random()
    assert jax.random.uniform(jax.random.wrap_key_data(words)) == jax.random.uniform(words)
