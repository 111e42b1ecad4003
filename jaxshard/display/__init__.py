"""What checkpoints, leaves, runs and reports look like in a notebook.

Notebooks find these displays by themselves. `html` gives the text of one, for a page of one's own.
It is HTML and CSS alone: no script, nothing from the network, nothing that was not escaped, and of
bounded size. Colours come from the text around, so that it fits light and dark themes.

A display reads the manifest and the tables, never the data of an array.
"""

from jaxshard import _registry
from jaxshard.display._markup import text

__all__ = ["html", "page"]

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ margin: 2em auto; max-width: 60em; padding: 0 1em }}
</style>
{body}
</html>
"""


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


def page(value: object) -> str:
    """The display of a value as a whole HTML page, that needs nothing but itself.

    Args:
      value: as for `html`.

    Returns:
      The text of the file.

    Raises:
      TypeError: as for `html`.

    Example:
      >>> import jaxshard, jaxshard.display, numpy as np
      >>> report = jaxshard.save("memory://doc/page", {"w": np.ones(3)})
      >>> jaxshard.display.page(report).splitlines()[0]
      '<!doctype html>'
    """
    title = text(f"{getattr(value, 'path', '')} - jaxshard".removeprefix(" - "))
    return _PAGE.format(title=title, body=html(value))
