"""Train a small Transformer on the source code of Python, and survive anything.

A byte-level language model in Flax NNX, Optax AdamW, a mesh of simulated CPU devices, and
`jaxshard.ResumeManager` around the loop. Kill it whenever you like and start the same command
again: it continues as if nothing had happened. On the same mesh every later loss has the same
bits; on another mesh the restored state has the same bits and the batches hold the same rows.

    python examples/train_lm.py --run runs/lm                 # 8 devices: 2-way data, 4-way model
    python examples/train_lm.py --run runs/lm --mesh 4x2      # later, on another mesh
    python examples/train_lm.py --run runs/lm --mesh 2x1 --check-restored
"""

import argparse
import functools
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any


def parse_args() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", required=True, help="run directory: holds the checkpoints")
    parser.add_argument("--mesh", default="2x4", help="devices along data x model (default: 2x4)")
    parser.add_argument("--steps", type=int, default=100, help="updates in total (default: 100)")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--log", type=Path, help="append one JSON line per step to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--check-restored",
        action="store_true",
        help="after resume, compare every leaf with the checkpoint bit for bit",
    )
    return parser.parse_args()


ARGS = parse_args()
DATA_AXIS, MODEL_AXIS = (int(size) for size in ARGS.mesh.split("x"))

# XLA reads the number of simulated devices once, when JAX starts: it has to be set before import.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')}"
    f" --xla_force_host_platform_device_count={DATA_AXIS * MODEL_AXIS}"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxshard

VOCAB, SEQ, BATCH = 256, 64, 24
DIM, HEADS, LAYERS, DROPOUT = 128, 4, 4, 0.1


# ---- 1. The model: large kernels are split over the mesh axis "model", the rest is replicated ----


def linear(
    n_in: int, n_out: int, split: tuple[str | None, str | None], rngs: nnx.Rngs
) -> nnx.Linear:
    """A layer without bias whose kernel says how it is split over the mesh."""
    metadata = {"out_sharding": split}
    return nnx.Linear(n_in, n_out, use_bias=False, kernel_metadata=metadata, rngs=rngs)


class Block(nnx.Module):
    """Causal attention and a GELU MLP, each behind a norm and followed by dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        columns, rows = (None, "model"), ("model", None)
        self.norm_attn = nnx.LayerNorm(DIM, rngs=rngs)
        self.query = linear(DIM, DIM, columns, rngs)
        self.key = linear(DIM, DIM, columns, rngs)
        self.value = linear(DIM, DIM, columns, rngs)
        self.out = linear(DIM, DIM, rows, rngs)
        self.norm_mlp = nnx.LayerNorm(DIM, rngs=rngs)
        self.up = linear(DIM, 4 * DIM, columns, rngs)
        self.down = linear(4 * DIM, DIM, rows, rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, seq, DIM]` to the same."""
        x = x + self.dropout(self.out(self.attend(self.norm_attn(x))))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_mlp(x)))))

    def attend(self, x: jax.Array) -> jax.Array:
        """Causal self-attention; the heads are split over the mesh axis "model"."""
        heads = (*x.shape[:2], HEADS, DIM // HEADS)
        q, k, v = (layer(x).reshape(heads) for layer in (self.query, self.key, self.value))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)


