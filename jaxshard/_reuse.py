"""Files that a step of a run shares with the step before it.

A piece whose tiles have the digests that they had then gets another name for the same file (a hard
link) instead of being written: of a run that trains a tenth of its weights a tenth is written.
Each step stays whole by itself: a file goes when the last step that names it does.

Only what cannot have changed is linked unseen, and only once it was found to be the same: the same
jax.Array, or one that the user calls frozen and that would have to be copied for a look at it.
(benchmarks/reuse.py)
"""

import errno
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxshard import _arrays, _tensors
from jaxshard._errors import CorruptionError
from jaxshard._manifest import ReusedLeaf
from jaxshard._options import SaveOptions
from jaxshard._patterns import matches_any
from jaxshard._plan import Piece
from jaxshard._source import Source
from jaxshard._spec import LeafSpec, layout_of
from jaxshard._store import Syncer

Marks = Mapping[str, "weakref.ref[Any]"]
_CHUNK_BYTES = 4 << 20


class Earlier:
    """The step before.

    Args:
      source: it, open.
      marks: the jax.Arrays that this process has saved there, by name, as long as they live; None
        if another process has saved it.

    Attributes:
      name: its directory.
    """

    def __init__(self, source: Source, marks: Marks | None) -> None:
        self.source = source
        self.marks: Marks = marks or {}
        self.is_ours = marks is not None
        self.name = source.store.url.rpartition("/")[2]
        self.numbers = {
            leaf.name: number
            for number, leaf in enumerate(source.manifest.tree.leaves)
            if leaf.layout is not None and not leaf.layout.packed
        }


def marks_of(leaves: Sequence[LeafSpec], values: Sequence[Any]) -> Marks:
    """The jax.Arrays of a save by name; nothing is kept alive."""
    each = zip(leaves, values, strict=True)
    return {
        leaf.name: weakref.ref(value)
        for leaf, value in each
        if leaf.container == "jax" and leaf.layout is not None and not leaf.layout.packed
    }


