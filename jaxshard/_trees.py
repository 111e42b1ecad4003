"""Any pytree <-> named leaves and a plain description of its containers.

`flatten` walks a tree (NNX objects through `_nnx`, everything else as JAX registers it), names its
leaves, and remembers how to put other values in their places. `build` makes plain containers from
a description alone. What cannot be stored is collected, not raised one by one.
"""

import collections
import dataclasses
import functools
import keyword
import warnings
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import jax

from jaxshard import _arrays, _iterators, _nnx
from jaxshard._errors import UnsupportedLeafError, bullet_list, counted
from jaxshard._keypaths import components, is_storable_key, sort_key, unescape
from jaxshard._spec import DEPTH_MAX, LeafSpec, MeshSpec, Node, TreeSpec, child_keys, join

Rebuild = Callable[[list[Any]], Any]


class Absent(NamedTuple):
    """Placeholder of a leaf that was not loaded; `build` leaves it out."""


ABSENT = Absent()


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTree:
    """A tree taken apart.

    Attributes:
      spec: description of the tree; leaves without layouts.
      values: the leaf values, by leaf number.
      rebuild: makes the tree again from as many values; NNX objects new, or the same ones updated.
      offenders: by name, why a leaf cannot be stored or loaded onto.
    """

    spec: TreeSpec
    values: list[Any]
    rebuild: Callable[[list[Any], bool], Any]
    offenders: list[tuple[str, str]]

    def require_sound(self, doing: str, chosen: Container[str] | None = None) -> None:
        """Refuse a tree with leaves that are not known.

        Args:
          doing: what cannot be done with them, for the message.
          chosen: names that matter; None for all.

        Raises:
          UnsupportedLeafError: names all of them.
        """
        lines = tuple(
            f"{name!r}: {why}" for name, why in self.offenders if chosen is None or name in chosen
        )
        if lines:
            raise UnsupportedLeafError(
                bullet_list(f"{counted(len(lines), 'leaf')} cannot be {doing}:", lines),
                offenders=lines,
                hint="take them out of the tree, or turn them into arrays, numbers or strings",
            )


def flatten(tree: Any, *, abstract: bool = False) -> FlatTree:
    """Take a tree apart.

    Args:
      tree: any pytree.
      abstract: whether `jax.ShapeDtypeStruct` leaves are welcome (in `like`).
    """
    walker = _Walker(abstract=abstract)
    root, rebuild = walker.start(tree)
    spec = TreeSpec(root, tuple(walker.leaves), tuple(walker.meshes))
    return FlatTree(spec, walker.values, rebuild, walker.offenders)


