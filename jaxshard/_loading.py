"""From an open checkpoint to a tree: match, place, read, and put everything where `like` wants it.

All that differs is found before a byte of data is read, and raised as one error.
"""

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxshard import (
    _arrays,
    _assembly,
    _cast,
    _fetch,
    _iterators,
    _match,
    _placement,
    _source,
    _statejson,
    _trees,
)
from jaxshard._boxes import Box
from jaxshard._errors import LeafMismatchError, bullet_list, counted
from jaxshard._options import LoadOptions, LoadReport
from jaxshard._patterns import matches
from jaxshard._reader import Checkpoint
from jaxshard._spec import LeafSpec, TreeSpec, decode_value
from jaxshard._store import storage_errors

logger = logging.getLogger("jaxshard")

Select = str | Iterable[str] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadArguments:
    """The arguments of a load; see `jaxshard.load`.

    With `only_renamed` saved leaves that no pattern of `rename` matches are as if not there.
    """

    mesh: Any = None
    rules: _placement.Rules | None = None
    select: Select = None
    rename: Mapping[str, str] | None = None
    cast: bool = False
    fill_missing: bool = False
    only_renamed: bool = False
    options: LoadOptions = dataclasses.field(default_factory=LoadOptions)


@dataclasses.dataclass(slots=True)
class _Slot:
    """One array to read, and the leaves that it fills (several if they are the same array)."""

    saved: int
    target: _placement.Target
    dtype: str
    fills: list[int]
    boxes: list[Box]


