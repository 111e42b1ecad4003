"""The doors of one checkpoint: `save`, `save_async`, `load`."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxshard import _arrays, _loading, _placement, _saving, _snapshot, _writing
from jaxshard._epochs import Epoch
from jaxshard._errors import size_text
from jaxshard._options import LoadOptions, SaveOptions
from jaxshard._pending import PendingSave, log_saved, raise_background_errors
from jaxshard._reader import open_checkpoint
from jaxshard._reuse import Sharing
from jaxshard._saving import SaveJob, SaveReport
from jaxshard._snapshot import Budget
from jaxshard._store import PathLike, Store, open_store

logger = logging.getLogger("jaxshard")

_COPIES_SMALL = 16 << 20  # copied sooner than it pays to write at the same time


def save(
    path: PathLike,
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions = SaveOptions(),
) -> SaveReport:
    """Save any training state as one checkpoint, and return when it is durable.

    When this returns, the checkpoint is committed and survives a power cut (on file systems that
    honour fsync). When it raises, there is no checkpoint at `path`, or the earlier one, whole.

    Args:
      path: directory to make; `~` and relative paths are fine; `memory://name` stays in memory.
      tree: any pytree: jax.Arrays of any sharding, PRNG keys, NumPy arrays and scalars, Python
        numbers, strings, bytes and None, in dicts, lists, tuples, named tuples, Flax NNX objects,
        Optax states, Equinox modules, registered dataclasses. Functions are recorded, not stored.
      metadata: a JSON object to keep with it.
      overwrite: replace a checkpoint at `path`. The new one appears at once in the place of the
        old one, which is deleted after that.
      options: see `SaveOptions`.

    Returns:
      What was written and how long it took.

    Raises:
      UnsupportedLeafError: the tree holds what cannot be stored (all of it is named); nothing was
        written.
      ConflictError: something is at `path`; nothing was changed.
      StorageError: disk full, permission denied, a time-out; nothing was committed.
      DisagreementError: more than one process.

    Example:
      >>> import jax.numpy as jnp, jaxshard
      >>> report = jaxshard.save("memory://doc/save", {"w": jnp.ones((2, 3)), "step": 7})
      >>> jaxshard.load("memory://doc/save")["step"]
      7
    """
    raise_background_errors()
    return save_step(open_store(path), tree, None, metadata, options, overwrite=overwrite)


def save_step(
    store: Store,
    tree: Any,
    step: int | None,
    metadata: Mapping[str, Any] | None,
    options: SaveOptions,
    *,
    overwrite: bool = False,
) -> SaveReport:
    """`save` into an open store, with a step."""
    with _arrays.transfers_allowed():
        job = _saving.prepare(
            store, tree, metadata=metadata, overwrite=overwrite, options=options, step=step
        )
        reused = _writing.write(job, _snapshot.stage(job.plan, job.tree.leaves, job.values))
    report = _saving.report(job, reused)
    log_saved(report)
    return report


def save_async(
    path: PathLike,
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions = SaveOptions(),
) -> PendingSave:
    """Like `save`, but return as soon as the values are safe from the next training step.

    The arrays may be donated, deleted or (NumPy) changed right after the call. The checkpoint
    exists when `PendingSave.wait` has returned, not before. An error of the background is raised
    once: by `wait`, or else by the next `save`, `save_async` or `load`.

    Args:
      path: as for `save`.
      tree: as for `save`.
      metadata: as for `save`.
      overwrite: as for `save`.
      options: `snapshot` says how values are kept, `host_bytes_max` how much host memory copies
        may take; beyond it the call waits for what was written.

    Returns:
      The save in progress.

    Raises:
      UnsupportedLeafError: as for `save`; at once.
      ConflictError: as for `save`; at once.
      DisagreementError: as for `save`; at once.
      JaxshardError: an earlier save in the background failed and nobody was told yet.

    Example:
      >>> import jax.numpy as jnp, jaxshard
      >>> pending = jaxshard.save_async("memory://doc/async", {"w": jnp.ones(3)})
      >>> pending.wait().files
      1
    """
    raise_background_errors()
    return save_step_async(open_store(path), tree, None, metadata, options, overwrite=overwrite)


def save_step_async(
    store: Store,
    tree: Any,
    step: int | None,
    metadata: Mapping[str, Any] | None,
    options: SaveOptions,
    *,
    overwrite: bool = False,
    then: Callable[[SaveJob], None] | None = None,
    owned: bool = False,
    epoch: Epoch | None = None,
    sharing: Sharing | None = None,
) -> PendingSave:
    """`save_async` into an open store, with a step; `then` runs behind it, after the commit.

    With `epoch` nothing is committed once a later one has begun.

    With `owned` its error is not raised by later saves and loads: somebody else looks after it.
    """
    job = _saving.prepare(
        store,
        tree,
        metadata=metadata,
        overwrite=overwrite,
        options=options,
        step=step,
        epoch=epoch,
        sharing=sharing,
    )
    unchanged = () if job.reuse is None else job.reuse.unchanged
    copy_all = options.snapshot == "copy"
    copied = _snapshot.copied_bytes(
        job.tree.leaves, job.values, copy_all=copy_all, unchanged=unchanged
    )
    budget_bytes = _copy_budget(options, copied)
    budget = Budget(budget_bytes)
    staged = _snapshot.stage(
        job.plan,
        job.tree.leaves,
        job.values,
        budget=budget,
        copy_all=copy_all,
        unchanged=unchanged,
    )
    # The writer gets no values but the staged ones, so that each is freed as it is written.
    pending = PendingSave(dataclasses.replace(job, values=()), budget, then, owned=owned)
    with _arrays.transfers_allowed():
        pending.fill(staged, write_meanwhile=copied > min(budget_bytes, _COPIES_SMALL))
    return pending


def _copy_budget(options: SaveOptions, copied: int) -> int:
    if options.host_bytes_max is not None:
        return max(1, options.host_bytes_max // 2)  # the other half is for what is in flight
    return max(1, min(copied, _snapshot.free_host_bytes() // 2))


def load(
    path: PathLike,
    like: Any = None,
    *,
    mesh: Any = None,
    rules: Any = None,
    select: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    fill_missing: bool = False,
    options: LoadOptions = LoadOptions(),
) -> Any:
    """Load a checkpoint, bit for bit, onto any mesh.

    With `like` the result has its structure, node types, containers (JAX or NumPy) and placement,
    and anything that differs is an error that lists every difference. Without `like` it is made of
    dicts, lists, tuples and named tuples, with NumPy arrays unless `mesh` or `rules` place them.

    A leaf goes to the concrete sharding that it has in `like`; else to its spec there on `mesh` or
    the current mesh (`jax.set_mesh`); else to the spec of the first rule that matches; else, if
    there is a mesh, to the spec that it was saved with (replicated if it had none); else to the
    default device.

    Args:
      path: a committed checkpoint.
      like: tree of arrays, `jax.ShapeDtypeStruct`s, modules or values to load onto. NNX objects
        in it are not changed, new ones are returned.
      mesh: `jax.sharding.Mesh` to place leaves on that `like` does not place.
      rules: `[(pattern, PartitionSpec)]`; the first match wins.
      select: patterns of names, after renaming; only these leaves are read. Others keep the
        value of `like`, or are absent.
      rename: `{saved: wanted}` patterns; `*` and `**` carry over what they matched.
      cast: convert dtypes to those of `like`: float to float rounds; to or from integers only if
        every value is representable; never from or to bool.
      fill_missing: keep the value of `like` for leaves that the checkpoint lacks.
      options: see `LoadOptions`.

    Returns:
      The tree.

    Raises:
      LeafMismatchError: names, shapes, dtypes, weak types, kinds, key implementations, containers
        or placements differ from what is asked for; no data was read.
      NotFoundError: nothing is at `path`, or a run (the hint names its newest step).
      NotCommittedError: a save was begun there and never committed.
      CorruptionError: bytes are missing, cut, changed or in the wrong place.
      CheckpointReplacedError: a writer replaced it while it was read.
      FormatError: written by a newer version, or hostile.
      StorageError: the store failed, or `timeout_s` passed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxshard
      >>> _ = jaxshard.save("memory://doc/load", {"params": {"w": jnp.arange(4.0)}, "step": 3})
      >>> like = {"params": {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}, "step": 0}
      >>> jaxshard.load("memory://doc/load", like)["params"]["w"]
      Array([0., 1., 2., 3.], dtype=float32)
      >>> jaxshard.load("memory://doc/load", select="params/**")
      {'params': {'w': array([0., 1., 2., 3.], dtype=float32)}}
    """
    raise_background_errors()
    _saving.require_one_process()
    _placement.require_placement(mesh, rules)
    request = _loading.LoadArguments(
        mesh=mesh,
        rules=rules,
        select=select,
        rename=rename,
        cast=cast,
        fill_missing=fill_missing,
        options=options,
    )
    tree, report = _loading.load_tree(open_checkpoint(path), like, request)
    log_loaded(report)
    if options.on_report is not None:
        options.on_report(report)
    return tree


def log_loaded(report: Any) -> None:
    """One line per load; a second one if it read much more than it needed."""
    logger.info(
        "loaded %s: %s in %.2f s (%.2f GB/s)",
        report.path,
        size_text(report.bytes_needed),
        report.seconds,
        report.bytes_needed / max(report.seconds, 1e-9) / 1e9,
    )
    if report.bytes_read > 1.1 * report.bytes_needed + (1 << 20):
        logger.info(
            "loading %s read %.1f times the bytes it needed: shards and tiles do not meet",
            report.path,
            report.bytes_read / report.bytes_needed,
        )