class ByteLM(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.position = nnx.Embed(SEQ, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.logits = linear(DIM, VOCAB, (None, "model"), rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[batch, seq]` to `[batch, seq, VOCAB]`."""
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def build(mesh: Mesh, steps: int, seed: int) -> tuple[ByteLM, nnx.Optimizer[ByteLM]]:
    """A fresh model and optimizer, each array of theirs placed on the mesh."""
    model = ByteLM(nnx.Rngs(params=seed, dropout=seed + 1))
    schedule = optax.warmup_cosine_decay_schedule(3e-4, 3e-3, steps // 10, steps, 1e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for node in (model, optimizer):
        # Step counters and dropout keys too: a later resume puts each leaf where it is now.
        state = nnx.state(node)
        nnx.update(node, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    return model, optimizer


@nnx.jit
def train_step(model: ByteLM, optimizer: nnx.Optimizer[ByteLM], rows: jax.Array) -> jax.Array:
    """One update, in place; returns the loss."""

    def loss_of(model: ByteLM) -> jax.Array:
        logits = model(rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


# ---- 2. The data: real text, and a position that is two integers ---------------------------------


def read_text(bytes_max: int = 4_000_000) -> np.ndarray:
    """The top-level modules of Python's standard library, in a fixed order, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files)[:bytes_max], np.uint8)


def next_row_ids(data: dict[str, int], n_text: int) -> np.ndarray:
    """Where the rows of the next batch start in the text: a pure function of the position.

    Neither the mesh nor the history of the process matters, so the position is all there is to
    save: no iterator to replay, no shuffle buffer to lose.
    """
    philox = np.random.Philox(key=[data["seed"], data["rows_seen"]])
    return np.random.Generator(philox).integers(0, n_text - SEQ, size=BATCH)


def gather_rows(text: np.ndarray, row_ids: np.ndarray, mesh: Mesh) -> jax.Array:
    """The rows `[BATCH, SEQ + 1]`, split over the mesh axis "data"."""
    rows = text[row_ids[:, None] + np.arange(SEQ + 1)].astype(np.int32)
    return jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))


# ---- 3. The proof (optional): what was restored against what is on disk --------------------------


def leaves_by_name(tree: object) -> dict[str, np.ndarray]:
    """Every leaf as a NumPy array under its path; a PRNG key by its words."""

    def to_numpy(leaf: Any) -> np.ndarray:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {keystr(path): to_numpy(leaf) for path, leaf in leaves}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Stricter than ==: NaN equals itself, -0.0 is not 0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_restored(state: dict[str, object], step_dir: Path) -> int:
    """Compare each leaf of the resumed state with the checkpoint; returns how many there are."""
    pure = {k: nnx.to_pure_dict(nnx.state(v)) if k != "data" else v for k, v in state.items()}
    restored, saved = leaves_by_name(pure), leaves_by_name(jaxshard.load(step_dir))
    differing = sorted(restored.keys() ^ saved.keys()) or [
        name for name in saved if not same_bits(restored[name], saved[name])
    ]
    if differing:
        sys.exit(f"{step_dir}: {len(differing)} leaves differ from the saved ones: {differing[:5]}")
    return len(saved)


# ---- 4. The loop ---------------------------------------------------------------------------------


def log_line(record: dict[str, object]) -> None:
    """Print a short form, append the whole to the log."""
    print(" ".join(f"{k}={v}" for k, v in record.items() if k in ("step", "loss", "resumed_from")))
    if ARGS.log:
        with ARGS.log.open("a") as f:
            f.write(json.dumps(record) + "\n")


def main() -> None:
    """Train up to `--steps`, from wherever the run directory says."""
    mesh = jax.make_mesh((DATA_AXIS, MODEL_AXIS), ("data", "model"), (AxisType.Auto,) * 2)
    jax.set_mesh(mesh)
    text = read_text()
    model, optimizer = build(mesh, ARGS.steps, ARGS.seed)
    like = {"model": model, "opt": optimizer, "data": {"seed": ARGS.seed, "rows_seen": 0}}

    every, keep = jaxshard.Every(steps=ARGS.save_every), jaxshard.Keep(last=3)
    with jaxshard.ResumeManager(ARGS.run, when=every, keep=keep) as run:
        state, resumed_from = run.resume(like)  # step 0 on a fresh run
        record: dict[str, object] = {"resumed_from": resumed_from}
        if ARGS.check_restored and resumed_from:
            step_dir = Path(ARGS.run) / f"step_{resumed_from:08d}"
            record["leaves_identical"] = check_restored(state, step_dir)
        log_line(record)

        data = state["data"]
        for step in run.steps(ARGS.steps):
            row_ids = next_row_ids(data, len(text))
            loss = float(train_step(model, optimizer, gather_rows(text, row_ids, mesh)))
            data["rows_seen"] += BATCH
            run.maybe_save(step, state, metrics={"loss": loss})  # writes while training goes on
            exact = {"loss_hex": loss.hex(), "rows": row_ids.tolist()}
            log_line({"step": step, "loss": loss} | exact)
    sys.exit(run.exit_code)  # 75 if it was asked to stop: start it again


if __name__ == "__main__":
    main()