class Reuse:
    """What a save shares with an earlier checkpoint.

    Args:
      source: that checkpoint.
      earlier: by leaf number, the number that the leaf has there; the others are written.
      unchanged: leaves whose pieces are linked without a look at their values.

    Attributes:
      unchanged: as above.
    """

    def __init__(
        self, source: Source, earlier: Mapping[int, int], unchanged: frozenset[int]
    ) -> None:
        self._source = source
        self._earlier = earlier
        self.unchanged = unchanged

    def open(self) -> bool:
        """Read what the earlier checkpoint says of its files; whether that can be done."""
        try:
            return bool(self._source.tables)
        except (OSError, CorruptionError):
            return False

    def digests(self, piece: Piece) -> list[bytes]:
        """Of the tiles of a piece there."""
        return self._source.piece_digests(self._earlier[piece.leaf], piece.number)

    def has(self, piece: Piece, digests: Iterable[tuple[int, bytes]]) -> bool:
        """Whether a piece there has these digests; no more are asked for than it takes."""
        if piece.leaf not in self._earlier:
            return False
        each = zip(digests, self.digests(piece), strict=True)
        return all(digest == there for (_, digest), there in each)

    def link(self, syncing: Syncer, file: str, piece: Piece) -> bool:
        """Let a new file be the one of a piece there; False if that is gone, or cannot be."""
        store, key = self._source.store, self._key(piece)
        return self._is_whole(piece) and syncing.link(file, store.child(key).url)

    def contents(self, piece: Piece) -> Iterator[tuple[Any, ...]]:
        """The bytes of the file of a piece there; each part is valid until the next.

        Raises:
          FileNotFoundError: it is not there, or not in full length.
        """
        key, left, at = self._key(piece), self._nbytes(piece), 0
        if not self._is_whole(piece):
            raise FileNotFoundError(errno.ENOENT, "the step before has lost it", key)
        chunk = memoryview(bytearray(min(left, _CHUNK_BYTES)))
        while left:
            part = chunk[: min(left, len(chunk))]
            if self._source.store.read_range(key, at, part) < at + left:
                raise FileNotFoundError(errno.ENOENT, "the step before has lost it", key)
            yield (part,)
            at, left = at + len(part), left - len(part)

    def require_whole(self, piece: Piece) -> None:
        """Its file is there.

        Raises:
          CorruptionError: it is not, or not in full length.
        """
        name = self._source.manifest.tree.leaves[self._earlier[piece.leaf]].name
        found = self._source.store.size(self._key(piece))
        where = f"leaf {name!r}, piece {piece.number}"
        _tensors.require_length(where, self._key(piece), found, self._nbytes(piece))

    def _is_whole(self, piece: Piece) -> bool:
        return self._source.store.size(self._key(piece)) == self._nbytes(piece)

    def _nbytes(self, piece: Piece) -> int:
        return self._source.file_bytes(self._earlier[piece.leaf], piece.number)

    def _key(self, piece: Piece) -> str:
        manifest = self._source.manifest
        number = self._earlier[piece.leaf]
        return _tensors.piece_file(
            manifest.attempt, layout_of(manifest.tree.leaves[number]), piece.number
        )

    @property
    def expected_bytes(self) -> int:
        """Bytes that will not be written, as far as that is known before a look at the values."""
        leaves, reused = self._source.manifest.tree.leaves, self._source.manifest.reused
        return sum(
            layout_of(leaves[number]).nbytes
            if leaf in self.unchanged
            else reused.get(leaves[number].name, ReusedLeaf()).nbytes
            for leaf, number in self._earlier.items()
        )

    def saves(self, leaf: int) -> int:
        """How many steps in a row share a file of this leaf, with the one that is being saved."""
        name = self._source.manifest.tree.leaves[self._earlier[leaf]].name
        return self._source.manifest.reused.get(name, ReusedLeaf()).saves + 1


class Sharing(NamedTuple):
    """What the steps of a run may share.

    Attributes:
      earlier: the step before; None if there is none.
      frozen: patterns of names whose values the user says do not change.
      saves_max: after how many steps that have shared a file it is written anew; 0 shares none.
    """

    earlier: Earlier | None
    frozen: Sequence[str]
    saves_max: int

    def of(
        self, leaves: Sequence[LeafSpec], values: Sequence[Any], options: SaveOptions
    ) -> Reuse | None:
        """What one save may share; None if that is nothing.

        Args:
          leaves: with their layouts.
          values: of the leaves.
          options: of the save.
        """
        if self.earlier is None:
            return None
        manifest = self.earlier.source.manifest
        if manifest.compression != options.compression:
            return None
        pairs: dict[int, int] = {}
        unchanged = set()
        for number, leaf in enumerate(leaves):
            before = self.earlier.numbers.get(leaf.name)
            if before is None or leaf.layout is None:
                continue
            there = layout_of(manifest.tree.leaves[before])._replace(path="")
            shared = manifest.reused.get(leaf.name, ReusedLeaf()).saves
            if there != leaf.layout._replace(path="") or shared >= self.saves_max:
                continue
            pairs[number] = before
            copy_all = options.snapshot == "copy"
            if shared and self._is_unchanged(leaf, values[number], copy_all=copy_all):
                unchanged.add(number)
        return Reuse(self.earlier.source, pairs, frozenset(unchanged)) if pairs else None

    def _is_unchanged(self, leaf: LeafSpec, value: Any, *, copy_all: bool) -> bool:
        assert self.earlier is not None
        mark = self.earlier.marks.get(leaf.name)
        if mark is not None and mark() is value:
            return True
        costs = leaf.container == "jax" and (copy_all or not _arrays.is_view(leaf, value))
        return self.earlier.is_ours and costs and matches_any(self.frozen, leaf.name)
