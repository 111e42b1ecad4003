"""A training state as plain data: what the tree looks like and what each leaf is, without values.

`TreeSpec` is what `_trees` makes of a pytree, what `_plan` cuts into pieces, and what the manifest
keeps. Pure: no jax.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple

from jaxshard import _dtypes, _statejson
from jaxshard._errors import FormatError
from jaxshard._keypaths import components

Kind = Literal[
    "array", "key", "numpy_scalar", "bool", "int", "float", "complex", "str", "bytes", "none",
    "function", "iterator",
]  # fmt: skip
KINDS: tuple[str, ...] = Kind.__args__  # type: ignore[attr-defined]
INLINE_BYTES_MAX = 4096  # longer strings, bytes and states are stored as arrays of uint8
DEPTH_MAX = 256

NodeType = Literal["dict", "list", "tuple", "namedtuple", "object", "items"]
NODE_TYPES: tuple[str, ...] = NodeType.__args__  # type: ignore[attr-defined]


class MeshSpec(NamedTuple):
    """Axes of a device mesh: names, sizes, and axis types (`Auto`, `Explicit`, `Manual`)."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    types: tuple[str, ...]


class Layout(NamedTuple):
    """How the elements of one leaf lie in storage.

    Shapes are in *stored* elements: for a packed sub-byte leaf the last axis counts bytes.
    """

    path: str  # below data/
    dtype: str  # Zarr data type
    per_byte: int  # logical elements in one stored element of the last axis
    shape: tuple[int, ...]
    piece: tuple[int, ...]
    tile: tuple[int, ...]
    packed: bool  # pieces lie in the packs, not below data/

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return _dtypes.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored elements."""
        return math.prod(self.shape) * self.itemsize


class LeafSpec(NamedTuple):
    """One leaf: what it is, where it lay, and (once planned) how it is stored.

    A named tuple, since `_replace` takes a tenth of the time of `dataclasses.replace`.

    `shape` is that of the leaf as the user sees it. `array_shape` is that of its elements: for
    keys it has the words of a key behind `shape`.
    """

    name: str
    kind: Kind
    container: Literal["jax", "numpy"] | None = None
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    array_shape: tuple[int, ...] | None = None
    weak_type: bool = False
    committed: bool = False
    key_impl: str | None = None
    spec: tuple[Any, ...] | None = None
    mesh: int | None = None
    memory_kind: str | None = None
    value: Any = None
    same_as: int | None = None
    layout: Layout | None = None
    digest: str | None = None

    @property
    def has_array(self) -> bool:
        """Whether the value is an array of elements in storage (else it is in the manifest)."""
        return self.array_shape is not None

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take in memory; 0 for values kept in the manifest."""
        if self.array_shape is None or self.dtype is None:
            return 0
        return math.prod(self.array_shape) * _dtypes.itemsize(self.dtype)

    def describe(self) -> str:
        """A short text for messages: `float32[4,4]`, `key<rbg>[8]`, `int`."""
        dims = f"[{','.join(map(str, self.shape))}]"
        if self.kind == "array":
            weak = " weak" if self.weak_type else ""
            return f"{self.dtype}{dims}{weak}"
        if self.kind == "key":
            return f"key<{self.key_impl}>{dims}"
        if self.kind == "numpy_scalar":
            return f"numpy scalar {self.dtype}"
        if self.kind == "iterator":
            return f"an iterator {str(self.value['class']).rpartition('.')[2]}"
        return {"none": "None", "function": "a function"}.get(self.kind, f"Python {self.kind}")


def stored_shape(array_shape: tuple[int, ...], per_byte: int) -> tuple[int, ...]:
    """Shape in stored elements: the last axis is packed `per_byte` to one."""
    if per_byte == 1 or not array_shape:
        return array_shape
    return (*array_shape[:-1], math.ceil(array_shape[-1] / per_byte))


