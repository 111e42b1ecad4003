"""Which saved leaf goes where in `like`, and everything that differs between the two.

Works on descriptions alone, before a byte of data is read: names after renaming, kinds, dtypes,
shapes, weak types, key implementations, containers. Every difference becomes one sentence. Pure.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping

from jaxshard import _dtypes
from jaxshard._patterns import matches_any, renamed
from jaxshard._spec import LeafSpec, Node, TreeSpec, walk

_PYTHON_SCALARS = {"bool": "b", "int": "iu", "float": "f", "complex": "c"}
_FAMILIES = {"list": "list", "tuple": "tuple", "items": "sequence"}


@dataclasses.dataclass(frozen=True, slots=True)
class Matching:
    """What to load for each leaf of `like`.

    Attributes:
      pairs: (number in `like`, number in the checkpoint) of every leaf that can be loaded.
      missing: numbers in `like` of selected leaves that the checkpoint lacks.
      problems: one sentence for each difference; empty if all is well.
    """

    pairs: list[tuple[int, int]]
    missing: list[int]
    problems: list[str]


def wanted_names(saved: TreeSpec, rename: Mapping[str, str] | None) -> list[str]:
    """Names of the saved leaves after renaming."""
    return [renamed(rename or {}, leaf.name) for leaf in saved.leaves]


def selected(names: Iterable[str], select: str | Iterable[str] | None) -> set[str]:
    """The names that `select` asks for; all without it."""
    patterns = [select] if isinstance(select, str) else select
    if patterns is None:
        return set(names)
    patterns = list(patterns)
    return {name for name in names if matches_any(patterns, name)}


def match(
    saved: TreeSpec,
    like: TreeSpec,
    *,
    select: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    fill_missing: bool = False,
) -> Matching:
    """Pair the leaves of `like` with saved ones and say all that differs."""
    names = wanted_names(saved, rename)
    like_names = [leaf.name for leaf in like.leaves]
    select = [select] if isinstance(select, str) else select
    chosen = selected([*names, *like_names], None if select is None else list(select))
    problems = _twice(names, chosen)
    by_name = {name: number for number, name in enumerate(names) if name in chosen}
    pairs, missing = [], []
    for number, leaf in enumerate(like.leaves):
        if leaf.name not in chosen:
            continue
        found = by_name.pop(leaf.name, None)
        if found is None:
            missing.append(number)
            continue
        why = _difference(saved.leaves[found], leaf, cast=cast)
        if why is None:
            pairs.append((number, found))
        else:
            problems.append(f"{leaf.name!r}: {why}")
    extra = [n for n in by_name if saved.leaves[by_name[n]].kind != "function"]
    lost = [like.leaves[n] for n in missing if like.leaves[n].kind != "function"]
    if not fill_missing:
        problems += [_missing(leaf, extra) for leaf in lost]
    problems += [
        f"{name!r}: saved {saved.leaves[by_name[name]].describe()}, not in like" for name in extra
    ]
    if select is None and not rename:
        problems += _containers(saved, like, fill_missing=fill_missing)
    return Matching(pairs, missing, problems)


def _twice(names: list[str], chosen: set[str]) -> list[str]:
    seen: set[str] = set()
    twice = {n for n in names if n in seen or seen.add(n)}  # type: ignore[func-returns-value]
    return [
        f"{name!r}: rename gives this name to more than one leaf" for name in sorted(twice & chosen)
    ]


def _missing(leaf: LeafSpec, extra: list[str]) -> str:
    close = difflib.get_close_matches(leaf.name, extra, n=1)
    meant = f" (did you mean {close[0]!r}, which only the checkpoint has?)" if close else ""
    return f"{leaf.name!r}: wanted {leaf.describe()}, not in the checkpoint{meant}"


def _difference(saved: LeafSpec, wanted: LeafSpec, *, cast: bool) -> str | None:
    """What keeps a saved leaf from becoming the wanted one; None if nothing does."""
    both = f"saved {saved.describe()}, wanted {wanted.describe()}"
    if is_traced_scalar(saved, wanted):
        return None
    if saved.kind != wanted.kind:
        return both
    if saved.kind == "key":
        same = saved.key_impl == wanted.key_impl and saved.shape == wanted.shape
        return None if same else both
    if saved.kind == "numpy_scalar":
        return None if saved.dtype == wanted.dtype else both
    if saved.kind != "array":
        return None
    if saved.shape != wanted.shape:
        return both
    if saved.dtype != wanted.dtype:
        if "bool" in {saved.dtype, wanted.dtype}:
            return f"{both} (never cast)"
        return None if cast else f"{both} (cast=True would convert)"
    weak_matters = "numpy" not in {saved.container, wanted.container}
    if weak_matters and saved.weak_type != wanted.weak_type and not cast:
        return f"{both} (weak types differ)"
    return None


def is_traced_scalar(saved: LeafSpec, wanted: LeafSpec) -> bool:
    """Whether the saved leaf is the weak 0-d array that `jit` makes of the wanted Python number.

    A fresh `TrainState` has `step=0`, a saved one the array that the first update made of it.
    """
    kinds = _PYTHON_SCALARS.get(wanted.kind)
    return (
        kinds is not None
        and saved.kind == "array"
        and saved.shape == ()
        and saved.weak_type
        and _dtypes.numpy_dtype(str(saved.dtype)).kind in kinds
    )


def _containers(saved: TreeSpec, like: TreeSpec, *, fill_missing: bool) -> list[str]:
    """Containers of one name but another family: a list where a tuple was, a dict for a list."""
    in_saved = {n: node for n, node in walk(saved.root) if isinstance(node, Node)}
    in_like = {n: node for n, node in walk(like.root) if isinstance(node, Node)}
    leaves = {leaf.name for leaf in saved.leaves} | {leaf.name for leaf in like.leaves}
    problems = [
        f"{name!r}: saved a {_family(in_saved[name])}, wanted a {_family(node)}"
        for name, node in in_like.items()
        if name in in_saved and _family(in_saved[name]) != _family(node)
    ]
    problems += [
        f"{name!r}: saved an empty {_family(node)}, not in like"
        for name, node in in_saved.items()
        if not node.children and name not in in_like and name not in leaves
    ]
    if not fill_missing:
        problems += [
            f"{name!r}: wanted an empty {_family(node)}, not in the checkpoint"
            for name, node in in_like.items()
            if not node.children and name not in in_saved and name not in leaves
        ]
    return problems


def _family(node: Node) -> str:
    return _FAMILIES.get(node.type, "mapping")
