"""GPT-2 in Flax NNX, layer by layer (not scanned), and a real training job around it.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks._states import Size


class Block(nnx.Module):
    """Attention and MLP, each behind a layer norm."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        width = size.width
        self.heads = size.heads
        self.ln_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.Linear(width, 3 * width, rngs=rngs)
        self.attn_proj = nnx.Linear(width, width, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(width, rngs=rngs)
        self.fc = nnx.Linear(width, 4 * width, rngs=rngs)
        self.fc_proj = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[rows, length, width]` to the same."""
        parts = jnp.split(self.attn(self.ln_1(x)), 3, axis=-1)
        q, k, v = (p.reshape(*p.shape[:2], self.heads, -1) for p in parts)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(attended.reshape(x.shape))
        return x + self.fc_proj(jax.nn.gelu(self.fc(self.ln_2(x))))


class GPT2(nnx.Module):
    """Tokens to logits; the output matrix is the embedding."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.wte = nnx.Embed(size.vocabulary, size.width, rngs=rngs)
        self.wpe = nnx.Embed(size.context, size.width, rngs=rngs)
        self.h = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.ln_f = nnx.LayerNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[rows, length]` to `[rows, length, vocabulary]`."""
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


class Job:
    """One training job: its state is `{"params": ..., "opt": ...}`, plain dicts and Optax states.

    Args:
      size: of the model and its batches.
      mesh: with the axes `data` and `model`; matrices lie on both where they divide.
    """

    def __init__(self, size: Size, mesh: jax.sharding.Mesh) -> None:
        self._size = size
        self._optimizer = optax.adamw(1e-3)
        shapes = jax.eval_shape(self._first)
        self._shardings = jax.tree.map(functools.partial(_fsdp, mesh), shapes)
        self.abstract = jax.tree.map(_abstract, shapes, self._shardings)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        shape = (size.rows, size.length + 1)
        tokens = np.random.default_rng(0).integers(0, size.vocabulary, shape, np.int32)
        self.tokens = jax.device_put(tokens, rows)
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self._shardings, None))

    def make(self) -> Any:
        """The state after one made-up update, so that no moment is zero."""
        return jax.block_until_ready(jax.jit(self._first, out_shardings=self._shardings)())

    def _first(self) -> Any:
        model = GPT2(self._size, nnx.Rngs(0))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        grads = jax.tree.map(lambda p: p * 0.01 + 1e-4, params)
        _, opt = self._optimizer.update(grads, self._optimizer.init(params), params)
        return {"params": params, "opt": opt}

    def _step(self, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        """The next state, and the loss."""
        params = state["params"]
        loss, grads = jax.value_and_grad(self._loss)(params, tokens)
        updates, opt = self._optimizer.update(grads, state["opt"], params)
        return {"params": optax.apply_updates(params, updates), "opt": opt}, loss

    def _loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.eval_shape(lambda: GPT2(self._size, nnx.Rngs(0)))
        nnx.update(model, params)
        logits = model(tokens[:, :-1])
        loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()
        return loss


def _fsdp(mesh: jax.sharding.Mesh, leaf: Any) -> jax.sharding.NamedSharding:
    """Matrices on both axes of the mesh where they divide, vectors on one."""
    data, model = mesh.axis_names
    spec: list[Any] = [None] * leaf.ndim
    if leaf.ndim and leaf.shape[-1] % mesh.shape[model] == 0:
        spec[-1] = model
    if leaf.ndim > 1 and leaf.shape[0] % mesh.shape[data] == 0:
        spec[0] = data
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def _abstract(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
