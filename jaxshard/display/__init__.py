"""What checkpoints, leaves, runs and reports look like in a notebook.

Notebooks find these displays by themselves. `html` gives the text of one, for a page of one's own.
It is HTML and CSS alone: no script, nothing from the network, nothing that was not escaped, and of
bounded size. Colours come from the text around, so that it fits light and dark themes.

A display reads the manifest and the tables, never the data of an array.
"""

from jaxshard import _registry

__all__ = ["html"]


def html(value: object) -> str:
    """The display of a value as HTML, for a page of one's own.

    Several of them can be on one page.

    Args:
      value: a `Checkpoint`, a leaf of one, a `Run`, or any report.

    Returns:
      One `<div>` with its style.

    Raises:
      TypeError: there is no display for values of its type.

    Example:
      >>> import jaxshard, jaxshard.display, numpy as np
      >>> report = jaxshard.save("memory://doc/display", {"w": np.ones(3)})
      >>> "24 B" in jaxshard.display.html(report)
      True
    """
    show = _registry.display_of(value)
    if show is None:
        known = ", ".join(sorted(_registry.displays))
        raise TypeError(
            f"display: expected a value of jaxshard, found {type(value).__name__}\n"
            f"hint: there are displays of {known}"
        )
    return str(show(value))
