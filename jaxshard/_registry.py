"""What is looked up by name, so that lower rooms need not know higher ones.

`__init__` fills it; nothing is imported before it is looked up. This room imports nothing of
jaxshard.
"""

import importlib
import logging
from typing import Any

logger = logging.getLogger("jaxshard")
displays: dict[str, str] = {}  # name of a class -> "module:function" that shows it as HTML


def display_of(value: object) -> Any | None:
    """The function that shows a value as HTML, by the class of the value or one above it."""
    for cls in type(value).__mro__:
        if cls.__name__ in displays:
            module, _, function = displays[cls.__name__].partition(":")
            return getattr(importlib.import_module(module), function)
    return None


class Shown:
    """Gives a class its displays in notebooks and IPython."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """HTML for a notebook; None, which lets it show the plain text, if that fails."""
        try:
            show = display_of(self)
            return None if show is None else str(show(self))
        except Exception:  # a display must not hide the value behind a traceback
            logger.debug("no display of %s", type(self).__name__, exc_info=True)
            return None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # IPython takes the __repr__ of a class before the `_repr_pretty_` of one above it.
        cls._repr_pretty_ = _pretty  # type: ignore[attr-defined]


def _pretty(self: Shown, printer: Any, cycle: bool) -> None:  # noqa: ARG001, FBT001  (IPython's)
    """Text for a terminal of IPython, as `print` gives it."""
    printer.text(str(self))