class _Load:
    """One load: what goes where, what is wrong, and the values as they arrive."""

    def __init__(self, checkpoint: Checkpoint, request: LoadArguments) -> None:
        self.checkpoint = checkpoint
        self.source = checkpoint.source
        self.tree: TreeSpec = checkpoint.source.manifest.tree
        self.request = request
        self.problems: list[str] = []
        self.iterator_problems: list[str] = []
        self.filled: list[str] = []
        self.cast: list[str] = []
        self.values: list[Any] = []
        self.kept: frozenset[int] = frozenset()  # ids of values of like that stay in the result
        self._slots: dict[Any, _Slot] = {}
        self._restores: list[tuple[str, Any, Any]] = []  # name, live iterator, state
        self._releases: dict[int, Any] = {}

    # Planning

    def want(self, saved: int, fills: int, like: Any, wanted: LeafSpec | None, name: str) -> None:
        """Fill one value: at once if it is in the manifest, else by reading it."""
        leaf = self.tree.leaves[saved]
        if leaf.kind == "iterator" and like is not None:
            self._want_iterator(saved, like, name)
            return
        if not leaf.has_array:
            self.values[fills] = decode_value(leaf)
            return
        if leaf.kind in {"str", "bytes", "iterator"}:
            target: _placement.Target | str = _placement.Target(
                None, committed=False, weak_type=False
            )
        else:
            mesh = None if leaf.mesh is None else self.tree.meshes[leaf.mesh]
            target = _placement.target(
                self._as_wanted(leaf, wanted),
                mesh,
                like,
                mesh=self.request.mesh,
                rules=self.request.rules,
                name=name,
            )
        if isinstance(target, str):
            self.problems.append(f"{name!r}: {target}")
            return
        dtype = str(leaf.dtype)
        if wanted is not None and wanted.dtype is not None and wanted.kind == leaf.kind == "array":
            dtype = wanted.dtype
        key = (self.source.resolve(saved), target, dtype)
        if key not in self._slots:
            boxes = _placement.wanted_boxes(leaf, target)
            self._slots[key] = _Slot(saved, target, dtype, [], boxes)
        self._slots[key].fills.append(fills)
        if dtype != leaf.dtype:
            self.cast.append(name)
        if like is not None:
            self._releases[fills] = like

    def _want_iterator(self, saved: int, like: Any, name: str) -> None:
        """Restore a live iterator, once everything else has been read."""
        leaf = self.tree.leaves[saved]
        state = self.checkpoint[leaf.name].read()
        why = _iterators.problems(like, _iterators.IteratorInfo.from_json(leaf.value), state)
        self.iterator_problems += [f"{name!r}: {line}" for line in why]
        self._restores.append((name, like, state))

    def restore_iterators(self) -> None:
        """Give the live iterators of `like` their states.

        Raises:
          LeafMismatchError: one of them refuses.
        """
        for name, iterator, state in self._restores:
            try:
                _iterators.restore(iterator, state)
            except Exception as e:  # noqa: BLE001  (of another library; it is shown)
                self.iterator_problems.append(f"{name!r}: it refuses its state: {e}")
        self.raise_problems()

    def _as_wanted(self, leaf: LeafSpec, wanted: LeafSpec | None) -> LeafSpec:
        if wanted is None or wanted.kind != "array" or leaf.kind != "array":
            return leaf
        return leaf._replace(dtype=wanted.dtype)

    def raise_problems(self) -> None:
        """One error with everything that differs.

        Raises:
          LeafMismatchError: there is something.
        """
        problems = (*self.problems, *self.iterator_problems)
        if not problems:
            return
        count = counted(len(problems), "difference")
        title = f"{self.checkpoint.path}: {count} between what was saved and what is wanted:"
        hint = _hint(self.problems) if self.problems else _iterators.HINT
        part = ", ".join(self.checkpoint.thinned_to)
        if part:
            title = f"{self.checkpoint.path}: only {part} was left of it (Keep(thin_to=)); {count}:"
            hint = f"select={list(self.checkpoint.thinned_to)!r}"
        raise LeafMismatchError(
            bullet_list(title, problems),
            mismatches=problems,
            hint=hint,
            path=self.checkpoint.path,
            step=self.checkpoint.step,
        )

    # Reading

    def read(self) -> _fetch.Traffic:
        """Read all slots; leaf by leaf, so that two states never lie side by side."""
        options = self.request.options
        failures: list[str] = []
        wants = (
            _assembly.Want(slot.saved, slot.boxes, self._receiver(slot, failures))
            for slot in self._slots.values()
        )
        path = self.checkpoint.path
        with (
            storage_errors("reading", path),
            _source.damage_in(self.source),
            _arrays.transfers_allowed(),
        ):
            traffic = _fetch.fetch(
                self.source,
                wants,
                host_bytes_max=options.host_bytes_max,
                io_mode=options.io_mode,
                timeout_s=options.timeout_s,
            )
        self.problems += failures
        self.raise_problems()
        return traffic

    def _receiver(self, slot: _Slot, failures: list[str]) -> Any:
        leaf = self.tree.leaves[slot.saved]

        def receive(buffers: dict[Box, Any]) -> None:
            if slot.dtype != leaf.dtype:
                try:
                    buffers = {b: _cast.convert(v, slot.dtype) for b, v in buffers.items()}
                except ValueError as e:
                    failures.append(f"{leaf.name!r}: {e}")
                    return
            if self.request.options.release_like:
                self._release(slot.fills)
            value = self._value(leaf, slot, buffers)
            for number in slot.fills:
                self.values[number] = value

        return receive

    def _value(self, leaf: LeafSpec, slot: _Slot, buffers: dict[Box, Any]) -> Any:
        if leaf.kind == "iterator":
            return _statejson.decode_text(str(_arrays.text_of(leaf, buffers[slot.boxes[0]])))
        if leaf.kind in {"str", "bytes"}:
            return _arrays.text_of(leaf, buffers[slot.boxes[0]])
        donatable = self.request.options.donatable
        return _placement.to_array(leaf, slot.target, buffers, donatable=donatable)

    def _release(self, numbers: list[int]) -> None:
        for number in numbers:
            like = self._releases.pop(number, None)
            if like is not None and id(like) not in self.kept:
                _arrays.release(like)


def _hint(problems: Sequence[str]) -> str:
    """The arguments that would ask for the differences that there are."""
    text = "\n".join(problems)
    ways = {
        "select= for a part": "not in like" in text,
        "fill_missing=True to keep values of like": "not in the checkpoint" in text,
        "rename= for other names": "not in like" in text and "not in the checkpoint" in text,
        "cast=True for other dtypes": "cast=True" in text or "weak types" in text,
    }
    asked = [way for way, helps in ways.items() if helps]
    asked = asked or ["select= for a part", "rename= for other names"]
    return f"change like, or ask for the difference: {', '.join(asked)}"


