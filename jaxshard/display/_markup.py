"""Pieces of HTML that are safe by construction, and the parts that all displays are made of.

Whatever is not `Html` already is escaped and cut where it enters an element or an attribute: what a
file says can be hostile, and very long.
"""

import html
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxshard.display._style import CSS, ROOT

TEXT_MAX = 240
ROWS_MAX = 200


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Anything as escaped text of bounded length, in characters that can be seen and encoded."""
    found = str(value)
    if len(found) > TEXT_MAX:
        found = f"{found[: TEXT_MAX // 2]} … {found[-TEXT_MAX // 3 :]}"
    if not found.isprintable():
        found = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in found
        )
    return Html(html.escape(found))


def element(tag: str, *children: str, **attributes: str) -> Html:
    """One element; `class_` is `class`, `stroke_width` is `stroke-width`."""
    inside = "".join(c if isinstance(c, Html) else text(c) for c in children)
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    inner = "".join(
        f' {n}="{v if isinstance(v, Html) else text(v)}"' for n, v in named if v or n == "open"
    )
    return Html(f"<{tag}{inner}>{inside}</{tag}>")


def join(parts: Iterable[Html]) -> Html:
    """One after the other."""
    return Html("".join(parts))


def span(name: str, *children: str, **attributes: str) -> Html:
    """A `<span>` of a class."""
    return element("span", *children, class_=f"j-{name}", **attributes)


def card(kind: str, subject: str, *body: Html, badge: Html | None = None) -> Html:
    """A whole display: its style, a headline, and what is below it."""
    head = [span("kind", kind), Html(" "), span("subject", subject, title=subject)]
    if badge is not None:
        head += [Html(" "), badge]
    style = Html(f"<style>{CSS}</style>")
    return element("div", style, element("div", *head, class_="j-head"), *body, class_=ROOT)


def badge(words: str, mood: str = "plain") -> Html:
    """A short verdict; `mood` is `good`, `bad` or `plain`."""
    return span(f"badge j-{mood}", words)


def facts(pairs: Mapping[str, object]) -> Html:
    """Names and values, side by side; what is None is left out."""
    found = [
        element("div", element("dt", name), Html(" "), element("dd", _value(value)))
        for name, value in pairs.items()
        if value is not None
    ]
    return element("dl", *found, class_="j-facts")


def _value(value: object) -> str:
    return value if isinstance(value, Html) else str(value)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = ()
) -> Html:
    """A table of at most `ROWS_MAX` rows; the columns named in `numbers` are set to the right."""
    classes = ["j-num" if name in numbers else "" for name in header]
    head = [element("th", name, class_=c) for name, c in zip(header, classes, strict=True)]
    body = [
        element(
            "tr", *(element("td", cell, class_=c) for cell, c in zip(row, classes, strict=True))
        )
        for row in rows[:ROWS_MAX]
    ]
    inside = [element("thead", element("tr", *head)), element("tbody", *body)]
    return join([element("table", *inside, class_="j-table"), more(len(rows) - ROWS_MAX)])


def more(number: int, what: str = "") -> Html:
    """The line that says how much was left out; nothing if nothing was."""
    if number <= 0:
        return Html()
    return element("div", f"… and {number:,} more{what}", class_="j-more")


def folded(title: str, *body: Html, open_: bool = False) -> Html:
    """Something that opens at a click."""
    summary = element("summary", title)
    if open_:
        return element("details", summary, *body, class_="j-fold", open="")
    return element("details", summary, *body, class_="j-fold")


def note(words: str) -> Html:
    """A quiet line."""
    return element("div", words, class_="j-note")
