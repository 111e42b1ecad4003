"""States of iterators <-> JSON: what `get_state` and `state_dict` give, and nothing that could run.

JSON values as they are; everything else is an object with the key `"$"` that says what it is.

Format: docs/format.md, "Iterators".
"""

import base64
import json
import math
from typing import Any

from jaxshard import _dtypes
from jaxshard._errors import FormatError, UnsupportedLeafError, bullet_list

_DEPTH_MAX = 100
_TAG = "$"
_PLAIN = (type(None), bool, int, str)
_MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


def encode(state: Any) -> Any:
    """A state as values that JSON has.

    Raises:
      UnsupportedLeafError: names every value that cannot be stored, and its type.
    """
    offenders: list[str] = []
    encoded = _encode(state, "state", offenders)
    if offenders:
        raise UnsupportedLeafError(
            bullet_list("its state holds what cannot be stored:", tuple(offenders)),
            offenders=tuple(offenders),
            hint="JSON values, bytes, tuples, NumPy arrays and scalars, and torch tensors can be",
        )
    return encoded


def decode(value: Any) -> Any:
    """The state that `encode` was given; torch tensors as such if torch is imported, else NumPy.

    Raises:
      FormatError: it is of no state.
    """
    try:
        return _decode(value)
    except FormatError:
        raise
    except _MALFORMED as e:
        raise FormatError(f"expected the state of an iterator, found {value!r:.80}: {e!r}") from e


def decode_text(text: str) -> Any:
    """The state that was stored as text, outside of a manifest.

    Raises:
      FormatError: the text is of no state.
    """
    try:
        return decode(json.loads(text))
    except ValueError as e:
        raise FormatError(f"expected the state of an iterator, found {text!r:.80}") from e


def _encode(value: Any, where: str, offenders: list[str], depth: int = 0) -> Any:
    if depth > _DEPTH_MAX:
        offenders.append(f"{where[:80]}…: nested deeper than {_DEPTH_MAX} levels")
        return None
    if type(value) in _PLAIN:
        return value
    match value:
        case float() if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
        case bytes() | bytearray():
            return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
        case list() if type(value) is list:
            return [_encode(v, f"{where}[{i}]", offenders, depth + 1) for i, v in enumerate(value)]
        case tuple() if type(value) is tuple:
            return {_TAG: "tuple", "items": _encode(list(value), where, offenders, depth)}
        case dict():
            return _encode_dict(value, where, offenders, depth + 1)
    return _encode_array(value, where, offenders)


def _encode_dict(value: dict[Any, Any], where: str, offenders: list[str], depth: int) -> Any:
    items = [(key, _encode(v, f"{where}[{key!r}]", offenders, depth)) for key, v in value.items()]
    if all(type(key) is str for key in value) and _TAG not in value:
        return dict(items)
    pairs = [[_encode(key, f"{where}, a key", offenders, depth), v] for key, v in items]
    return {_TAG: "dict", "items": pairs}


def _encode_array(value: Any, where: str, offenders: list[str]) -> Any:
    import numpy as np  # noqa: PLC0415  (looking at a manifest needs none)

    kind = type(value).__module__.partition(".")[0]
    library = "numpy"
    if kind == "torch" and hasattr(value, "detach"):
        try:
            value, library = value.detach().cpu().numpy(), "torch"
        except TypeError as e:
            offenders.append(f"{where}: a torch tensor of {value.dtype}: {e}")
            return None
    elif kind in {"jax", "jaxlib"} and hasattr(value, "__array__"):
        offenders.append(f"{where}: a jax.Array; keep it in the tree, beside the iterator")
        return None
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if _dtypes.is_supported(value.dtype):
            raw = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
            return {
                _TAG: library if isinstance(value, np.ndarray) else "numpy_scalar",
                "dtype": value.dtype.name,
                "shape": list(value.shape),
                "data": base64.b64encode(raw).decode(),
            }
        offenders.append(f"{where}: a NumPy value of dtype {value.dtype}")
        return None
    offenders.append(f"{where}: {type(value).__module__}.{type(value).__qualname__}")
    return None


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: _decode(v) for key, v in value.items()}
        case "float":
            return float(value["value"])
        case "bytes":
            return base64.b64decode(value["data"], validate=True)
        case "tuple":
            return tuple(_decode(value["items"]))
        case "dict":
            return {_decode(key): _decode(v) for key, v in value["items"]}
        case "numpy" | "torch" | "numpy_scalar" as library:
            return _decode_array(library, value)
    raise FormatError(f"the state of an iterator has a value of an unknown kind: {value!r:.80}")


def _decode_array(library: str, value: dict[str, Any]) -> Any:
    import sys  # noqa: PLC0415  (for what is imported already)

    import numpy as np  # noqa: PLC0415  (looking at a manifest needs none)

    if not _dtypes.is_known(value["dtype"]):
        raise FormatError(f"the state of an iterator has an array of dtype {value['dtype']!r:.40}")
    dtype = _dtypes.numpy_dtype(value["dtype"])
    raw = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype.newbyteorder("<"))
    array = raw.astype(dtype).reshape(value["shape"])
    torch = sys.modules.get("torch")
    if library == "torch" and torch is not None:  # torch asks for its own
        return torch.from_numpy(array)
    return array[()] if library == "numpy_scalar" else array
