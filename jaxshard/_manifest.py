"""`manifest.json`: the one description of a checkpoint, whose presence is the commit.

Canonical JSON (sorted keys, no spaces, ASCII, no NaN) that ends with the xxh3-128 of its own
bytes. Reading validates every field that anything later relies on: paths stay below the
checkpoint, shapes and grids fit together, every leaf is in the tree once. Pure.

Format: docs/format.md, "Manifest".
"""

import contextlib
import dataclasses
import functools
import gc
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash

from jaxshard import _dtypes, _keypaths
from jaxshard._errors import CorruptionError, FormatError, Kind
from jaxshard._spec import (
    DEPTH_MAX,
    KINDS,
    NODE_TYPES,
    Layout,
    LeafSpec,
    MeshSpec,
    Node,
    TreeSpec,
    walk,
)

FORMAT_VERSION = 1
FILE = "manifest.json"
_ATTEMPT = re.compile(r"a-[0-9a-f]{8,32}")
_END = re.compile(rb',"xxh3_128":"([0-9a-f]{32})"\}\n\Z')
_HEAD = re.compile(rb'\A\{"a_format":"jaxshard","a_version":(\d{1,9}),')
_NUMPY_DIMS_MAX = 64
_INT = {int}  # and not bool
# What reading a field that is missing or of another type can raise.
_MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What the manifest says of the files of one process."""

    table_bytes: int
    table_digest: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its data."""

    attempt: str
    nonce: str
    step: int | None
    created: str
    metadata: Mapping[str, Any]
    environment: Mapping[str, Any]
    compression: str | None
    tree: TreeSpec
    processes: tuple[ProcessRecord, ...]
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file."""
        leaves, templates = _leaves_to_json(self.tree.leaves)
        body = {
            # `a_` sorts first: a reader finds format and version before anything else.
            "a_format": "jaxshard",
            "a_version": self.version,
            "attempt": self.attempt,
            "compression": self.compression,
            "created": self.created,
            "environment": dict(self.environment),
            "epoch": None,
            "leaves": leaves,
            "meshes": [mesh._asdict() for mesh in self.tree.meshes],
            "metadata": dict(self.metadata),
            "nonce": self.nonce,
            "processes": [
                {"iterators": None, "table_bytes": p.table_bytes, "table_xxh3_128": p.table_digest}
                for p in self.processes
            ],
            "step": self.step,
            "templates": templates,
            "tree": _node_to_json(self.tree.root),
        }
        text = canonical(body)
        digest = xxhash.xxh3_128_hexdigest(text)
        return text[:-1] + f',"xxh3_128":"{digest}"}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Read and validate a manifest.

        Raises:
          CorruptionError: cut or changed: it does not end with the digest of its bytes.
          FormatError: another program's file, a newer version, or fields that do not fit together.
        """
        head = _HEAD.match(data)
        if head is not None and int(head[1]) > FORMAT_VERSION:
            raise FormatError(
                f"{path}: expected format version {FORMAT_VERSION} or older, "
                f"found version {int(head[1])}",
                kind=Kind.FORMAT_VERSION,
                path=path,
                hint="pip install --upgrade jaxshard",
            )
        end = _END.search(data[-64:])
        if head is None or end is None:
            raise _damaged(path, "cut, or not written by jaxshard")
        body = data[: len(data) - len(end[0])] + b"}"
        if xxhash.xxh3_128_hexdigest(body).encode() != end[1]:
            raise _damaged(path, "its bytes do not have the digest that it ends with")
        try:
            with _collector_paused():
                return _from_json(json.loads(body))
        except _UnfitError as e:
            raise FormatError(f"{path}: the manifest does not fit together: {e}", path=path) from e
        except FormatError as e:
            raise FormatError(f"{path}: {e}", path=path) from e
        except _MALFORMED as e:
            raise FormatError(
                f"{path}: a field is missing or of the wrong type: {e!r:.200}", path=path
            ) from e

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, each shared one once."""
        return sum(leaf.nbytes for leaf in self.tree.leaves if leaf.same_as is None)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection while a million objects are made that all stay.

    It would look at all of them again and again: 2.7 s instead of 0.9 s for 100,000 leaves.
    (benchmarks/scale.py)
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def canonical(value: Any) -> bytes:
    """Canonical JSON: one text for one value.

    Raises:
      ValueError: a NaN or an infinity, which JSON does not have.
      TypeError: a value that JSON does not have.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _damaged(path: str, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path}: the manifest is damaged: {why}",
        kind=Kind.MANIFEST_DAMAGED,
        path=path,
        hint="load another step, or restore this file from a copy",
    )


