"""The pattern language of names: `select`, `rules`, `rename` and the command line speak it.

Globs on leaf names: `*` stands for any run of characters within one component, `**` for any
number of whole components, `{a,b}` for alternatives; everything else stands for itself. A pattern
matches the whole name. `params/**` matches everything below `params`, and `params` itself if that
is a leaf; `**/kernel` matches `kernel` at any depth. Pure.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

# A slash beside `**` belongs to it: `a/**` also matches `a`, `**/a` also `a`, `a/**/b` also `a/b`.
_SYMBOL = re.compile(r"/\*\*/|/\*\*$|^\*\*/|\*\*|\*|\{[^{}]*\}|[{}]|[^*{}/]+|/")
_WILDCARDS = {
    "/**/": "(?:/|/(.*)/)",
    "/**": "(?:/(.*)|$)",
    "**/": "(?:(.*)/|^)",
    "**": "(.*)",
    "*": "([^/]*)",
}


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    parts = []
    for symbol in _SYMBOL.findall(pattern):
        if symbol in _WILDCARDS:
            parts.append(_WILDCARDS[symbol])
        elif symbol in ("{", "}"):
            raise ValueError(
                f"pattern {pattern!r}: braces must be paired and must not nest\n"
                "hint: alternatives are written {a,b}"
            )
        elif symbol.startswith("{"):
            parts.append("(?:" + "|".join(map(re.escape, symbol[1:-1].split(","))) + ")")
        else:
            parts.append(re.escape(symbol))
    return re.compile("".join(parts), re.DOTALL)


def matches(pattern: str, name: str) -> bool:
    """Whether the whole of `name` matches `pattern`."""
    return _compile(pattern).fullmatch(name) is not None


def check_patterns(patterns: str | Iterable[str]) -> list[str]:
    """These patterns as a list.

    Raises:
      ValueError: one of them is none.
    """
    found = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in found:
        _compile(pattern)
    return found


def matches_any(patterns: str | Iterable[str], name: str) -> bool:
    """Whether `name` matches at least one of the patterns."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(matches(p, name) for p in patterns)


def first_match(rules: Sequence[tuple[str, T]], name: str) -> T | None:
    """The value of the first rule whose pattern matches `name`, or None."""
    return next((value for pattern, value in rules if matches(pattern, name)), None)


def renamed(rename: Mapping[str, str], name: str) -> str:
    """The wanted name of a saved name: the first entry of `rename` that matches decides.

    What a wildcard of the saved pattern matched is put where the same-numbered wildcard stands
    in the wanted one: `{"encoder/**": "backbone/**"}`.
    """
    for saved, wanted in rename.items():
        match = _compile(saved).fullmatch(name)
        if match is not None:
            return _fill(wanted, match.groups())
    return name


def _fill(wanted: str, captures: Sequence[str | None]) -> str:
    literals = re.split(r"\*\*|\*", wanted)
    values = ["", *(c or "" for c in captures), *[""] * len(literals)]
    filled = "".join(value + text for value, text in zip(values, literals, strict=False))
    return re.sub("//+", "/", filled).strip("/")  # a `**` may have stood for nothing