def layout_of(leaf: LeafSpec) -> Layout:
    """The layout of a leaf that is stored as an array."""
    assert leaf.layout is not None, leaf.name
    return leaf.layout


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A container: its type, its typed keys, and its children (nodes, or numbers of leaves)."""

    type: NodeType
    keys: tuple[Any, ...]
    children: tuple["Node | int", ...]
    class_name: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TreeSpec:
    """A whole tree; the leaves are numbered in the order in which `root` names them."""

    root: Node | int
    leaves: tuple[LeafSpec, ...]
    meshes: tuple[MeshSpec, ...] = ()

    def first(self, number: int) -> LeafSpec:
        """A leaf; for one that is the same as an earlier one, that one."""
        same_as = self.leaves[number].same_as
        return self.leaves[number if same_as is None else same_as]


def child_keys(node: Node) -> tuple[Any, ...]:
    """Typed keys of the children; sequences count."""
    return tuple(range(len(node.children))) if node.type in _SEQUENCES else node.keys


_SEQUENCES = frozenset({"list", "tuple", "items"})


def walk(root: Node | int) -> Iterator[tuple[str, Node | int]]:
    """Every node and every leaf number with its name, depth first, parents before children."""
    stack: list[tuple[str, Node | int]] = [("", root)]
    while stack:
        name, here = stack.pop()
        yield name, here
        if isinstance(here, Node):
            names = [join(name, c) for c in components(child_keys(here))]
            stack.extend(reversed(list(zip(names, here.children, strict=True))))


def part_of(tree: TreeSpec, chosen: AbstractSet[int]) -> tuple[TreeSpec, list[int]]:
    """The tree with only these leaves; the names stay.

    A sequence or named tuple that lost a leaf becomes a dict by index or field, so that nothing
    moves to another's place; a container that lost everything goes too, and with it what was empty
    beside it. Of leaves that are the same array the first that is chosen gets its data.

    Returns:
      It, and the number that each of its leaves has in `tree`.
    """
    numbers: list[int] = []
    root, _, _ = _part(tree.root, chosen, numbers)
    owners: dict[int, int] = {}
    leaves = []
    for number, old in enumerate(numbers):
        leaf, first = tree.leaves[old], tree.leaves[old].same_as
        owner = owners.setdefault(old if first is None else first, number)
        if owner != number:
            leaf = leaf._replace(same_as=owner)
        elif first is not None:
            whole = tree.leaves[first]
            leaf = leaf._replace(same_as=None, layout=whole.layout, digest=whole.digest)
        leaves.append(leaf)
    empty = Node("dict", (), ())
    return TreeSpec(empty if root is None else root, tuple(leaves), tree.meshes), numbers


def _part(
    node: Node | int, chosen: AbstractSet[int], numbers: list[int]
) -> tuple[Node | int | None, bool, bool]:
    """What stays of a node; whether it lost a leaf, and whether it had one."""
    if isinstance(node, int):
        if node not in chosen:
            return None, True, True
        numbers.append(node)
        return len(numbers) - 1, False, True
    found = [_part(child, chosen, numbers) for child in node.children]
    has_lost = any(lost for _, lost, _ in found)
    each = zip(child_keys(node), found, strict=True)
    there = [(k, part) for k, (part, _, had) in each if part is not None and (had or not has_lost)]
    if has_lost and not there:
        return None, True, True
    keys, parts = tuple(key for key, _ in there), tuple(part for _, part in there)
    had_leaves = any(had for _, _, had in found)
    if len(parts) == len(found):
        return dataclasses.replace(node, children=parts), has_lost, had_leaves
    by_key: NodeType = "object" if node.type == "object" else "dict"
    return Node(by_key, keys, parts, node.class_name), has_lost, had_leaves


def join(parent: str, component: str) -> str:
    """Name of a child."""
    return f"{parent}/{component}" if parent else component


# Values that are kept in the manifest -------------------------------------------------------


def encode_value(kind: str, value: Any) -> Any:
    """A scalar leaf as JSON, exactly: floats with their bits, ints of any size."""
    match kind:
        case "bool":
            return bool(value)
        case "int":
            return hex(value)  # decimal text of a huge int is refused by Python since 3.11
        case "float":
            return struct.pack(">d", value).hex()
        case "complex":
            return struct.pack(">dd", value.real, value.imag).hex()
        case "bytes":
            return value.hex()
        case "numpy_scalar":
            little_endian = value.dtype.newbyteorder("<")
            return value.reshape(1).astype(little_endian).tobytes().hex()
    return value  # str, and None for the kinds without a value


def decode_value(leaf: LeafSpec) -> Any:
    """The scalar that `encode_value` wrote.

    Raises:
      FormatError: the text is not what the kind of the leaf asks for.
    """
    try:
        return _decode(leaf.kind, leaf.dtype, leaf.value)
    except (ValueError, TypeError, KeyError, struct.error) as e:
        raise FormatError(
            f"leaf {leaf.name!r}: expected the value of a {leaf.kind}, found {leaf.value!r:.80}"
        ) from e


def _decode(kind: str, dtype: str | None, value: Any) -> Any:
    match kind:
        case "bool" if isinstance(value, bool):
            return value
        case "int":
            return int(value, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(value))[0]
        case "complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(value)))
        case "bytes":
            return bytes.fromhex(value)
        case "str" if isinstance(value, str):
            return value
        case "none" | "function":
            return None
        case "iterator":
            return _statejson.decode(value["state"])
        case "numpy_scalar":
            import numpy as np  # noqa: PLC0415  (nothing else here needs it)

            wanted = _dtypes.numpy_dtype(str(dtype))
            raw = np.frombuffer(bytes.fromhex(value), wanted.newbyteorder("<"), 1)
            return raw.astype(wanted)[0]
    raise ValueError(kind)
