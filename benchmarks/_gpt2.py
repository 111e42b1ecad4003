"""GPT-2 of 124M parameters in Flax NNX, layer by layer (not scanned), for the state *mixed*.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
"""

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 50_257, 1_024, 768, 12, 12


class Block(nnx.Module):
    """Attention and MLP, each behind a layer norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.ln_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.attn_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.fc = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.fc_proj = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, length, WIDTH]` to the same."""
        parts = jnp.split(self.attn(self.ln_1(x)), 3, axis=-1)
        q, k, v = (p.reshape(*p.shape[:2], HEADS, WIDTH // HEADS) for p in parts)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(attended.reshape(x.shape))
        return x + self.fc_proj(jax.nn.gelu(self.fc(self.ln_2(x))))


class GPT2(nnx.Module):
    """Tokens to logits; the output matrix is the embedding."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wte = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.wpe = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.h = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.ln_f = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[batch, length]` to `[batch, length, VOCABULARY]`."""
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))
