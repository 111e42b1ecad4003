"""A TreeSpec as the fields of a manifest, and back with every check that anything later relies on.

Paths stay below the checkpoint, shapes and grids fit together, every leaf is in the tree once.
Pure.

Format: docs/format.md, "Manifest".
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from jaxshard import _dtypes, _keypaths
from jaxshard._spec import (
    DEPTH_MAX,
    KINDS,
    NODE_TYPES,
    Layout,
    LeafSpec,
    MeshSpec,
    Node,
    TreeSpec,
    stored_shape,
    walk,
)

_NUMPY_DIMS_MAX = 64
_INT = {int}  # and not bool


def tree_to_json(tree: TreeSpec) -> dict[str, Any]:
    """The fields of a manifest that describe a tree."""
    leaves, templates = _leaves_to_json(tree.leaves)
    return {
        "leaves": leaves,
        "meshes": [mesh._asdict() for mesh in tree.meshes],
        "templates": templates,
        "tree": _node_to_json(tree.root),
    }


def _leaves_to_json(leaves: Iterable[LeafSpec]) -> tuple[list[Any], list[Any]]:
    """Leaves and templates: what arrays have in common is written once.

    A manifest of 100,000 leaves has 8 MB instead of 33, and is opened in half the time.
    (benchmarks/scale.py)
    """
    out: list[dict[str, Any]] = []
    templates: dict[LeafSpec, int] = {}
    for leaf in leaves:
        if leaf.layout is None or leaf.kind == "iterator":
            out.append(_leaf_to_json(leaf))
            continue
        common = leaf._replace(name="", digest=None, layout=leaf.layout._replace(path=""))
        number = templates.setdefault(common, len(templates))
        own = {"name": leaf.name, "digest": leaf.digest, "template": number}
        if leaf.layout.path != leaf.name:
            own["path"] = leaf.layout.path
        out.append(own)
    return out, [_template_to_json(template) for template in templates]


def _template_to_json(template: LeafSpec) -> dict[str, Any]:
    out = _leaf_to_json(template)
    del out["name"], out["layout"]["path"]
    return out


def _leaf_to_json(leaf: LeafSpec) -> dict[str, Any]:
    """Fields that differ from their defaults, so that 100,000 leaves stay small."""
    out: dict[str, Any] = {"name": leaf.name, "kind": leaf.kind}
    for field in ("container", "dtype", "key_impl", "mesh", "memory_kind", "same_as", "digest"):
        value = getattr(leaf, field)
        if value is not None:
            out[field] = value
    if leaf.weak_type:
        out["weak_type"] = True
    if leaf.committed:
        out["committed"] = True
    if leaf.spec is not None:
        out["spec"] = leaf.spec
    if leaf.value is not None:
        out["value"] = leaf.value
    if leaf.array_shape is not None:
        out["shape"] = leaf.shape
        if leaf.array_shape != leaf.shape:
            out["array_shape"] = leaf.array_shape
    if leaf.layout is not None:
        out["layout"] = leaf.layout._asdict()
    return out


def _node_to_json(node: Node | int) -> Any:
    if isinstance(node, int):
        return node
    out: dict[str, Any] = {
        "type": node.type,
        "nodes": [_node_to_json(child) for child in node.children],
    }
    if node.keys:
        out["keys"] = [_keypaths.to_json(key) for key in node.keys]
    if node.class_name is not None:
        out["class"] = node.class_name
    return out


# From JSON ----------------------------------------------------------------------------------


def tree_from_json(body: dict[str, Any]) -> TreeSpec:
    """The tree that fields of a manifest describe.

    Raises:
      UnfitError: a field that no manifest of ours has.
      FormatError: a key of a type that the format does not have.
    """
    meshes = tuple(MeshSpec(*(tuple(m[f]) for f in MeshSpec._fields)) for m in body["meshes"])
    templates = [_template_from_json(t, meshes) for t in body["templates"]]
    leaves = tuple(_leaves_from_json(body["leaves"], templates, meshes))
    require(len({leaf.name for leaf in leaves}) == len(leaves), "leaves", "a name twice")
    for leaf in leaves:
        if leaf.same_as is not None:
            first = leaves[leaf.same_as] if 0 <= leaf.same_as < len(leaves) else None
            require(_is_same(first, leaf), f"leaf {leaf.name!r}, same_as", leaf.same_as)
    seen: list[int] = []
    root = _node_from_json(body["tree"], seen, 0)
    require(seen == list(range(len(leaves))), "tree", "its leaves are not numbered in order")
    for name, node in walk(root):
        require(isinstance(node, Node) or leaves[node].name == name, "tree, name", name)
    return TreeSpec(root, leaves, meshes)


def _is_same(first: LeafSpec | None, leaf: LeafSpec) -> bool:
    """Whether one leaf can be the same array as another one."""
    if first is None or first.layout is None or first.same_as is not None:
        return False
    fields = ("kind", "dtype", "shape", "array_shape", "key_impl")
    return all(getattr(first, f) == getattr(leaf, f) for f in fields)


class UnfitError(Exception):
    """A field that no manifest of ours has: where it is, and what was found there."""

    def __init__(self, what: str, found: str) -> None:
        super().__init__(f"{what}: {found}")
        self.what = what
        self.found = found


def require(condition: bool, what: str, found: Any) -> None:  # noqa: FBT001  (reads as assert)
    """Raise UnfitError unless a condition holds."""
    if not condition:
        raise UnfitError(what, f"{found!r:.80}")


def _leaves_from_json(
    body: list[Any], templates: list[LeafSpec], meshes: tuple[MeshSpec, ...]
) -> Iterator[LeafSpec]:
    for number, leaf in enumerate(body):
        try:
            name = leaf["name"]
            require(isinstance(name, str), "name", name)
            if "template" in leaf:
                yield _array_from_json(name, leaf, templates)
            else:
                yield _leaf_from_json(name, leaf, meshes)
        except UnfitError as e:
            raise UnfitError(f"leaf {number} ({name!r:.80}), {e.what}", e.found) from e


def _array_from_json(name: str, leaf: dict[str, Any], templates: list[LeafSpec]) -> LeafSpec:
    """A leaf that says itself only what it does not have in common with others."""
    number = leaf["template"]
    require(type(number) is int and 0 <= number < len(templates), "template", number)
    template = templates[number]
    assert template.layout is not None
    path = leaf.get("path", name)
    require(_keypaths.is_safe_path(path), "path", path)
    layout = template.layout._replace(path=path)
    out: LeafSpec = template._replace(name=name, digest=leaf["digest"], layout=layout)
    return out


def _shape(value: Any, what: str) -> tuple[int, ...]:
    fits = isinstance(value, list) and len(value) <= _NUMPY_DIMS_MAX and {*map(type, value)} <= _INT
    require(fits and (not value or (min(value) >= 0 and max(value) < 1 << 62)), what, value)
    return tuple(value)


def _template_from_json(template: dict[str, Any], meshes: tuple[MeshSpec, ...]) -> LeafSpec:
    try:
        require("layout" in template and "value" not in template, "no array", template)
        layout = {**template["layout"], "path": "of the leaf"}
        return _leaf_from_json("", {**template, "layout": layout}, meshes)
    except UnfitError as e:
        raise UnfitError(f"template, {e.what}", e.found) from e


def _leaf_from_json(name: str, leaf: dict[str, Any], meshes: tuple[MeshSpec, ...]) -> LeafSpec:
    """A leaf that says all of itself."""
    require(leaf["kind"] in KINDS, "kind", leaf["kind"])
    dtype = leaf.get("dtype")
    require(dtype is None or _dtypes.is_known(dtype), "dtype", dtype)
    mesh, spec = leaf.get("mesh"), leaf.get("spec")
    known_mesh = mesh is None or (type(mesh) is int and 0 <= mesh < len(meshes))
    require(known_mesh, "mesh", mesh)
    shape = _shape(leaf["shape"], "shape") if "shape" in leaf else None
    array_shape = shape
    if "array_shape" in leaf:
        array_shape = _shape(leaf["array_shape"], "array_shape")
    layout = None
    if "layout" in leaf:
        require(dtype is not None and array_shape is not None, "layout", "without a shape")
        layout = _layout_from_json(leaf["layout"], str(dtype), array_shape or ())
    _require_kind(leaf, dtype, shape, array_shape)
    if leaf["kind"] == "iterator":
        _require_iterator(leaf.get("value"), inline=shape is None)
    needs_layout = array_shape is not None and leaf.get("same_as") is None
    require(needs_layout == (layout is not None), "layout", "does not fit the array")
    return LeafSpec(
        name=name,
        kind=leaf["kind"],
        container=leaf.get("container"),
        dtype=dtype,
        shape=shape or (),
        array_shape=array_shape,
        weak_type=leaf.get("weak_type") is True,
        committed=leaf.get("committed") is True,
        key_impl=leaf.get("key_impl"),
        spec=None if spec is None else _partition(spec),
        mesh=mesh,
        memory_kind=leaf.get("memory_kind"),
        value=leaf.get("value"),
        same_as=leaf.get("same_as"),
        layout=layout,
        digest=leaf.get("digest"),
    )


def _partition(spec: list[Any]) -> tuple[Any, ...]:
    return tuple([tuple(a) if type(a) is list else a for a in spec])


def _require_kind(
    leaf: dict[str, Any],
    dtype: Any,
    shape: tuple[int, ...] | None,
    array_shape: tuple[int, ...] | None,
) -> None:
    """A leaf has what values of its kind are made of, and nothing that they are not made of."""
    kind, impl = leaf["kind"], leaf.get("key_impl")
    if kind == "array":
        fits = dtype is not None and shape is not None and array_shape == shape
    elif kind == "key":
        longer = None not in (shape, array_shape) and array_shape[: len(shape)] == shape  # type: ignore[index,arg-type]
        fits = dtype == "uint32" and longer and isinstance(impl, str)
    elif kind in {"str", "bytes", "iterator"}:
        fits = array_shape is None or (dtype == "uint8" and len(array_shape) == 1)
    else:
        fits = array_shape is None and (kind != "numpy_scalar" or dtype is not None)
    require(fits and (impl is None or kind == "key"), "kind", kind)


def _require_iterator(value: Any, *, inline: bool) -> None:
    types = {"class": str, "elastic": bool, "processes": int, "settings": dict}
    fits = isinstance(value, dict) and all(type(value.get(k)) is t for k, t in types.items())
    require(fits and ("state" in value) == inline, "iterator", value)


def _layout_from_json(layout: dict[str, Any], dtype: str, array_shape: tuple[int, ...]) -> Layout:
    path = layout["path"]
    require(_keypaths.is_safe_path(path), "path", path)
    per_byte = layout["per_byte"]
    require(type(per_byte) is int, "elements in a byte", per_byte)
    grid = (
        layout["dtype"],
        per_byte,
        _shape(layout["shape"], "layout shape"),
        _shape(layout["piece"], "piece"),
        _shape(layout["tile"], "tile"),
        layout["packed"] is True,
    )
    what = _layout_misfit(Layout("", *grid), dtype, array_shape)
    require(what is None, what or "", layout)
    return Layout(path, *grid)


@functools.lru_cache(maxsize=1024)
def _layout_misfit(layout: Layout, dtype: str, array_shape: tuple[int, ...]) -> str | None:
    """What in a layout does not fit its leaf; remembered, since many leaves share a layout."""
    if layout.dtype != _dtypes.stored_dtype(dtype):
        return "stored dtype"
    if layout.per_byte not in (1, _dtypes.elements_per_byte(dtype)):
        return "elements in a byte"
    if layout.shape != stored_shape(array_shape, layout.per_byte):
        return "layout shape"
    same_rank = len(layout.shape) == len(layout.piece) == len(layout.tile)
    divides = same_rank and all(
        t > 0 and p > 0 and p % t == 0 for p, t in zip(layout.piece, layout.tile, strict=True)
    )
    return None if divides else "tiles"


def _node_from_json(node: Any, seen: list[int], depth: int) -> Node | int:
    require(depth <= DEPTH_MAX, "tree", f"deeper than {DEPTH_MAX}")
    if type(node) is int:
        seen.append(node)
        return node
    require(node["type"] in NODE_TYPES, "tree, node type", node["type"])
    children = tuple(_node_from_json(child, seen, depth + 1) for child in node["nodes"])
    keys = tuple(_keypaths.from_json(key) for key in node.get("keys", ()))
    class_name = node.get("class")
    require(class_name is None or isinstance(class_name, str), "tree, class", class_name)
    keyed = node["type"] in {"dict", "namedtuple", "object"}
    require(len({(type(k), k) for k in keys}) == len(keys), "tree, keys twice", keys)
    require(len(keys) == (len(children) if keyed else 0), "tree, keys", keys)
    return Node(node["type"], keys, children, class_name)
