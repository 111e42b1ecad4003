"""Equinox comes back exactly: a frozen model, and a small part of it that is trained.

    python examples/exact/equinox_lora.py

`multi_transform` trains the low-rank part alone. The files of what is frozen are written once and
shared by all steps: `jaxshard ls` says how much.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard.testing

WIDTH, RANK = 16, 2


class LoraLinear(eqx.Module):
    """A layer whose weight is frozen, and what is added to it."""

    frozen: jax.Array
    down: jax.Array
    up: jax.Array

    def __call__(self, x):
        return x @ self.frozen + x @ self.down @ self.up


def batch(step):
    """The data of a step is a function of its number: nothing else has to be remembered."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), step), (8, WIDTH))


def make(mesh=None):
    """The initial state, and a function that makes one update of it."""
    keys = jax.random.split(jax.random.key(0), 2)
    frozen = jax.random.normal(keys[0], (WIDTH, WIDTH))
    if mesh is not None:
        frozen = jax.device_put(frozen, NamedSharding(mesh, P("data")))
    model = LoraLinear(frozen, jax.random.normal(keys[1], (WIDTH, RANK)), jnp.zeros((RANK, WIDTH)))
    optimizer = optax.multi_transform(
        {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()},
        lambda _: LoraLinear("frozen", "trained", "trained"),
    )

    @eqx.filter_jit
    def train(model, opt, x):
        grads = eqx.filter_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        updates, opt = optimizer.update(grads, opt, model)
        return eqx.apply_updates(model, updates), opt

    def update(state, step):
        model, opt = train(state["model"], state["opt"], batch(step))
        return {"model": model, "opt": opt}

    return {"model": model, "opt": optimizer.init(model)}, update


if __name__ == "__main__":
    meshes = [{"data": 4}, {"data": 8}, {"data": 2}]
    print(jaxshard.testing.assert_exact_resume(make, steps=20, kill_at=[5, 13], meshes=meshes))
