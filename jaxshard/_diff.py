"""`diff` says in what two checkpoints differ, by digests wherever they can tell."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxshard import _places, _plan
from jaxshard._boxes import Box
from jaxshard._errors import bullet_list
from jaxshard._reader import Checkpoint, open_checkpoint
from jaxshard._registry import Shown
from jaxshard._spec import LeafSpec, layout_of
from jaxshard._store import PathLike

_BLOCK_BYTES = 16 << 20


class Difference(NamedTuple):
    """One leaf that differs: its name and how."""

    name: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class DiffReport(Shown):
    """What `diff` found.

    Attributes:
      path_a: the first checkpoint.
      path_b: the second one.
      differences: one for each leaf that differs.
      leaves: number of leaves that were compared.
      nbytes: bytes of elements that had to be read, where digests could not tell.
    """

    path_a: str
    path_b: str
    differences: tuple[Difference, ...]
    leaves: int
    nbytes: int

    @property
    def identical(self) -> bool:
        """Whether all leaves have the same names, types and bits."""
        return not self.differences

    def __str__(self) -> str:
        pair = f"{self.path_a} and {self.path_b}"
        if self.identical:
            return f"{pair}: identical ({self.leaves} leaves)"
        lines = tuple(f"{d.name!r}: {d.what}" for d in self.differences)
        return bullet_list(f"{pair}: {len(lines)} of {self.leaves} leaves differ", lines)


def diff(path_a: PathLike, path_b: PathLike) -> DiffReport:
    """Say which leaves differ: in presence, type, shape or bits.

    Where both have the same tiles only digests are compared, and no data is read. Placement
    (shardings, memory kinds) is not a difference.

    Args:
      path_a: a committed checkpoint.
      path_b: another one.

    Raises:
      NotFoundError: nothing is at one of the paths.
      NotCommittedError: a save was begun at one of them and never committed.
      CorruptionError: data that had to be read is damaged.

    Example:
      >>> import jax.numpy as jnp, jaxshard
      >>> _ = jaxshard.save("memory://doc/a", {"w": jnp.ones(3), "n": 1})
      >>> _ = jaxshard.save("memory://doc/b", {"w": jnp.ones(3), "n": 2})
      >>> print(jaxshard.diff("memory://doc/a", "memory://doc/b"))
      memory://doc/a and memory://doc/b: 1 of 2 leaves differ
        - 'n': 1 and 2
    """
    a, b = open_checkpoint(path_a), open_checkpoint(path_b)
    differences: list[Difference] = []
    names = list(dict.fromkeys([*a, *b]))
    nbytes = 0
    for name in names:
        if name not in a or name not in b:
            where, leaf = (a, a.leaf_spec(name)) if name in a else (b, b.leaf_spec(name))
            differences.append(Difference(name, f"{leaf.describe()}, only in {where.path}"))
            continue
        what, read = _difference(a, b, name)
        nbytes += read
        if what is not None:
            differences.append(Difference(name, what))
    return DiffReport(a.path, b.path, tuple(differences), len(names), nbytes)


def _difference(a: Checkpoint, b: Checkpoint, name: str) -> tuple[str | None, int]:
    """How a leaf differs, and how many bytes had to be read to see it."""
    mine, other = a.leaf_spec(name), b.leaf_spec(name)
    if mine.describe() != other.describe():
        return f"{mine.describe()} and {other.describe()}", 0
    if not mine.has_array or not other.has_array:
        if (mine.value, mine.has_array) == (other.value, other.has_array):
            return None, 0
        return f"{_short(a[name].read())} and {_short(b[name].read())}", 0
    if mine.array_shape != other.array_shape:
        return f"{mine.array_shape} and {other.array_shape} bytes", 0
    grids = [(layout_of(leaf).tile, layout_of(leaf).per_byte) for leaf in (mine, other)]
    if grids[0] == grids[1]:
        return (None if mine.digest == other.digest else "other bits"), 0
    return _compare_data(a, b, name, mine)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _compare_data(
    a: Checkpoint, b: Checkpoint, name: str, leaf: LeafSpec
) -> tuple[str | None, int]:
    """Compare block by block; both leaves have the same shape and dtype."""
    layout = layout_of(leaf)
    shape = leaf.array_shape or ()
    unequal = 0
    for block in _places.blocks(layout, Box.whole(layout.shape), _BLOCK_BYTES):
        box = _plan.element_box(block, layout, shape)
        left, right = (_bits(ckpt[name].read(box.slices)) for ckpt in (a, b))
        unequal += int(np.count_nonzero((left != right).any(axis=-1)))
    return (f"{unequal} elements have other bits" if unequal else None), 2 * leaf.nbytes


def _bits(values: Any) -> Any:
    """Elements as rows of their bytes."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, -1)