def _warn_of_unused(load: "_Load") -> None:
    """A rename or rule that matches nothing may be meant for another version, or be a typo."""
    names = [leaf.name for leaf in load.tree.leaves]
    unused = _match.unused_renames(load.request.rename, names)
    wanted = _match.wanted_names(load.tree, load.request.rename)
    unused += [p for p, _ in load.request.rules or () if not any(matches(p, n) for n in wanted)]
    for pattern in unused:
        logger.warning("%s: the pattern %r matches no leaf", load.checkpoint.path, pattern)


def load_tree(
    checkpoint: Checkpoint, like: Any, request: LoadArguments, *, in_place: bool = False
) -> tuple[Any, LoadReport]:
    """Load onto `like`, or without it; see `jaxshard.load`.

    Args:
      checkpoint: open.
      like: tree to load onto, or None.
      request: the arguments of the load.
      in_place: update the NNX objects of `like` instead of making new ones.
    """
    began = time.monotonic()
    load = _Load(checkpoint, request)
    _warn_of_unused(load)
    if like is not None:
        flat = _plan_onto(load, like)
        traffic = load.read()
        load.restore_iterators()
        tree = flat.rebuild(load.values, in_place)
    else:
        moved = _plan_without(load)
        traffic = load.read()
        tree = _build_renamed(load, moved)
    report = LoadReport(
        path=checkpoint.path,
        step=checkpoint.step,
        bytes_needed=traffic.bytes_needed,
        bytes_read=traffic.bytes_read,
        filled=tuple(load.filled),
        cast=tuple(load.cast),
        seconds=time.monotonic() - began,
    )
    return tree, report


def _plan_onto(load: _Load, like: Any) -> _trees.FlatTree:
    request = load.request
    flat = _trees.flatten(like, abstract=True)
    matching = _match.match(
        load.tree,
        flat.spec,
        select=request.select,
        rename=request.rename,
        cast=request.cast,
        fill_missing=request.fill_missing,
        only_renamed=request.only_renamed,
    )
    select = _match.as_patterns(request.select)
    missing = {flat.spec.leaves[n].name for n in matching.missing if request.fill_missing}
    chosen = _match.selected([name for name, _ in flat.offenders], select) - missing
    flat.require_sound("loaded onto", chosen)
    load.problems += matching.problems
    load.values = list(flat.values)
    replaced = {mine for mine, _ in matching.pairs}
    load.kept = frozenset(id(v) for i, v in enumerate(flat.values) if i not in replaced)
    for number in matching.missing:
        leaf, value = flat.spec.leaves[number], flat.values[number]
        if leaf.kind == "function":
            continue
        if request.fill_missing and isinstance(value, jax.ShapeDtypeStruct):
            load.problems.append(f"{leaf.name!r}: missing, and like is abstract: no value to keep")
        load.filled.append(leaf.name)
    for mine, saved in matching.pairs:
        leaf = flat.spec.leaves[mine]
        if leaf.kind != "function":
            load.want(saved, mine, flat.values[mine], leaf, leaf.name)
    load.raise_problems()
    return flat


def _plan_without(load: _Load) -> dict[int, str]:
    """Plan a load without `like`; returns the leaves that get another name."""
    request = load.request
    names = _match.wanted_names(load.tree, request.rename)
    select = _match.as_patterns(request.select)
    chosen = _match.selected(names, select)
    load.values = [_trees.ABSENT] * len(names)
    load.problems += _match.name_clashes(names, chosen)
    moved = {}
    for number, (name, leaf) in enumerate(zip(names, load.tree.leaves, strict=True)):
        if name in chosen and leaf.kind != "function":
            load.want(number, number, None, None, name)
            if name != leaf.name:
                moved[number] = name
    load.problems += _match.dead_patterns(select or (), names)
    load.raise_problems()
    return moved


def _build_renamed(load: _Load, moved: dict[int, str]) -> Any:
    """Plain containers; a renamed leaf is taken out of its place and put into dicts."""
    stay = [_trees.ABSENT if i in moved else value for i, value in enumerate(load.values)]
    tree = _trees.build(load.tree, stay)
    for number, name in moved.items():
        try:
            tree = _trees.put(tree, name, load.values[number])
        except ValueError as e:
            load.problems.append(str(e))
    load.raise_problems()
    return tree
