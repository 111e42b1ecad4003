"""Typed keys of a tree <-> components of leaf names and of storage paths.

A leaf's name is its path, components joined by `/`. Each component is an escaped text of one key,
one to one among its siblings: `{"a": {"b": x}, "a.b": y, "a/b": z}` gives the names `a/b`, `a.b`
and `a%2Fb`. The typed key itself (a dict key with its type, an attribute, an index) is kept in the
manifest, so that an int comes back as an int. Storage paths are the names, except where a file
system would mix two of them up or refuse one. Pure.

Format: docs/format.md, "Names".
"""

import hashlib
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxshard._errors import FormatError

# Kept as they are. Left out on purpose: `/` and `\\` (separators), `%` (the escape), `*?{}[]`
# (patterns), `:"<>|` and control characters (refused by some file systems), and everything beyond
# ASCII (file systems differ in how they normalise it).
_PLAIN = frozenset(string.ascii_letters + string.digits + " _-.+=@,()'!#$&;^~")
_ALL_PLAIN = re.compile(f"[{re.escape(''.join(sorted(_PLAIN)))}]+")
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")
_COMPONENT_BYTES_MAX = 200  # most file systems stop at 255; TensorStore adds a suffix of its own
_PATH_BYTES_MAX = 900  # object stores stop at 1,024 for the whole key
ROOT_PATH = "%"  # storage path of a tree that is one bare leaf, whose name is ""

DICT_KEY_TYPES = (str, int, bool, float, bytes, tuple, type(None))


def escape(text: str) -> str:
    """Escape a text so that it can be a component of a name; injective.

    Bytes outside a plain set become `%XX`; the empty text becomes a lone `%`.
    """
    if not text:
        return "%"
    out = text
    if not _ALL_PLAIN.fullmatch(text):
        raw = text.encode("utf-8", "surrogatepass")
        out = "".join(chr(b) if chr(b) in _PLAIN else f"%{b:02X}" for b in raw)
    if out in {".", ".."} or out.casefold() == "zarr.json" or out.startswith("__"):
        # `.` and `..` walk directories, the others are taken by Zarr v3.
        out = f"%{ord(out[0]):02X}{out[1:]}"
    return out


def unescape(component: str) -> str:
    """The text that `escape` made a component of."""
    if component == "%":
        return ""
    raw = component.encode("utf-8", "surrogatepass")
    out = _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), raw)
    return out.decode("utf-8", "surrogatepass")


def key_text(key: Any) -> str:
    """Readable text of one dict key, attribute or index, before escaping."""
    if isinstance(key, str):
        return key
    if isinstance(key, tuple):
        return "(" + ",".join(repr(k) if isinstance(k, str) else key_text(k) for k in key) + ")"
    return repr(key)


def components(keys: Sequence[Any]) -> list[str]:
    """Name components of the children of one node, all different.

    Where two siblings have the same text (the keys `1` and `"1"`), those that are not strings get
    a `%` and their type in front, which no escaped text can begin with.
    """
    plain = [escape(key_text(k)) for k in keys]
    count = Counter(plain)
    return [
        text if count[text] == 1 or isinstance(key, str) else f"%{type(key).__name__}~{text}"
        for text, key in zip(plain, keys, strict=True)
    ]


def storage_paths(names: Iterable[str]) -> list[str]:
    """Paths below `data/` for leaf names: the name itself wherever a file system allows it.

    A component that is too long, and a name that differs from another one only by case, is cut
    and ends in a hash of the name, so that it stays one to one.
    """
    names = list(names)
    folded = Counter(prefix.casefold() for prefix in _distinct_prefixes(names))
    return [_storage_path(name, folded) for name in names]


def _distinct_prefixes(names: list[str]) -> set[str]:
    """Every name and every group above one, each once."""
    prefixes: set[str] = set()
    for name in names:
        parts = name.split("/")
        prefixes.update("/".join(parts[: i + 1]) for i in range(len(parts)))
    return prefixes


def _storage_path(name: str, folded: Counter[str]) -> str:
    if not name:
        return ROOT_PATH
    parts = name.split("/")
    stored = []
    for i, part in enumerate(parts):
        prefix = "/".join(parts[: i + 1])
        clash = folded[prefix.casefold()] > 1
        stored.append(_hashed(part, prefix) if clash or len(part) > _COMPONENT_BYTES_MAX else part)
    path = "/".join(stored)
    return path if len(path) <= _PATH_BYTES_MAX else _hashed(parts[-1], name)


def _hashed(component: str, of: str) -> str:
    digest = hashlib.blake2b(of.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{component[: _COMPONENT_BYTES_MAX // 2]}%~{digest}"


def is_safe_path(path: str) -> bool:
    """Whether a storage path read from a manifest stays below its directory."""
    parts = path.split("/")
    return all(p and p not in {".", ".."} and "\0" not in p and "\\" not in p for p in parts)


def sort_key(key: Any) -> tuple[str, Any]:
    """Total order of dict keys of mixed types: by type, then by value; `2` before `10`."""
    if isinstance(key, tuple):
        return ("tuple", tuple(sort_key(k) for k in key))
    return (type(key).__name__, "" if key is None else key)


def to_json(key: Any) -> Any:
    """A typed key as JSON: strings and ints as themselves, other types tagged."""
    match key:
        case bool():
            return {"bool": key}
        case str() | int():
            return key
        case None:
            return {"none": None}
        case float():
            return {"float": key.hex()}
        case bytes():
            return {"bytes": key.hex()}
        case tuple():
            return {"tuple": [to_json(k) for k in key]}
    raise TypeError(f"{type(key).__name__} is no dict key that can be stored")


def from_json(value: Any) -> Any:
    """The typed key that `to_json` wrote."""
    match value:
        case bool():
            pass
        case str() | int():
            return value
        case {"bool": bool(key)} if len(value) == 1:
            return key
        case {"none": None} if len(value) == 1:
            return None
        case {"float": str(text)} if len(value) == 1:
            return _parsed(float.fromhex, text)
        case {"bytes": str(text)} if len(value) == 1:
            return _parsed(bytes.fromhex, text)
        case {"tuple": list(keys)} if len(value) == 1:
            return tuple(from_json(k) for k in keys)
    raise FormatError(f"manifest: expected a dict key, found {value!r:.80}")


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except (ValueError, OverflowError) as e:
        raise FormatError(f"manifest: expected a dict key in hex, found {text!r:.80}") from e


def is_storable_key(key: Any) -> bool:
    """Whether a dict key is of a type that comes back as itself."""
    if type(key) is tuple:
        return all(is_storable_key(k) for k in key)
    return type(key) in DICT_KEY_TYPES and key == key  # noqa: PLR0124  (a NaN key finds nothing)
