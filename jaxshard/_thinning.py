"""Keep a part of a committed step: a checkpoint of these leaves takes its place.

Files of pieces are linked as they are; what is packed is read, compared with its digests, and
packed again. The new manifest replaces the old one at once; whoever is reading is told.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxshard import _commit, _fetch, _plan
from jaxshard._assembly import Want
from jaxshard._boxes import Box
from jaxshard._epochs import Epoch
from jaxshard._errors import ConflictError, LeafMismatchError
from jaxshard._match import dead_patterns, selected
from jaxshard._options import SaveOptions
from jaxshard._plan import Stretch
from jaxshard._reader import open_checkpoint
from jaxshard._reuse import Reuse
from jaxshard._saving import SaveJob
from jaxshard._snapshot import Array, Staged
from jaxshard._source import Source
from jaxshard._spec import layout_of, part_of
from jaxshard._store import Store
from jaxshard._writing import write


def thin(
    store: Store, patterns: Sequence[str], epoch: Epoch, still_wanted: Callable[[], None]
) -> bool:
    """Let only the leaves that match stay of a checkpoint, and remove what that leaves over.

    Args:
      store: the checkpoint.
      patterns: of the leaves that stay.
      epoch: of this process.
      still_wanted: called right before the commit; may raise.

    Returns:
      Whether there was more.

    Raises:
      LeafMismatchError: nothing matches; nothing was changed.
      CorruptionError: what matches is damaged; nothing was changed.
      ConflictError: another job has taken over, or somebody was faster; nothing was changed.
      StorageError: the store failed; nothing was changed.
    """
    source = open_checkpoint(store.url).source
    before = source.manifest
    _commit.remove_other_attempts(store, before.attempt)  # of a crash
    if before.thinned_to:
        return False
    _ = source.tables  # or they are damaged
    names = [leaf.name for leaf in before.tree.leaves]
    chosen = selected(names, patterns)
    if not chosen:
        problems = tuple(dead_patterns(patterns, names))
        raise LeafMismatchError(
            f"{store.url}: {'; '.join(problems).replace('select ', 'thin_to ')}",
            mismatches=problems,
            hint='Keep(thin_to="params/**"); `jaxshard show` has the names',
            path=store.url,
            step=before.step,
        )
    tree, numbers = part_of(before.tree, {i for i, name in enumerate(names) if name in chosen})
    filed = {
        number: source.resolve(numbers[number])
        for number, leaf in enumerate(tree.leaves)
        if leaf.layout is not None and not leaf.layout.packed
    }
    plan = _plan.plan_save(tree.leaves, [None] * len(tree.leaves)).of(0)
    reuse = Reuse(source, filed, frozenset(filed))
    for piece in plan.each_piece(tree.leaves):
        reuse.require_whole(piece)

    def may_commit() -> None:
        if source.replaced():
            raise ConflictError(
                f"{store.url}: it was replaced while it was thinned", path=store.url
            )
        still_wanted()

    job = SaveJob(
        store=store,
        attempt=_commit.new_attempt(),
        tree=tree,
        values=(),
        plan=plan,
        options=SaveOptions(compression=before.compression),
        metadata=before.metadata,
        step=before.step,
        epoch=epoch,
        reuse=reuse,
        marks={},
        overwrite=True,
        may_commit=may_commit,
        began=time.monotonic(),
        draft=dataclasses.replace(
            before,
            thinned_to=tuple(patterns),
            reused={name: leaf for name, leaf in before.reused.items() if name in chosen},
        ),
    )
    write(job, _staged(job, source, numbers))
    return True


def _staged(job: SaveJob, source: Source, numbers: Sequence[int]) -> Iterator[Staged]:
    """Pieces without values, and the entries of the pack, one of its files at a time."""
    leaves = job.tree.leaves
    for piece in job.plan.each_piece(leaves):
        yield Staged(piece, [], _nothing, views=True)
    tiles = job.plan.entries["tile"].tolist()
    for stretches in job.plan.stretches():
        values = _read(source, {s.leaf: numbers[s.leaf] for s in stretches})
        for stretch in stretches:
            parts = [
                values[stretch.leaf][_tile(job, stretch, tile).slices]
                for tile in tiles[stretch.first : stretch.stop]
            ]
            yield Staged(stretch, parts, _nothing, views=False)


def _read(source: Source, numbers: Mapping[int, int]) -> dict[int, Array]:
    """Leaves of a checkpoint, whole."""
    values: dict[int, Array] = {}

    def want(leaf: int, number: int) -> Want:
        shape = source.leaf(number).array_shape or ()
        box = Box((0,) * len(shape), shape)

        def receive(buffers: Mapping[Box, Any]) -> None:
            values[leaf] = buffers[box]

        return Want(number, [box], receive)

    _fetch.fetch(source, (want(*pair) for pair in numbers.items()))
    return values


def _tile(job: SaveJob, stretch: Stretch, tile: int) -> Box:
    leaf = job.tree.leaves[stretch.leaf]
    layout = layout_of(leaf)
    return _plan.element_box(_plan.tile_lattice(layout).box(tile), layout, leaf.array_shape or ())


def _nothing() -> None:
    pass
