"""Plain JAX comes back exactly: dropout keys, an average of the weights, accumulated gradients.

    python examples/exact/plain_jax.py

trains, kills itself with SIGKILL after some steps, comes back, on other meshes too, and compares
every bit with a training that was not killed. Gradients are accumulated over three steps, and every
fourth is saved, so that it comes back in the middle of an accumulation, too.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard.testing

WIDTH = 16


def batch(step):
    """The data of a step is a function of its number: nothing else has to be remembered."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), step), (8, WIDTH))


def make(mesh=None):
    """The initial state, and a function that makes one update of it."""
    optimizer = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=3)
    params = {"w": jnp.eye(WIDTH), "b": jnp.zeros(WIDTH)}
    if mesh is not None:
        params = jax.device_put(params, NamedSharding(mesh, P("data")))
    state = {
        "params": params,
        "average": jax.tree.map(jnp.copy, params),
        "opt": optimizer.init(params),
        "key": jax.random.key(0),
    }

    def loss(params, x, key):
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return jnp.mean((jnp.where(kept, x, 0) @ params["w"] + params["b"] - x) ** 2)

    @jax.jit
    def update(state, x):
        key, dropout = jax.random.split(state["key"])
        grads = jax.grad(loss)(state["params"], x, dropout)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, state["average"], params)
        return {"params": params, "average": average, "opt": opt, "key": key}

    return state, lambda state, step: update(state, batch(step))


if __name__ == "__main__":
    meshes = [{"data": 4}, {"data": 8}, {"data": 1}]
    proof = jaxshard.testing.assert_exact_resume(
        make, steps=20, kill_at=[5, 13], save_every=4, meshes=meshes
    )
    print(proof)
