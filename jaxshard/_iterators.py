"""Iterators as leaves: what tells them, their states, and what differs at a restore.

A leaf is an iterator if it has `get_state` and `set_state` (Grain), or `state_dict` and
`load_state_dict` (torchdata, Hugging Face datasets). It is stored by its state and restored in
place. Three optional attributes make one a better guest: `elastic = True` says that its state is
the same on all processes and serves any number of them; `settings` is a dict of JSON values that
must be equal at a restore; `check_state(state)` returns what speaks against a state, in sentences,
before anything is changed.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxshard import _foreign, _statejson
from jaxshard._errors import UnsupportedLeafError

HINT = (
    "make the iterator as it was when it was saved; one of another library goes on in spite of it "
    "as jaxshard.data.Stateful(make_iterator, on_mismatch='replay' or 'restart')"
)
_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def is_iterator(value: Any) -> bool:
    """Whether a value has one of the two protocols."""
    return _protocol(value) is not None


def _protocol(value: Any) -> tuple[str, str] | None:
    if isinstance(value, type):
        return None
    for names in _PROTOCOLS:
        if all(callable(getattr(value, name, None)) for name in names):
            return names
    return None


def class_name(value: Any) -> str:
    """For people; never imported."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def short_name(of: str) -> str:
    """The last part of a class name."""
    return of.rpartition(".")[2]


class IteratorInfo(NamedTuple):
    """What is kept of an iterator beside its state.

    Attributes:
      class_name: for people.
      elastic: whether its state serves any number of processes.
      processes: how many there were.
      settings: what must be the same at a restore.
    """

    class_name: str
    elastic: bool
    processes: int
    settings: dict[str, Any]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "IteratorInfo":
        """From the value of a leaf."""
        return cls(value["class"], value["elastic"], value["processes"], value["settings"])


def info_of(value: Any, processes: int) -> IteratorInfo:
    """What to keep of an iterator.

    Raises:
      UnsupportedLeafError: its state would not bring it back.
    """
    require_savable(value)
    return IteratorInfo(class_name(value), is_elastic(value), processes, settings_of(value))


def require_savable(value: Any) -> None:
    """The state of an iterator would bring it back.

    Raises:
      UnsupportedLeafError: says why not.
    """
    why = _foreign.why_not_saved(value)
    if why is not None:
        raise UnsupportedLeafError(why)


def is_elastic(value: Any) -> bool:
    """Whether one state serves any number of processes."""
    return _foreign.is_elastic(value)


def settings_of(value: Any) -> dict[str, Any]:
    """What must be the same at a restore, as JSON gives it back.

    Raises:
      UnsupportedLeafError: a value that JSON does not have.
    """
    settings = getattr(value, "settings", None)
    if not isinstance(settings, dict):
        settings = _foreign.settings_of(value)
    try:
        plain: dict[str, Any] = json.loads(json.dumps(settings, allow_nan=False))
    except (TypeError, ValueError) as e:
        raise UnsupportedLeafError(f"its settings are not JSON values: {e}") from e
    return plain


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The state that an iterator had at a save: what stands for it from then on.

    Attributes:
      info: what is kept beside the state.
      state: as `_statejson` encodes it.
    """

    info: IteratorInfo
    state: Any

    @property
    def text(self) -> str:
        """The state as it is stored where it is too large for the manifest."""
        return json.dumps(self.state, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def to_json(self) -> dict[str, Any]:
        """The value of its leaf."""
        class_name, elastic, processes, settings = self.info
        return {
            "class": class_name,
            "elastic": elastic,
            "processes": processes,
            "settings": settings,
            "state": self.state,
        }


def take(value: Any, processes: int) -> Taken:
    """The state that an iterator has now: that of what was consumed, not of what is prefetched.

    Raises:
      UnsupportedLeafError: it holds what cannot be stored, or would not bring it back.
    """
    return Taken(info_of(value, processes), _statejson.encode(get_state(value)))


def get_state(value: Any) -> Any:
    """The state of an iterator, as it gives it."""
    names = _protocol(value)
    assert names is not None
    return getattr(value, names[0])()


def problems(value: Any, saved: IteratorInfo, state: Any) -> list[str]:
    """What speaks against restoring a state, in sentences; nothing is changed.

    Args:
      value: the live iterator.
      saved: what was kept of the one whose state it is.
      state: the state.
    """
    own = getattr(value, "why_not_from", None)  # of `jaxshard.data.Stateful`
    if callable(own):
        return list(own(saved, state))
    check = getattr(value, "check_state", None)
    if not is_of_same_class(value, saved):
        return [f"saved {_one(saved.class_name)}, wanted {_one(class_name(value))}"]
    return list(check(state)) if callable(check) else differences_of(value, saved)


def is_of_same_class(value: Any, saved: IteratorInfo) -> bool:
    """Whether the classes have the same name; a module may have been moved, or be `__main__`."""
    return short_name(saved.class_name) == short_name(class_name(value))


def differences_of(value: Any, saved: IteratorInfo) -> list[str]:
    """As `differences`, of a live iterator."""
    return differences(info_of(value, jax.process_count()), saved)


def differences(mine: IteratorInfo, saved: IteratorInfo) -> list[str]:
    """Settings in which the two differ, and another number of processes, in sentences."""
    found = [
        f"{name} was {_short(saved.settings.get(name))}, is {_short(mine.settings.get(name))}"
        for name in sorted({*saved.settings, *mine.settings})
        if saved.settings.get(name) != mine.settings.get(name)
    ]
    if saved.processes != mine.processes and not saved.elastic:
        found.append(
            f"its states are of {saved.processes} processes, and here {mine.processes} are running"
        )
    return found


def _one(of: str) -> str:
    return f"an iterator {short_name(of)}"


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def restore(value: Any, state: Any) -> None:
    """Give a live iterator its state."""
    names = _protocol(value)
    assert names is not None
    getattr(value, names[1])(state)
