"""A checkpoint seen from outside: what is in it, and any part of any leaf, without jax.

`open_checkpoint` reads the manifest and nothing else; values are read when asked for. Until then
not even numpy is imported, so that a look at a manifest is as fast as its parsing.
"""

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxshard import _commit, _statejson, _steps
from jaxshard._boxes import Box
from jaxshard._errors import (
    Kind,
    LeafMismatchError,
    NotCommittedError,
    NotFoundError,
    bullet_list,
    size_text,
)
from jaxshard._manifest import FILE, Manifest, ReusedLeaf
from jaxshard._match import dead_patterns
from jaxshard._patterns import matches_any
from jaxshard._registry import Shown
from jaxshard._spec import LeafSpec, MeshSpec, decode_value
from jaxshard._store import PathLike, Store, open_store, storage_errors

if TYPE_CHECKING:
    import numpy as np

    from jaxshard._source import Source

_LEAVES_SHOWN = 20


class LeafInfo(NamedTuple):
    """What a checkpoint says of one leaf.

    Attributes:
      name: components of its path, joined by `/`.
      kind: `array`, `key` (typed PRNG key), `numpy_scalar`, `bool`, `int`, `float`, `complex`,
        `str`, `bytes`, `none`, `function` or `iterator`.
      container: `jax` or `numpy` for arrays, else None.
      dtype: element type, as NumPy and ml_dtypes name it; `uint32` for keys.
      shape: `[*shape]` of the leaf.
      weak_type: whether the jax.Array was weakly typed.
      committed: whether the jax.Array was bound to its devices.
      key_impl: implementation of a PRNG key, e.g. `threefry2x32`.
      spec: partition spec by axis, if it had a NamedSharding.
      mesh: axes of the mesh it lay on.
      memory_kind: e.g. `device` or `pinned_host`.
      nbytes: bytes of its elements in memory.
      piece_shape: shape of what one file (or pack entry) holds, in stored elements.
      tile_shape: shape of what is read at once.
      packed: whether its pieces share the files of a pack.
      zarr_path: of its Zarr array below `Checkpoint.zarr_root`, None if it is packed or no array.
      same_as: name of the leaf that is the same array.
      digest: xxh3-128 over its tiles, equal for equal elements on an equal grid.
      reused: what it shares with the step before, None if nothing.
    """

    name: str
    kind: str
    container: str | None
    dtype: str | None
    shape: tuple[int, ...]
    weak_type: bool
    committed: bool
    key_impl: str | None
    spec: tuple[Any, ...] | None
    mesh: MeshSpec | None
    memory_kind: str | None
    nbytes: int
    piece_shape: tuple[int, ...] | None
    tile_shape: tuple[int, ...] | None
    packed: bool
    zarr_path: str | None
    same_as: str | None
    digest: str | None
    reused: ReusedLeaf | None


