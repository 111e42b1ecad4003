"""Trainings that do not come back, or not exactly; other processes run them."""

import os

import jax.numpy as jnp


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