class _Walker:
    """One walk over one tree, depth first; collects leaves, meshes and offenders."""

    def __init__(self, *, abstract: bool) -> None:
        self.abstract = abstract
        self.leaves: list[LeafSpec] = []
        self.values: list[Any] = []
        self.meshes: dict[MeshSpec, int] = {}
        self.offenders: list[tuple[str, str]] = []
        self._first: dict[int, int] = {}
        self._graph = _nnx.Graph([])
        self._parts: dict[int, Rebuild] = {}
        self._objects: list[Any] = []
        self._inside_object = False

    def start(self, tree: Any) -> tuple[Node | int, Callable[[list[Any], bool], Any]]:
        self._graph = _nnx.Graph(list(_nnx_objects(tree)))
        root, rebuild = self._visit(tree, "", 0)
        rebuild_graph = self._graph.rebuilder(self._parts)

        def finish(values: list[Any], in_place: bool) -> Any:  # noqa: FBT001
            self._objects = rebuild_graph(values, in_place)
            return rebuild(values)

        return root, finish

    def _visit(self, here: Any, name: str, depth: int) -> tuple[Node | int, Rebuild]:
        if depth > DEPTH_MAX:
            self.offenders.append((f"{name[:80]}…", f"nested deeper than {DEPTH_MAX} levels"))
            return self._leaf(None, name)
        if _arrays.is_plain_leaf(here):
            return self._leaf(here, name)
        if _nnx.is_variable(here):
            return self._variable(here, name, depth)
        if _nnx.is_object(here):
            return self._nnx_object(here, name, depth)
        taken = _take_apart(here)
        if taken is None:
            return self._leaf(here, name)
        return self._container(taken, name, depth)

    def _leaf(self, value: Any, name: str) -> tuple[int, Rebuild]:
        number = len(self.leaves)
        described: _arrays.Described | str
        try:
            if not self.abstract and _iterators.is_iterator(value):
                value = _iterators.take(value, jax.process_count())
            described = _arrays.describe(name, value, abstract=self.abstract)
        except UnsupportedLeafError as e:
            described = " ".join(line.strip() for line in str(e).splitlines())
        if isinstance(described, str):
            self.offenders.append((name, described))
            described = _arrays.Described(LeafSpec(name=name, kind="none"), None)
        spec, mesh = described
        if mesh is not None:
            spec = spec._replace(mesh=self.meshes.setdefault(mesh, len(self.meshes)))
        if spec.has_array and spec.container is not None:
            first = self._first.setdefault(id(value), number)
            if first != number:
                spec = spec._replace(same_as=first)
        self.leaves.append(spec)
        self.values.append(value)
        return number, lambda values: values[number]

    def _container(self, taken: "_Parts", name: str, depth: int) -> tuple[Node, Rebuild]:
        keys = taken.keys if taken.keys is not None else tuple(range(len(taken.children)))
        bad = [k for k in keys if not is_storable_key(k)]
        if bad:
            kinds = ", ".join(sorted({type(k).__name__ for k in bad}))
            self.offenders.append((name, f"a dict key of a type that cannot be stored: {kinds}"))
            return Node("dict", (), ()), lambda _: None
        names = components(keys)
        visited = [
            self._visit(child, join(name, component), depth + 1)
            for component, child in zip(names, taken.children, strict=True)
        ]
        node = Node(taken.type, taken.keys or (), tuple(n for n, _ in visited), taken.class_name)
        rebuilds = [r for _, r in visited]
        return node, lambda values: taken.rebuild([r(values) for r in rebuilds])

    def _variable(self, here: Any, name: str, depth: int) -> tuple[Node | int, Rebuild]:
        """`.value` is not part of a name: a Variable is as transparent as in a pure dict."""
        node, rebuild = self._visit(_nnx.raw_value(here), name, depth + 1)
        if self._inside_object:  # `nnx.split` has taken it apart
            return node, lambda values: _nnx.with_value(here, rebuild(values))
        number = self._graph.number_of(here)
        if self._graph.has_own_state(number):
            self._parts[number] = lambda values: _nnx.with_value(here, rebuild(values))
        return node, lambda _: self._objects[number]

    def _nnx_object(self, here: Any, name: str, depth: int) -> tuple[Node | int, Rebuild]:
        number = self._graph.number_of(here)
        class_name = _class_name(here)
        if number in self._parts:  # the same object twice: its leaves are named once
            return Node("dict", (), (), class_name), lambda _: self._objects[number]
        self._parts[number] = lambda _: _nnx.new_state({})
        taken = _take_apart(self._graph.state_of(here))
        assert taken is not None
        self._inside_object = True
        node, self._parts[number] = self._container(taken, name, depth)
        self._inside_object = False
        return dataclasses.replace(node, class_name=class_name), lambda _: self._objects[number]


def _nnx_objects(tree: Any, depth: int = 0) -> Iterator[Any]:
    """The outermost NNX objects and Variables of a tree."""
    if _nnx.is_object(tree) or _nnx.is_variable(tree):
        yield tree
    elif depth <= DEPTH_MAX and not _arrays.is_plain_leaf(tree):
        taken = _take_apart(tree)
        for child in taken.children if taken is not None else ():
            yield from _nnx_objects(child, depth + 1)


class _Parts(NamedTuple):
    """One container, one level deep; `keys` is None for sequences."""

    type: Any
    keys: tuple[Any, ...] | None
    children: list[Any]
    rebuild: Callable[[list[Any]], Any]
    class_name: str | None = None


def _take_apart(here: Any) -> _Parts | None:
    """The children of a container, or None if JAX takes it for a leaf."""
    kind = type(here)
    if kind is list:
        return _Parts("list", None, here, list)
    if kind is tuple:
        return _Parts("tuple", None, list(here), tuple)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return _dict_parts(here)
    if _nnx.is_state(here):
        keys = sorted(here, key=sort_key)
        return _Parts(
            "dict",
            tuple(keys),
            [here[k] for k in keys],
            lambda new: _nnx.new_state(dict(zip(keys, new, strict=True))),
            _class_name(here),
        )
    if isinstance(here, tuple) and hasattr(here, "_fields"):
        return _Parts("namedtuple", here._fields, list(here), kind._make, _class_name(here))
    return _registered_parts(here)


