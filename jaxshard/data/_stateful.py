"""`Stateful`: an iterator of another library, with a word on what to do when it cannot go on."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Self

import jax

from jaxshard import _iterators

logger = logging.getLogger("jaxshard")

_WHERE = "jaxshard.data.Stateful"
_Mismatch = Literal["error", "replay", "restart"]


class Stateful:
    """Brings an iterator into the state that jaxshard saves, and counts what it gives.

    Iterators that have `get_state` and `set_state` (Grain), or `state_dict` and `load_state_dict`
    (torchdata, Hugging Face datasets), are leaves of the state as they are. This is for the rest:

    * a stream that has no state: any iterable, or a function that makes an iterator. It is brought
      back by reading forward from its beginning to the position, which has to give the same again;
    * an iterator that should go on in spite of a difference that is an error otherwise: another
      number of processes, another batch size, seed or length.

    It is its own iterator, over one pass.

    Args:
      source: an iterable (of which every `iter()` begins anew), an iterator that has a state, or a
        function without arguments that makes either.
      replay: whether to read forward to the position although the source has a state, e.g. because
        that state lacks the rows of a shuffle buffer. None does so where there is no state.
      on_mismatch: what to do if the state is of another number of processes or of other settings:
        `"error"`; `"replay"`: begin anew and read as many items as were consumed (of a source that
        gives each process its share of a batch, this is the same position with any number of
        processes); `"restart"`: begin anew. The last two are logged as warnings.

    Raises:
      TypeError: `source` gives no iterator; or it is to be read again and can be read only once.

    Example:
      >>> from jaxshard.data import Stateful
      >>> stream = Stateful(lambda: (n * n for n in range(10)))
      >>> next(stream), next(stream), next(stream)
      (0, 1, 4)
      >>> again = Stateful(lambda: (n * n for n in range(10)))
      >>> again.set_state(stream.get_state())
      >>> next(again)
      9
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        replay: bool | None = None,
        on_mismatch: _Mismatch = "error",
    ) -> None:
        if on_mismatch not in {"error", "replay", "restart"}:
            raise ValueError(
                f'{_WHERE}: found on_mismatch={on_mismatch!r}\nhint: "error", "replay" or "restart"'
            )
        self._source = source
        self._on_mismatch = on_mismatch
        self._consumed = 0
        self._begin()
        has_state = self._holder is not None
        self._replay = not has_state if replay is None else replay
        if (self._replay or on_mismatch != "error") and self._is_spent_once():
            raise TypeError(
                f"{_WHERE}: {type(source).__qualname__} can be read only once, and is to be read "
                "again from its beginning\nhint: a function that makes it: "
                "Stateful(lambda: make_iterator())"
            )

    def _begin(self) -> None:
        """Make the iterator anew."""
        made: Any = self._source
        if _is_maker(made):
            made = made()
        if not hasattr(made, "__iter__") and not hasattr(made, "__next__"):
            raise TypeError(
                f"{_WHERE}: expected an iterable, or a function that makes one, found "
                f"{type(made).__qualname__}\nhint: Stateful(lambda: iter(dataset))"
            )
        self._made = made
        self._iterator: Iterator[Any] | None = None
        # torchdata and Hugging Face keep the state in what is iterated, Grain in the iterator.
        self._holder = made if _iterators.is_iterator(made) else None
        if self._holder is None:
            self._iterator = iter(made)
            self._holder = self._iterator if _iterators.is_iterator(self._iterator) else None

    def _is_spent_once(self) -> bool:
        return not _is_maker(self._source) and iter(self._made) is self._made

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:  # after its state was set
            self._iterator = iter(self._made)
        item = next(self._iterator)
        self._consumed += 1
        return item

    @property
    def consumed(self) -> int:
        """Items that were given so far."""
        return self._consumed

    # The state, as it is saved

    @property
    def elastic(self) -> bool:
        """Whether its state serves any number of processes."""
        return not self._replay and _iterators.is_elastic(self._holder)

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same at a restore."""
        return _iterators.settings_of(self._holder if self._holder is not None else self._made)

    def get_state(self) -> dict[str, Any]:
        """How many items were consumed, and the state of the iterator, if it is used."""
        inner = None
        if not self._replay:
            assert self._holder is not None
            _iterators.require_savable(self._holder)
            inner = _iterators.get_state(self._holder)
        return {
            "consumed": self._consumed,
            "state": inner,
            "processes": jax.process_count(),
            "settings": self.settings,
        }

    def why_not_from(self, saved: _iterators.IteratorInfo, state: Any) -> list[str]:
        """What speaks against a state that was saved, in sentences; changes nothing.

        It may also be that of the iterator alone, from before it was wrapped.
        """
        if _iterators.is_of_same_class(self, saved):
            return self.check_state(state)
        if self._holder is None or not _iterators.is_of_same_class(self._holder, saved):
            name = _iterators.short_name(saved.class_name)
            return [f"saved an iterator {name}, wanted Stateful of {self._made_name()}"]
        if self._replay or self._on_mismatch == "replay":
            only = "its state is that of the iterator alone, which does not say how many items were"
            return [f'{only} consumed: on_mismatch="restart" begins anew']
        return self._unless_allowed(_iterators.differences_of(self._holder, saved))

    def check_state(self, state: Any) -> list[str]:
        """What speaks against a state, in sentences; changes nothing."""
        if not _is_ours(state):
            return [f"expected the state of a Stateful, found {type(state).__name__}"]
        if (state["state"] is None) != self._replay:
            was, now = ("no state", "one") if self._replay is False else ("a state", "none")
            return self._unless_allowed([f"{was} was saved of the iterator, and here it has {now}"])
        return self._unless_allowed(self._differences(state))

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        elastic = self.elastic
        then = _iterators.IteratorInfo("", elastic, state["processes"], state["settings"])
        now = _iterators.IteratorInfo("", elastic, jax.process_count(), self.settings)
        return _iterators.differences(now, then)

    def _unless_allowed(self, problems: list[str]) -> list[str]:
        return problems if self._on_mismatch == "error" else []

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `get_state` gave.

        Raises:
          ValueError: it is of another number of processes or of other settings, and `on_mismatch`
            does not say what to do; or the source ended before the position.
        """
        if not _is_ours(state):  # of the iterator alone
            state = {"consumed": 0, "state": state, "processes": None, "settings": None}
            if self._on_mismatch == "restart":
                logger.warning("%s: begins anew (on_mismatch='restart')", self)
                self._begin()
                self._consumed = 0
                return
            self._set_inner(state)
            return
        problems = self._differences(state)
        if (state["state"] is None) != self._replay:
            problems.append("its state is of another kind")
        if problems and self._on_mismatch == "error":
            raise ValueError(f"{_WHERE}: it cannot go on: {'; '.join(problems)}")
        if problems and self._on_mismatch == "restart":
            logger.warning("%s: begins anew (on_mismatch='restart'): %s", self, "; ".join(problems))
            self._begin()
            self._consumed = 0
        elif problems or self._replay:
            if problems:
                logger.warning(
                    "%s: reads forward to item %d (on_mismatch='replay'): %s",
                    self, state["consumed"], "; ".join(problems),
                )  # fmt: skip
            self._read_forward(state["consumed"])
        else:
            self._set_inner(state)

    def _set_inner(self, state: Mapping[str, Any]) -> None:
        self._begin()
        assert self._holder is not None
        _iterators.restore(self._holder, state["state"])
        if self._holder is self._made:
            self._iterator = None
        self._consumed = state["consumed"]

    def _read_forward(self, items: int) -> None:
        self._begin()
        self._consumed = 0
        for _ in range(items):
            try:
                next(self)
            except StopIteration:
                raise ValueError(
                    f"{_WHERE}: expected {items} items to read forward, found {self._consumed}: "
                    "the source has fewer than were consumed"
                ) from None

    def _made_name(self) -> str:
        return type(self._made).__qualname__

    def __repr__(self) -> str:
        return f"<Stateful {self._made_name()}, {self._consumed} items consumed>"


def _is_maker(source: Any) -> bool:
    is_iterable = hasattr(source, "__iter__") or hasattr(source, "__next__")
    return isinstance(source, type) or (callable(source) and not is_iterable)


def _is_ours(state: Any) -> bool:
    return isinstance(state, Mapping) and {*state} == {"consumed", "state", "processes", "settings"}