class Leaf(Shown):
    """One leaf of an open checkpoint; nothing is read before `read`.

    Attributes:
      info: what the manifest says of it.
      source: the checkpoint as bytes, for the rooms that read them.
      number: of the leaf in it.
    """

    def __init__(self, source: "Source", number: int, info: LeafInfo) -> None:
        self.info = info
        self.source = source
        self.number = number

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored elements; for keys the words of a key come last."""
        return self.source.leaf(self.number).array_shape or ()

    @property
    def dtype(self) -> str | None:
        """Element type."""
        return self.info.dtype

    def read(self, index: Any = ...) -> Any:
        """Read the whole leaf, or the part that a basic index selects.

        Only the tiles that the index touches are read, and each is verified.

        Args:
          index: ints, slices and `...`, as for NumPy (`np.s_[0:4, ::2]`); negative steps are not
            supported.

        Returns:
          A NumPy array; for keys `[*shape, words]` of uint32; the value itself for kinds without
          an array (a function is None); the plain state of an iterator.

        Raises:
          CorruptionError: bytes are missing, cut, changed or in the wrong place.
          CheckpointReplacedError: the checkpoint was replaced since it was opened.
          IndexError: the index does not fit the shape.

        Example:
          >>> import jaxshard, numpy as np
          >>> _ = jaxshard.save("memory://doc/leaf", {"w": np.arange(6).reshape(2, 3)})
          >>> jaxshard.open("memory://doc/leaf")["w"].read(np.s_[1, :2])
          array([3, 4])
        """
        leaf = self.source.leaf(self.number)
        if not leaf.has_array:
            return decode_value(leaf)
        from jaxshard import _assembly, _fetch, _source  # noqa: PLC0415  (they import numpy)

        box, local = _box_of(index, self.shape)
        found: list[Any] = []
        want = _assembly.Want(self.number, [box], lambda buffers: found.append(buffers[box]))
        url = self.source.store.url
        with storage_errors("reading", url), _source.damage_in(self.source):
            _fetch.fetch(self.source, [want])
        values = found[0][local]
        if leaf.kind == "iterator":
            return _statejson.decode_text(values.tobytes().decode())
        if leaf.kind in {"str", "bytes"}:
            raw = values.tobytes()
            return raw.decode("utf-8", "surrogatepass") if leaf.kind == "str" else raw
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray":  # noqa: FBT001  (NumPy's)
        import numpy as np  # noqa: PLC0415

        return np.asarray(self.read(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"<Leaf {self.info.name!r} {_summary(self.info)}>"


def _box_of(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The box that a basic index touches, and the index into that box."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(p is Ellipsis for p in parts) > 1 or len([p for p in parts if p is not Ellipsis]) > len(
        shape
    ):
        raise IndexError(f"index {index!r} has too many parts for the shape {shape}")
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    offset: list[int] = []
    size: list[int] = []
    local: list[int | slice] = []
    for part, n in zip(parts, shape, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(n)
            if step < 1:
                raise IndexError(f"index {index!r}: a negative step is not supported")
            count = len(range(start, stop, step))
            offset.append(start if count else 0)
            size.append((count - 1) * step + 1 if count else 0)
            local.append(slice(None, None, step))
        else:
            if not -n <= int(part) < n:
                raise IndexError(f"index {index!r} is outside of the shape {shape}")
            i = range(n)[int(part)]
            offset.append(i)
            size.append(1)
            local.append(0)
    return Box(tuple(offset), tuple(size)), tuple(local)


class Checkpoint(Shown, Mapping[str, Leaf]):
    """An open checkpoint: a mapping from leaf names to lazy leaves, in the order of the tree.

    Attributes:
      path: where it is.
      step: the training step it holds, or None.
      metadata: what was given to `save`.
      environment: versions and flags at the time of the save.
      created: when it was committed, UTC.
      thinned_to: patterns of the leaves that were left of it (`Keep(thin_to=)`); empty if it is
        whole.

    Example:
      >>> import jaxshard, numpy as np
      >>> _ = jaxshard.save("memory://doc/open", {"w": np.ones((2, 3)), "n": 7})
      >>> ckpt = jaxshard.open("memory://doc/open")
      >>> list(ckpt), ckpt["n"].read(), ckpt.leaves["w"].shape, ckpt.nbytes
      (['n', 'w'], 7, (2, 3), 48)
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self.path = store.url
        self.step = manifest.step
        self.metadata = dict(manifest.metadata)
        self.environment = dict(manifest.environment)
        self.created = manifest.created
        self.thinned_to = manifest.thinned_to
        self._numbers = {leaf.name: i for i, leaf in enumerate(manifest.tree.leaves)}

    @functools.cached_property
    def source(self) -> "Source":
        """The checkpoint as bytes, for the rooms that read them."""
        from jaxshard._source import Source  # noqa: PLC0415  (it imports numpy)

        return Source(self._store, self._manifest)

    @functools.cached_property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """What the manifest says of each leaf, by name."""
        return {
            leaf.name: self._info(number) for number, leaf in enumerate(self._manifest.tree.leaves)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, those of shared arrays once."""
        return self._manifest.nbytes

    @property
    def reused_nbytes(self) -> int:
        """Bytes of elements whose files are also those of the step before."""
        return sum(leaf.nbytes for leaf in self._manifest.reused.values())

    def leaf_spec(self, name: str) -> LeafSpec:
        """All that the manifest keeps of a leaf; of a shared one, with the first one's layout."""
        number = self._numbers[name]
        own = self._manifest.tree.leaves[number]
        first = self._manifest.tree.first(number)
        return own._replace(layout=first.layout, digest=first.digest)

    @property
    def attempt(self) -> str:
        """Name of the directory, beside the manifest, that holds everything else."""
        return self._manifest.attempt

    @property
    def zarr_root(self) -> str:
        """The Zarr v3 group that holds the leaves that are not packed.

        TensorStore reads all of it; so does zarr-python after `import jaxshard.zarr_dtypes`.
        """
        return f"{self.path}/{self.attempt}/data"

    def _info(self, number: int) -> LeafInfo:
        tree = self._manifest.tree
        own, leaf = tree.leaves[number], tree.first(number)
        layout = leaf.layout
        return LeafInfo(
            name=own.name,
            kind=own.kind,
            container=own.container,
            dtype=own.dtype,
            shape=own.shape,
            weak_type=own.weak_type,
            committed=own.committed,
            key_impl=own.key_impl,
            spec=own.spec,
            mesh=None if own.mesh is None else tree.meshes[own.mesh],
            memory_kind=own.memory_kind,
            nbytes=own.nbytes,
            piece_shape=layout and layout.piece,
            tile_shape=layout and layout.tile,
            packed=layout is not None and layout.packed,
            zarr_path=None if layout is None or layout.packed else layout.path,
            same_as=None if own.same_as is None else leaf.name,
            digest=leaf.digest,
            reused=self._manifest.reused.get(leaf.name),
        )

    def __getitem__(self, name: str) -> Leaf:
        if name not in self._numbers:
            close = difflib.get_close_matches(name, self._numbers, n=3, cutoff=0.3)
            near = f"did you mean one of {close}?" if close else "list(checkpoint) has the names"
            raise KeyError(f"{name!r} is no leaf of {self.path}; {near}")
        return Leaf(self.source, self._numbers[name], self.leaves[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        part = f", thinned to {', '.join(self.thinned_to)}" if self.thinned_to else ""
        size = size_text(self.nbytes)
        return f"<Checkpoint {self.path!r}{step}, {len(self)} leaves, {size}{part}>"

    def __str__(self) -> str:
        rows = [
            f"  {name or '(the whole tree)'}  {_summary(info)}"
            for name, info in list(self.leaves.items())[:_LEAVES_SHOWN]
        ]
        if len(self) > _LEAVES_SHOWN:
            rows.append(f"  … and {len(self) - _LEAVES_SHOWN} more")
        return "\n".join([repr(self)[1:-1], *rows])


def _summary(info: LeafInfo) -> str:
    if info.kind in {"array", "key"}:
        what = info.dtype if info.kind == "array" else f"key<{info.key_impl}>"
        spec = "" if info.spec is None else f" P{info.spec}"
        return f"{what}[{','.join(map(str, info.shape))}]{spec} {size_text(info.nbytes)}"
    return info.kind


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Open a checkpoint: reads its manifest and nothing else.

    Raises:
      NotFoundError: nothing is there, or a run directory (its hint names the newest step).
      NotCommittedError: a save was begun there and never committed.
      CorruptionError: the manifest is cut or changed.
      FormatError: the manifest is of a newer version, or does not fit together.
    """
    store = open_store(path)
    with storage_errors("reading", store.url):
        try:
            data = store.read(FILE)
        except (FileNotFoundError, NotADirectoryError):
            data = None
        if data is None:
            raise why_not_there(store)
    return Checkpoint(store, Manifest.from_bytes(data, f"{store.url}/{FILE}"))


def select_leaves(checkpoint: Checkpoint, select: str | Sequence[str] | None) -> list[LeafInfo]:
    """The leaves whose names match one of the patterns, all if None; in the order of the tree.

    Raises:
      LeafMismatchError: a pattern matches no leaf.
    """
    if select is None:
        return list(checkpoint.leaves.values())
    patterns = [select] if isinstance(select, str) else list(select)
    dead = tuple(dead_patterns(patterns, list(checkpoint)))
    if dead:
        raise LeafMismatchError(
            bullet_list(f"{checkpoint.path}: expected each pattern to match a leaf:", dead),
            mismatches=dead, path=checkpoint.path, step=checkpoint.step,
            hint="`*` stands for any text within one component, `**` for any number of components",
        )  # fmt: skip
    return [info for name, info in checkpoint.leaves.items() if matches_any(patterns, name)]


def why_not_there(store: Store) -> NotFoundError | NotCommittedError:
    """The error for a path without a manifest."""
    found = _commit.look(store)
    if found is _commit.Found.ATTEMPTS:
        return NotCommittedError(
            f"{store.url}: a save was begun here and never committed; there is no checkpoint",
            kind=Kind.NOT_COMMITTED,
            path=store.url,
            hint="load an earlier step, or save again",
        )
    if found is _commit.Found.RUN:
        newest = _steps.newest_step(store)
        hint = f"load {store.url}/{newest}" if newest else "no step was committed in it yet"
        return NotFoundError(
            f"{store.url}: expected one checkpoint, found a run directory",
            kind=Kind.IS_A_RUN,
            path=store.url,
            hint=hint,
        )
    near = _neighbours(store.url)
    hint = f"beside it there is: {near}" if near else "is the path right?"
    path, at, step = store.url.rpartition("@")
    if at and step.isdecimal():
        hint = f"RUN@STEP is for the command line; here {path}/step_{int(step):08d}"
    return NotFoundError(
        f"{store.url}: expected a checkpoint, found nothing"
        if found is _commit.Found.NOTHING
        else f"{store.url}: expected a checkpoint, found other files and no {FILE}",
        path=store.url,
        hint=hint,
    )


def _neighbours(url: str) -> str:
    parent = Path(url).parent
    if "://" in url or not parent.is_dir():
        return ""
    found = [*parent.glob(f"*/{FILE}"), *parent.glob(f"*/{_commit.RUN_FILE}")]
    names = sorted(p.parent.name for p in found)
    return ", ".join(names[-3:])
