"""Shapes, types, partitions, meshes and values of leaves in few words."""

import json
from collections.abc import Mapping
from typing import Any

from jaxshard._errors import FormatError
from jaxshard._spec import LeafSpec, MeshSpec, decode_value

VALUE_MAX = 60
TIMES = " \N{MULTIPLICATION SIGN} "


def shape(sides: tuple[int, ...]) -> str:
    """`64 x 128`; of a 0-d array `()`."""
    return TIMES.join(map(str, sides)) or "()"


def dtype(leaf: LeafSpec) -> str:
    """The element type of a leaf with elements, else its kind."""
    if leaf.kind == "key":
        return f"key<{leaf.key_impl}>"
    if leaf.kind == "array":
        return f"{leaf.dtype}{' weak' if leaf.weak_type else ''}"
    if leaf.kind == "iterator":
        return leaf.describe().removeprefix("an ")
    return {"numpy_scalar": f"{leaf.dtype}"}.get(leaf.kind, leaf.kind)


def partitions(spec: tuple[Any, ...] | None) -> str:
    """`P(data, None)`; nothing for a leaf without a partition spec."""
    return "" if spec is None else f"P({', '.join(map(_axis, spec))})"


def _axis(names: Any) -> str:
    return f"({', '.join(map(str, names))})" if isinstance(names, tuple) else str(names)


def mesh(axes: MeshSpec) -> str:
    """`data 2 x model 4`."""
    return TIMES.join(f"{n} {size}" for n, size in zip(axes.names, axes.sizes, strict=False))


def value(leaf: LeafSpec) -> str:
    """The value of a leaf that is kept in the manifest; nothing for others."""
    if leaf.has_array or leaf.kind in {"none", "function"}:
        return ""
    try:
        return cut(repr(decode_value(leaf)))
    except (FormatError, ValueError):  # damaged, or an int that is too long for decimal digits
        return cut(str(leaf.value))


def cut(words: str) -> str:
    """The beginning of a long text."""
    return words if len(words) <= VALUE_MAX else f"{words[: VALUE_MAX - 1]}…"


def plain(document: Mapping[str, Any]) -> dict[str, str]:
    """Values of a JSON object as texts: strings as they are, others as JSON."""
    return {
        name: found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        for name, found in document.items()
    }


def saved_at(created: str) -> str:
    """The time of a commit, to the second."""
    return f"{created[:19].replace('T', ' ')} UTC"
