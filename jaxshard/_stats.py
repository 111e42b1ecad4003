"""`stats`: what the numbers in a checkpoint look like, leaf by leaf, in bounded memory.

Blocks of leaves are read one after another and added up exactly where that is possible: sums of
integers in Python ints, sums of floats in float64 with fractions between blocks, so that neither
a mean nor a norm overflows on its way. NaNs and infinities are counted and left out of the rest.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jaxshard import _places, _plan
from jaxshard._boxes import Box
from jaxshard._errors import size_text
from jaxshard._reader import Checkpoint, LeafInfo, open_checkpoint, select_leaves
from jaxshard._registry import Shown
from jaxshard._spec import Layout, layout_of
from jaxshard._store import PathLike

_BLOCK_BYTES = 16 << 20  # read at once, as stored
_CHUNK = 1 << 20  # elements that are converted at once; sums of halves of int64 stay in int64
_SAFE_EXPONENT = 400  # squares of numbers up to 2**400 can be added up in float64
_NUMBERS = {"array", "numpy_scalar", "bool", "int", "float", "complex"}
_DTYPE_OF = {"float": "float64", "complex": "complex128"}


class LeafStats(NamedTuple):
    """What the numbers of one leaf look like; NaNs and infinities count only in `nans`, `infs`.

    Attributes:
      name: of the leaf.
      dtype: its element type; `bool`, `int`, `float` or `complex` for a Python number.
      shape: `[*shape]` of the leaf.
      size: number of elements.
      min: smallest number, exactly; of a complex leaf the smallest absolute value; None without
        a finite element. A bool counts as 0 or 1.
      max: largest number, as for `min`.
      mean: arithmetic mean; None without a finite element.
      norm: square root of the sum of squares of absolute values.
      nans: elements that are NaN (complex: in one part at least).
      infs: other elements that are infinite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    min: float | None
    max: float | None
    mean: complex | None
    norm: float
    nans: int
    infs: int

    @property
    def finite(self) -> bool:
        """Whether there is neither a NaN nor an infinity."""
        return not self.nans and not self.infs


@dataclasses.dataclass(frozen=True, slots=True)
class StatsReport(Shown):
    """What `stats` found.

    Attributes:
      path: the checkpoint.
      step: its step, if it has one.
      leaves: one entry for each leaf of numbers.
      nbytes: bytes of elements that were read.
    """

    path: str
    step: int | None
    leaves: tuple[LeafStats, ...]
    nbytes: int

    @property
    def finite(self) -> bool:
        """Whether there is neither a NaN nor an infinity in any leaf."""
        return all(leaf.finite for leaf in self.leaves)

    def __str__(self) -> str:
        rows = [f"  {leaf.name or '(the whole tree)'}  {_summary(leaf)}" for leaf in self.leaves]
        return "\n".join([f"{self.path}: {size_text(self.nbytes)} read", *rows])