def _dict_parts(here: Any) -> _Parts:
    kind = type(here)
    ordered = kind is collections.OrderedDict or not all(map(is_storable_key, here))
    keys = list(here) if ordered else sorted(here, key=sort_key)

    def rebuild(new: list[Any]) -> Any:
        values = dict(zip(keys, new, strict=True))
        items = ((k, values[k]) for k in here)  # in the order of the original
        if kind is collections.defaultdict:
            return collections.defaultdict(here.default_factory, items)
        return kind(items)

    class_name = None if kind is dict else _class_name(here)
    return _Parts("dict", tuple(keys), [here[k] for k in keys], rebuild, class_name)


def _registered_parts(here: Any) -> _Parts | None:
    """A container of a type that somebody registered with JAX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX warns of generators; we refuse
        flat, treedef = jax.tree_util.tree_flatten_with_path(here, is_leaf=lambda x: x is not here)
    if [path for path, _ in flat] == [()]:
        return None
    keys = [_plain_key(path[0]) for path, _ in flat]
    children = [child for _, child in flat]
    numbered = bool(keys) and (keys == list(range(len(keys))) or not _are_names(keys))
    return _Parts(
        "items" if numbered else "object",
        None if numbered else tuple(keys),
        children,
        functools.partial(jax.tree_util.tree_unflatten, treedef),
        _class_name(here),
    )


def _are_names(keys: list[Any]) -> bool:
    """Whether keys of a custom node tell its children apart and can be stored."""
    return all(map(is_storable_key, keys)) and len({(type(k), k) for k in keys}) == len(keys)


def _plain_key(entry: Any) -> Any:
    for field in ("key", "name", "idx"):  # DictKey and FlattenedIndexKey, GetAttrKey, SequenceKey
        if hasattr(entry, field):
            return getattr(entry, field)
    return str(entry)


def _class_name(here: Any) -> str:
    return f"{type(here).__module__}.{type(here).__qualname__}"


# From a description alone -------------------------------------------------------------------


def build(spec: TreeSpec, values: list[Any]) -> Any:
    """Plain containers from a description: dicts, lists, tuples, fresh named tuples.

    Leaves that are `ABSENT` are left out: of dicts by key; a sequence or named tuple that lost one
    becomes a dict by index or field, so that nothing moves to another's place. A container that
    lost everything goes too.
    """
    return None if (built := _build(spec.root, values)) is ABSENT else built


def _build(node: Node | int, values: list[Any]) -> Any:
    if isinstance(node, int):
        return values[node]
    keys = child_keys(node)
    children = [_build(child, values) for child in node.children]
    kept = [(k, c) for k, c in zip(keys, children, strict=True) if c is not ABSENT]
    if len(kept) < len(children):
        return dict(kept) if kept else ABSENT
    match node.type:
        case "list" | "items":
            return children
        case "tuple":
            return tuple(children)
        case "namedtuple":
            return _fresh_namedtuple(node)._make(children)
    return dict(kept)


def _fresh_namedtuple(node: Node) -> Any:
    """A named tuple type with the saved fields; one that Python refuses gets its position."""
    name = (node.class_name or "").rpartition(".")[2]
    usable = name.isidentifier() and not keyword.iskeyword(name)
    fields = [str(key) for key in node.keys]
    return collections.namedtuple(name if usable else "Saved", fields, rename=True)  # noqa: PYI024


def put(tree: Any, name: str, value: Any) -> Any:
    """Put a renamed leaf at its new place: into dicts, made where there are none.

    Returns:
      The tree, which is a new one if there was none.

    Raises:
      ValueError: something that is no dict is in the way.
    """
    if not name:
        return value
    tree = {} if tree is None else tree
    here = tree
    *parents, last = name.split("/")
    for part in parents:
        here = _dict_at(here, part, name)
    _dict_at({"": here}, "%", name)  # the last one must be a dict too
    here[_key_at(here, last)] = value
    return tree


def _dict_at(here: Any, component: str, name: str) -> Any:
    found = here.setdefault(_key_at(here, component), {}) if isinstance(here, dict) else here
    if not isinstance(found, dict):
        raise ValueError(f"{name!r}: rename puts it into a {type(found).__name__}")  # noqa: TRY004
    return found


def _key_at(here: dict[Any, Any], component: str) -> Any:
    """The key of a dict that has this component as its name; a string if there is none yet."""
    keys = list(here)
    return dict(zip(components(keys), keys, strict=True)).get(component, unescape(component))
