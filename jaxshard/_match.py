"""Which saved leaf goes where in `like`, and everything that differs between the two.

Works on descriptions alone, before a byte of data is read: names after renaming, kinds, dtypes,
shapes, weak types, key implementations, containers. Every difference becomes one sentence. Pure.
"""

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxshard import _dtypes
from jaxshard._keypaths import components
from jaxshard._patterns import matches, matches_any, renamed
from jaxshard._spec import LeafSpec, Node, TreeSpec, child_keys, join, walk

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


def as_patterns(select: str | Iterable[str] | None) -> list[str] | None:
    """The patterns of a `select` argument."""
    return [select] if isinstance(select, str) else None if select is None else list(select)


def selected(names: Iterable[str], select: Sequence[str] | None) -> set[str]:
    """The names that `select` asks for; all without it."""
    return {name for name in names if select is None or matches_any(select, name)}


def match(
    saved: TreeSpec,
    like: TreeSpec,
    *,
    select: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    fill_missing: bool = False,
    only_renamed: bool = False,
) -> Matching:
    """Pair the leaves of `like` with saved ones and say all that differs.

    With `only_renamed` saved leaves that no pattern of `rename` matches are as if not there.
    """
    names: list[str | None] = [*wanted_names(saved, rename)]
    if only_renamed:
        taken = [any(matches(p, leaf.name) for p in rename or ()) for leaf in saved.leaves]
        names = [name if take else None for name, take in zip(names, taken, strict=True)]
    all_names = [name for name in names if name is not None]
    all_names += [leaf.name for leaf in like.leaves]
    select = as_patterns(select)
    chosen = selected(all_names, select)
    problems = name_clashes(names, chosen)
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
    kept = {leaf.name for leaf, name in zip(saved.leaves, names, strict=True) if leaf.name == name}
    within = None if select is None and not rename else _groups_above(kept & chosen)
    problems += _containers(saved, like, within, fill_missing=fill_missing)
    problems += dead_patterns(select or (), all_names)
    return Matching(pairs, missing, problems)


def name_clashes(names: Sequence[str | None], chosen: set[str]) -> list[str]:
    """Names that renaming gave to two leaves, or to a leaf and a container."""
    count = Counter(name for name in names if name in chosen)
    problems = [
        f"{name!r}: rename gives this name to more than one leaf"
        for name, n in count.items()
        if n > 1
    ]
    groups = {name.rpartition("/")[0] for name in _prefixes(count) if "/" in name}
    problems += [
        f"{name!r}: rename puts other leaves below this leaf" for name in count if name in groups
    ]
    return problems


def _missing(leaf: LeafSpec, extra: list[str]) -> str:
    close = difflib.get_close_matches(leaf.name, extra, n=1, cutoff=0.7)
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
        and saved.container == "jax"
        and saved.shape == ()
        and (saved.weak_type or saved.dtype == "bool")  # a bool has no weak type
        and _dtypes.numpy_dtype(str(saved.dtype)).kind in kinds
    )


def dead_patterns(select: Sequence[str], names: Sequence[str], *, of: str = "") -> list[str]:
    """A sentence for each pattern of `select` that matches no leaf; `of` says of what."""
    problems = []
    for pattern in select:
        if any(matches(pattern, name) for name in names):
            continue
        below = any(matches(f"{pattern}/**", name) for name in names)
        close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
        meant = f"; did you mean {pattern + '/**'!r}?" if below else ""
        if close and not below:
            meant = f"; there is, for example, {close[0]!r}"
        problems.append(f"select {pattern!r} matches no leaf{of and ' '}{of}{meant}")
    return problems


def unused_renames(rename: Mapping[str, str] | None, names: Sequence[str]) -> list[str]:
    """Patterns of `rename` that match no saved name."""
    return [p for p in rename or {} if not any(matches(p, name) for name in names)]


def _groups_above(names: Iterable[str]) -> set[str]:
    """Names of all containers above these leaves."""
    return {name.rpartition("/")[0] for name in _prefixes(names)} | {""}


def _prefixes(names: Iterable[str]) -> set[str]:
    parts = (name.split("/") for name in names)
    return {"/".join(p[: i + 1]) for p in parts for i in range(len(p))}


def _containers(
    saved: TreeSpec, like: TreeSpec, within: set[str] | None, *, fill_missing: bool
) -> list[str]:
    """Containers of one name but another family, or with a key of another type.

    Args:
      saved: of the checkpoint.
      like: wanted.
      within: names of the containers to compare; None for all, the empty ones too.
      fill_missing: whether `like` may have more than the checkpoint.
    """
    in_saved = {n: node for n, node in walk(saved.root) if isinstance(node, Node)}
    in_like = {n: node for n, node in walk(like.root) if isinstance(node, Node)}
    both = [n for n in in_like if n in in_saved and (within is None or n in within)]
    problems = [
        f"{name!r}: saved a {_family(in_saved[name])}, wanted a {_family(in_like[name])}"
        for name in both
        if _family(in_saved[name]) != _family(in_like[name])
    ]
    problems += [why for n in both for why in _key_types(n, in_saved[n], in_like[n])]
    if within is not None:
        return problems
    leaves = {leaf.name for leaf in saved.leaves} | {leaf.name for leaf in like.leaves}
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


def _key_types(name: str, saved: Node, like: Node) -> Iterator[str]:
    """Keys of one text but another type: `{1: x}` is not `{"1": x}`."""
    if _family(saved) != _family(like):
        return
    ours = dict(zip(components(child_keys(like)), child_keys(like), strict=True))
    for component, key in zip(components(child_keys(saved)), child_keys(saved), strict=True):
        if component in ours and type(ours[component]) is not type(key):
            yield f"{join(name, component)!r}: saved key {key!r}, wanted key {ours[component]!r}"


def _family(node: Node) -> str:
    return _FAMILIES.get(node.type, "mapping")