def stats(
    path: PathLike,
    *,
    select: str | Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> StatsReport:
    """Minimum, maximum, mean and norm of each leaf, and how many NaNs and infinities it has.

    Reads block by block, each tile verified; memory stays below about 100 MiB whatever the size
    of a leaf. Integers of any width are exact; floats are added up in float64. PRNG keys, strings
    and None have no numbers and are left out.

    Args:
      path: a committed checkpoint.
      select: patterns of names; all leaves if None.
      on_progress: called with bytes done and bytes in all, as reading goes on.

    Returns:
      A `LeafStats` for each leaf of numbers, in the order of the tree.

    Raises:
      NotFoundError: nothing is at `path`, or a run directory.
      NotCommittedError: a save was begun there and never committed.
      LeafMismatchError: a pattern of `select` matches no leaf.
      CorruptionError: bytes are missing, cut, changed or in the wrong place.
      CheckpointReplacedError: a writer replaced or deleted it meanwhile.

    Example:
      >>> import jax.numpy as jnp, jaxshard
      >>> _ = jaxshard.save("memory://doc/stats", {"w": jnp.array([3.0, -4.0, jnp.nan])})
      >>> (w,) = jaxshard.stats("memory://doc/stats").leaves
      >>> w.min, w.max, w.mean, w.norm, w.nans
      (-4.0, 3.0, -0.5, 5.0, 1)
    """
    checkpoint = open_checkpoint(path)
    wanted = [i for i in select_leaves(checkpoint, select) if i.kind in _NUMBERS]
    total = sum(_layout(checkpoint, i).nbytes for i in _stored_once(wanted))
    tallies: dict[str, _Tally] = {}  # by the name of the first leaf that is this array
    done = 0
    for info in wanted:
        if _first(info) in tallies:
            continue
        tally = tallies[_first(info)] = _Tally()
        for values, nbytes in _blocks(checkpoint, info):
            tally.add(info.dtype or _DTYPE_OF.get(info.kind, info.kind), values)
            done += nbytes
            if on_progress is not None and nbytes:
                on_progress(done, total)
    leaves = tuple(_leaf_stats(info, tallies[_first(info)]) for info in wanted)
    return StatsReport(checkpoint.path, checkpoint.step, leaves, done)


def _first(info: LeafInfo) -> str:
    return info.name if info.same_as is None else info.same_as


def _stored_once(wanted: list[LeafInfo]) -> list[LeafInfo]:
    """Of the leaves that are arrays, one for each stored array."""
    return list({_first(info): info for info in wanted if info.kind == "array"}.values())


def _layout(checkpoint: Checkpoint, info: LeafInfo) -> Layout:
    return layout_of(checkpoint.leaf_spec(info.name))


def _blocks(checkpoint: Checkpoint, info: LeafInfo) -> Iterator[tuple[Any, int]]:
    """The values of a leaf, block by block, and how many stored bytes each block has."""
    leaf = checkpoint[info.name]
    if info.kind != "array":
        yield leaf.read(), 0
        return
    layout = _layout(checkpoint, info)
    if not layout.nbytes:
        return
    for block in _places.blocks(layout, Box.whole(layout.shape), _BLOCK_BYTES):
        box = _plan.element_box(block, layout, info.shape)
        yield leaf.read(box.slices), block.size * layout.itemsize


class _Tally:
    """What the finite numbers of a leaf add up to, so far."""

    def __init__(self) -> None:
        self.size = 0  # finite ones
        self.nans = 0
        self.infs = 0
        self.low: float | None = None
        self.high: float | None = None
        self.total = Fraction(0)
        self.imaginary = Fraction(0)  # of complex numbers, beside the real part in `total`
        self.squares = Fraction(0)

    def add(self, dtype: str, values: Any) -> None:
        """Add a block of elements, or one number."""
        if isinstance(values, int):  # Python's, of any size
            self._range(values, values)
            self.size += 1
            self.total += values
            self.squares += values**2
            return
        flat = np.asarray(values).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            with np.errstate(all="ignore"):  # of signalling NaNs, and of sizes beyond float64
                self._add_chunk(dtype, flat[start : start + _CHUNK])

    def _add_chunk(self, dtype: str, chunk: Any) -> None:
        if "float" in dtype:
            self._add_floats(chunk.astype(np.float64))
        elif dtype.startswith("complex"):
            self._add_complex(chunk.astype(np.complex128))
        else:
            self._add_integers(chunk if dtype == "uint64" else chunk.astype(np.int64))

    def _range(self, low: float, high: float) -> None:
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    def _add_integers(self, chunk: Any) -> None:
        self._range(int(chunk.min()), int(chunk.max()))
        self.size += chunk.size
        # In halves, none of which can overflow.
        upper, lower = int((chunk >> 32).sum()), int((chunk & 0xFFFFFFFF).sum())
        self.total += (upper << 32) + lower
        self._add_squares(chunk.astype(np.float64), 0)

    def _add_floats(self, chunk: Any) -> None:
        finite = self._finite(chunk)
        if not finite.size:
            return
        self._range(float(finite.min()), float(finite.max()))
        exponent = _common_exponent(finite)
        scaled = np.ldexp(finite, -exponent) if exponent else finite
        self.total += _scaled_back(scaled.sum(), exponent)
        self._add_squares(scaled, exponent)

    def _add_complex(self, chunk: Any) -> None:
        finite = self._finite(chunk)
        if not finite.size:
            return
        size = np.abs(finite)
        self._range(float(size.min()), float(size.max()))
        parts = finite.view(np.float64)
        exponent = _common_exponent(parts)
        scaled = np.ldexp(parts, -exponent) if exponent else parts
        self.total += _scaled_back(scaled[::2].sum(), exponent)
        self.imaginary += _scaled_back(scaled[1::2].sum(), exponent)
        self._add_squares(scaled, exponent)

    def _finite(self, chunk: Any) -> Any:
        """The finite elements; the others are counted."""
        finite = np.isfinite(chunk)
        nans = int(np.isnan(chunk).sum())
        size = int(finite.sum())
        self.nans += nans
        self.infs += chunk.size - nans - size
        self.size += size
        return chunk if size == chunk.size else chunk[finite]

    def _add_squares(self, scaled: Any, exponent: int) -> None:
        self.squares += _scaled_back(np.dot(scaled, scaled), 2 * exponent)


def _common_exponent(values: Any) -> int:
    """A power of two to take out of the values, so that their squares can be added up."""
    exponent = math.frexp(max(-float(values.min()), float(values.max())))[1]
    return exponent if abs(exponent) > _SAFE_EXPONENT else 0


def _scaled_back(value: Any, exponent: int) -> Fraction:
    return Fraction(float(value)) * Fraction(2) ** exponent


def _leaf_stats(info: LeafInfo, tally: _Tally) -> LeafStats:
    mean: complex | None = None
    if tally.size:
        mean = _float(tally.total / tally.size)
        if "complex" in (info.dtype or info.kind):
            mean = complex(mean, _float(tally.imaginary / tally.size))
    return LeafStats(
        name=info.name,
        dtype=info.dtype or info.kind,
        shape=info.shape,
        size=tally.size + tally.nans + tally.infs,
        min=tally.low,
        max=tally.high,
        mean=mean,
        norm=_root(tally.squares),
        nans=tally.nans,
        infs=tally.infs,
    )


def _float(value: Fraction) -> float:
    """The nearest float; beyond the largest one an infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _root(square: Fraction) -> float:
    """The square root of a number that may be too large or too small for a float."""
    half = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(square / Fraction(4) ** half), half)
    except OverflowError:
        return math.inf


def _summary(leaf: LeafStats) -> str:
    odd = "" if leaf.finite else f", {leaf.nans} NaN, {leaf.infs} infinite"
    return f"min {leaf.min}, max {leaf.max}, mean {leaf.mean}, norm {leaf.norm}{odd}"
