"""Trainings that `test_exact_resume.py` lets other processes run; small, each with a trap."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

SIZE = 8


def data(step):
    """The batch of a step, from its number alone."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), step), (4, SIZE))


def plain(mesh=None):
    """Dropout keys, an EMA, schedules, accumulation over three steps, a frozen part."""
    labels = {"w": "train", "b": "train", "frozen": "freeze"}
    inner = optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 20)
    )
    optimizer = optax.MultiSteps(
        optax.multi_transform({"train": inner, "freeze": optax.set_to_zero()}, labels), 3
    )
    params = {"w": jnp.ones((SIZE, SIZE)), "b": jnp.zeros(SIZE), "frozen": jnp.ones(SIZE)}
    if mesh is not None:
        spec = jax.sharding.PartitionSpec("data")
        params = jax.device_put(params, jax.sharding.NamedSharding(mesh, spec))
    state = {
        "params": params,
        "ema": jax.tree.map(jnp.copy, params),
        "opt": optimizer.init(params),
        "key": jax.random.key(3),
        "steps": 0,
        "seen": np.zeros(2, np.int64),
    }

    @jax.jit
    def one(params, ema, opt, key, x):
        key, dropout = jax.random.split(key)
        keep = jax.random.bernoulli(dropout, 0.8, x.shape)

        def loss(p):
            return jnp.mean((jnp.where(keep, x, 0) @ p["w"] * p["frozen"] + p["b"]) ** 2)

        updates, opt = optimizer.update(jax.grad(loss)(params), opt, params)
        params = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)
        return params, ema, opt, key

    def update(state, step):
        names = ("params", "ema", "opt", "key")
        new = one(*(state[name] for name in names), data(step))
        return {**dict(zip(names, new, strict=True)), "steps": step, "seen": state["seen"] + step}

    return state, update


def nnx_module():
    """A Flax NNX module and optimizer, updated in place, with dropout."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(SIZE, SIZE, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.norm = nnx.BatchNorm(SIZE, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.dropout(self.linear(x)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def one(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)

    def update(state, step):
        one(state["model"], state["optimizer"], data(step))
        return state

    return {"model": model, "optimizer": optimizer}, update


def linen_train_state():
    """A Flax Linen model in a TrainState."""
    import flax.linen as nn
    from flax.training.train_state import TrainState

    model = nn.Dense(SIZE)
    params = model.init(jax.random.key(0), jnp.ones((1, SIZE)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def one(state, x):
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    return state, lambda state, step: one(state, data(step))


def equinox_module():
    """An Equinox module."""
    import equinox as eqx

    model = eqx.nn.MLP(SIZE, SIZE, 8, 1, key=jax.random.key(0))
    optimizer = optax.adam(1e-2)
    arrays = eqx.filter(model, eqx.is_array)

    @eqx.filter_jit
    def one(model, opt, x):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        updates, opt = optimizer.update(grads, opt)
        return eqx.apply_updates(model, updates), opt

    def update(state, step):
        model, opt = one(state["model"], state["opt"], data(step))
        return {"model": model, "opt": opt}

    return {"model": model, "opt": optimizer.init(arrays)}, update


def hidden_counter():
    """What the step depends on is not in the state."""
    calls = []

    def update(state, step):
        calls.append(step)
        return {"w": state["w"] + len(calls), "n": state["n"] + 1}

    return {"w": jnp.zeros(3), "n": 0}, update


def by_chance():
    """No two runs are the same."""

    def update(state, step):
        return {
            "w": state["w"] + int.from_bytes(os.urandom(2)),
            "steady": jnp.full(2, step, jnp.int32),
        }

    return {"w": jnp.zeros(()), "steady": jnp.zeros(2, jnp.int32)}, update


def breaks():
    """The process dies of something else."""

    def update(state, step):
        if step == 3:
            raise ZeroDivisionError("of its own")
        return state

    return {"w": jnp.zeros(3)}, update
