"""Flax NNX objects seen as trees: modules, optimizers, states and variables.

NNX objects go through `nnx.split`, all of one tree together, so that a Variable that several of
them share is one leaf and stays shared. Flax is never imported here: an NNX object can only exist
where somebody else has imported it. Tried with flax 0.12.5 to 0.12.8.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_object(value: Any) -> bool:
    """Whether a value is an NNX graph object (Module, Optimizer, Rngs, List …)."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Pytree) and not is_variable(value)


def is_state(value: Any) -> bool:
    """Whether a value is an `nnx.State`."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.State)


def is_variable(value: Any) -> bool:
    """Whether a value is an `nnx.Variable`."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Variable)


def raw_value(variable: Any) -> Any:
    """What a Variable holds, without its hooks."""
    return variable.get_raw_value()


def with_value(variable: Any, value: Any) -> Any:
    """A copy of a Variable, with its metadata, that holds another value."""
    return variable.replace(value)


class Graph:
    """All NNX objects and bare Variables of one tree, split together."""

    def __init__(self, found: Sequence[Any]) -> None:
        # Variables last: one that an object holds too is named by the object.
        ordered = sorted(found, key=is_variable)
        self._objects = list({id(o): o for o in ordered}.values())
        self._numbers = {id(o): i for i, o in enumerate(self._objects)}
        self._graphdef, self._state = (None, {})
        if self._objects:
            self._graphdef, self._state = _nnx().split(self._objects)

    def has_own_state(self, number: int) -> bool:
        """Whether an object or Variable holds anything that none before it holds."""
        return number in self._state

    def state_of(self, value: Any) -> Any:
        """The part of the split state that belongs to one object.

        What it shares with an object before it is there, not here.
        """
        number = self._numbers[id(value)]
        return self._state[number] if number in self._state else _nnx().State({})

    def number_of(self, value: Any) -> int:
        """Which of the objects this one is."""
        return self._numbers[id(value)]

    def rebuilder(
        self, parts: dict[int, Callable[[list[Any]], Any]]
    ) -> Callable[[list[Any], bool], list[Any]]:
        """A function from new leaf values to the objects: the same ones updated, or new ones.

        Args:
          parts: by object number, what makes its state from the leaf values.
        """

        def rebuild(values: list[Any], in_place: bool) -> list[Any]:  # noqa: FBT001  (a `Rebuild`)
            if not self._objects:
                return []
            nnx = _nnx()
            state = nnx.State({number: part(values) for number, part in parts.items()})
            if in_place:
                nnx.update(self._objects, state)
                return self._objects
            return list(nnx.merge(self._graphdef, state))

        return rebuild


def new_state(items: dict[Any, Any]) -> Any:
    """An `nnx.State` of these items."""
    return _nnx().State(items)