# To JSON ------------------------------------------------------------------------------------


def _leaves_to_json(leaves: Iterable[LeafSpec]) -> tuple[list[Any], list[Any]]:
    """Leaves and templates: what arrays have in common is written once.

    A manifest of 100,000 leaves has 8 MB instead of 33, and is opened in half the time.
    (benchmarks/scale.py)
    """
    out: list[dict[str, Any]] = []
    templates: dict[LeafSpec, int] = {}
    for leaf in leaves:
        if leaf.layout is None:
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


# From JSON, with every check ----------------------------------------------------------------


def _from_json(body: dict[str, Any]) -> Manifest:
    _require(_ATTEMPT.fullmatch(body["attempt"]) is not None, "attempt", body["attempt"])
    _require(body["epoch"] is None or type(body["epoch"]) is int, "epoch", body["epoch"])
    step = body["step"]
    _require(step is None or (type(step) is int and step >= 0), "step", step)
    _require(body["compression"] in (None, "zstd"), "compression", body["compression"])
    meshes = tuple(MeshSpec(*(tuple(m[f]) for f in MeshSpec._fields)) for m in body["meshes"])
    templates = [_template_from_json(t, meshes) for t in body["templates"]]
    leaves = tuple(_leaves_from_json(body["leaves"], templates, meshes))
    _require(len({leaf.name for leaf in leaves}) == len(leaves), "leaves", "a name twice")
    for leaf in leaves:
        if leaf.same_as is not None:
            first = leaves[leaf.same_as] if 0 <= leaf.same_as < len(leaves) else None
            _require(_is_same(first, leaf), f"leaf {leaf.name!r}, same_as", leaf.same_as)
    seen: list[int] = []
    root = _node_from_json(body["tree"], seen, 0)
    _require(seen == list(range(len(leaves))), "tree", "its leaves are not numbered in order")
    for name, node in walk(root):
        _require(isinstance(node, Node) or leaves[node].name == name, "tree, name", name)
    processes = tuple(
        ProcessRecord(int(p["table_bytes"]), str(p["table_xxh3_128"])) for p in body["processes"]
    )
    _require(bool(processes), "processes", "none")
    _require(isinstance(body["metadata"], dict), "metadata", body["metadata"])
    return Manifest(
        attempt=body["attempt"],
        nonce=str(body["nonce"]),
        step=step,
        created=str(body["created"]),
        metadata=body["metadata"],
        environment=dict(body["environment"]),
        compression=body["compression"],
        tree=TreeSpec(root, leaves, meshes),
        processes=processes,
        version=body["a_version"],
    )


def _is_same(first: LeafSpec | None, leaf: LeafSpec) -> bool:
    """Whether one leaf can be the same array as another one."""
    if first is None or first.layout is None or first.same_as is not None:
        return False
    fields = ("kind", "dtype", "shape", "array_shape", "key_impl")
    return all(getattr(first, f) == getattr(leaf, f) for f in fields)


class _UnfitError(Exception):
    """A field that no manifest of ours has: where it is, and what was found there."""

    def __init__(self, what: str, found: str) -> None:
        super().__init__(f"{what}: {found}")
        self.what = what
        self.found = found


def _require(condition: bool, what: str, found: Any) -> None:  # noqa: FBT001
    if not condition:
        raise _UnfitError(what, f"{found!r:.80}")


def _leaves_from_json(
    body: list[Any], templates: list[LeafSpec], meshes: tuple[MeshSpec, ...]
) -> Iterator[LeafSpec]:
    for number, leaf in enumerate(body):
        try:
            name = leaf["name"]
            _require(isinstance(name, str), "name", name)
            if "template" in leaf:
                yield _array_from_json(name, leaf, templates)
            else:
                yield _leaf_from_json(name, leaf, meshes)
        except _UnfitError as e:
            raise _UnfitError(f"leaf {number} ({name!r:.80}), {e.what}", e.found) from e


def _array_from_json(name: str, leaf: dict[str, Any], templates: list[LeafSpec]) -> LeafSpec:
    """A leaf that says itself only what it does not have in common with others."""
    number = leaf["template"]
    _require(type(number) is int and 0 <= number < len(templates), "template", number)
    template = templates[number]
    assert template.layout is not None
    path = leaf.get("path", name)
    _require(_keypaths.is_safe_path(path), "path", path)
    layout = template.layout._replace(path=path)
    out: LeafSpec = template._replace(name=name, digest=leaf["digest"], layout=layout)
    return out


