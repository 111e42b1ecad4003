"""Flax NNX comes back exactly: the model and the optimizer themselves are in the state.

    python examples/exact/flax_nnx.py

Dropout has its keys and counters in the model, BatchNorm its averages: all of it is saved, and what
`resume` returns are the same objects, updated in place.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard.testing

WIDTH = 16


class Model(nnx.Module):
    """A layer, with all that changes while it is trained."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def batch(step):
    """The data of a step is a function of its number: nothing else has to be remembered."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), step), (8, WIDTH))


def make(mesh=None):
    """The initial state, and a function that makes one update of it."""
    model = Model(nnx.Rngs(0))
    if mesh is not None:
        sharding = NamedSharding(mesh, P(None, "data"))
        model.linear.kernel = nnx.Param(jax.device_put(model.linear.kernel[...], sharding))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        optimizer.update(model, grads)

    def update(state, step):
        train(state["model"], state["optimizer"], batch(step))
        return state

    return {"model": model, "optimizer": optimizer}, update


if __name__ == "__main__":
    meshes = [{"data": 4}, {"data": 8}, {"data": 2}]
    print(jaxshard.testing.assert_exact_resume(make, steps=20, kill_at=[5, 13], meshes=meshes))
