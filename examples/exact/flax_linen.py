"""Flax Linen comes back exactly: a TrainState is the state; its functions are the program's.

    python examples/exact/flax_linen.py

The learning rate is part of the optimizer state (`inject_hyperparams`), and what a callback has
changed it to comes back too.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard.testing

WIDTH = 16


def batch(step):
    """The data of a step is a function of its number: nothing else has to be remembered."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), step), (8, WIDTH))


def make(mesh=None):
    """The initial state, and a function that makes one update of it."""
    model = nn.Dense(WIDTH)
    params = model.init(jax.random.key(0), batch(0))["params"]
    if mesh is not None:
        params = jax.device_put(params, NamedSharding(mesh, P("data")))
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    @jax.jit
    def train(state, x):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - x) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    def update(state, step):
        state = train(state, batch(step))
        if step == 6:  # somebody turns the knob
            rate = state.opt_state.hyperparams["learning_rate"]
            state.opt_state.hyperparams["learning_rate"] = rate / 2
        return state

    return state, update


if __name__ == "__main__":
    meshes = [{"data": 4}, {"data": 8}, {"data": 2}]
    print(jaxshard.testing.assert_exact_resume(make, steps=20, kill_at=[5, 13], meshes=meshes))