def _shape(value: Any, what: str) -> tuple[int, ...]:
    fits = isinstance(value, list) and len(value) <= _NUMPY_DIMS_MAX and {*map(type, value)} <= _INT
    _require(fits and (not value or (min(value) >= 0 and max(value) < 1 << 62)), what, value)
    return tuple(value)


def _template_from_json(template: dict[str, Any], meshes: tuple[MeshSpec, ...]) -> LeafSpec:
    try:
        _require("layout" in template and "value" not in template, "no array", template)
        layout = {**template["layout"], "path": "of the leaf"}
        return _leaf_from_json("", {**template, "layout": layout}, meshes)
    except _UnfitError as e:
        raise _UnfitError(f"template, {e.what}", e.found) from e


def _leaf_from_json(name: str, leaf: dict[str, Any], meshes: tuple[MeshSpec, ...]) -> LeafSpec:
    """A leaf that says all of itself."""
    _require(leaf["kind"] in KINDS, "kind", leaf["kind"])
    dtype = leaf.get("dtype")
    _require(dtype is None or _dtypes.is_known(dtype), "dtype", dtype)
    mesh, spec = leaf.get("mesh"), leaf.get("spec")
    known_mesh = mesh is None or (type(mesh) is int and 0 <= mesh < len(meshes))
    _require(known_mesh, "mesh", mesh)
    shape = _shape(leaf["shape"], "shape") if "shape" in leaf else None
    array_shape = shape
    if "array_shape" in leaf:
        array_shape = _shape(leaf["array_shape"], "array_shape")
    layout = None
    if "layout" in leaf:
        _require(dtype is not None and array_shape is not None, "layout", "without a shape")
        layout = _layout_from_json(leaf["layout"], str(dtype), array_shape or ())
    _require_kind(leaf, dtype, shape, array_shape)
    needs_layout = array_shape is not None and leaf.get("same_as") is None
    _require(needs_layout == (layout is not None), "layout", "does not fit the array")
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
    elif kind in {"str", "bytes"}:
        fits = array_shape is None or (dtype == "uint8" and len(array_shape) == 1)
    else:
        fits = array_shape is None and (kind != "numpy_scalar" or dtype is not None)
    _require(fits and (impl is None or kind == "key"), "kind", kind)


def _layout_from_json(layout: dict[str, Any], dtype: str, array_shape: tuple[int, ...]) -> Layout:
    path = layout["path"]
    _require(_keypaths.is_safe_path(path), "path", path)
    per_byte = layout["per_byte"]
    _require(type(per_byte) is int, "elements in a byte", per_byte)
    grid = (
        layout["dtype"],
        per_byte,
        _shape(layout["shape"], "layout shape"),
        _shape(layout["piece"], "piece"),
        _shape(layout["tile"], "tile"),
        layout["packed"] is True,
    )
    what = _layout_misfit(Layout("", *grid), dtype, array_shape)
    _require(what is None, what or "", layout)
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


def stored_shape(array_shape: tuple[int, ...], per_byte: int) -> tuple[int, ...]:
    """Shape in stored elements: the last axis is packed `per_byte` to one."""
    if per_byte == 1 or not array_shape:
        return array_shape
    return (*array_shape[:-1], math.ceil(array_shape[-1] / per_byte))


def _node_from_json(node: Any, seen: list[int], depth: int) -> Node | int:
    _require(depth <= DEPTH_MAX, "tree", f"deeper than {DEPTH_MAX}")
    if type(node) is int:
        seen.append(node)
        return node
    _require(node["type"] in NODE_TYPES, "tree, node type", node["type"])
    children = tuple(_node_from_json(child, seen, depth + 1) for child in node["nodes"])
    keys = tuple(_keypaths.from_json(key) for key in node.get("keys", ()))
    class_name = node.get("class")
    _require(class_name is None or isinstance(class_name, str), "tree, class", class_name)
    keyed = node["type"] in {"dict", "namedtuple", "object"}
    _require(len({(type(k), k) for k in keys}) == len(keys), "tree, keys twice", keys)
    _require(len(keys) == (len(children) if keyed else 0), "tree, keys", keys)
    return Node(node["type"], keys, children, class_name)
