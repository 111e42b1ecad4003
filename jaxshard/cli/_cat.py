"""`jaxshard cat`: the values of one leaf, or of a part of it."""

import re
import sys
from typing import Any

import click

from jaxshard._keypaths import escape
from jaxshard._reader import Checkpoint, Leaf
from jaxshard.cli._output import Failure, note, print_json
from jaxshard.cli._verb import Verb, json_option, open_one

_INDEXED = re.compile(r"(.*)\[([^\[\]]*)\]", re.DOTALL)
_PART = re.compile(r"\s*(-?\d+)?\s*(?:(:)\s*(-?\d+)?\s*(?::\s*(-?\d+)?\s*)?)?")
_TERMINAL_ELEMENTS = 1000  # as many as NumPy shows before it leaves some out


@click.command(
    "cat",
    cls=Verb,
    examples=[
        "jaxshard cat runs/lm 'params/w[0:4, ::2]'",
        "jaxshard cat runs/lm@300 step",
        "jaxshard cat ckpt 'params/w[0]' --json | jq .values",
    ],
    keys={
        "path, step": "of the checkpoint",
        "leaf": "its name",
        "dtype": "element type; null for Python values",
        "shape": "of what is shown; PRNG keys are uint32 words, those of a key in the last axis",
        "values": "nested lists; complex: [real, imaginary]; NaN and infinities as strings; "
        "bytes as hex",
    },
)
@click.argument("checkpoint", metavar="CKPT")
@click.argument("leaf", metavar="LEAF[SLICE]")
@json_option
def command(checkpoint: str, leaf: str, *, as_json: bool) -> None:
    """Print the values of a leaf, or of a part of it.

    CKPT is a checkpoint, a run (its newest step) or RUN@STEP. SLICE is an index as in NumPy: ints,
    slices and ..., as in 'params/w[0:4, ::2]'; only what it touches is read. Every digit is
    printed. On a terminal the middle of more than 1,000 values is left out; piped, and with --json,
    all are there.
    """
    ckpt = open_one(checkpoint)
    found, index = _find(ckpt, leaf)
    try:
        value = found.read(index)
    except IndexError as e:
        raise Failure(f"leaf {found.info.name!r}: {e}\nhint: [0:4, ::2], [-1], [..., 0]") from e
    if as_json:
        document = {"path": ckpt.path, "step": ckpt.step, "leaf": found.info.name}
        shape = getattr(value, "shape", ())
        print_json({**document, "dtype": found.dtype, "shape": shape, "values": _exact(value)})
        return
    click.echo(_text(value))


def _find(ckpt: Checkpoint, text: str) -> tuple[Leaf, Any]:
    """A leaf, and the index behind its name; a name may be typed as the key was, unescaped."""
    for name in (text, _escaped(text)):
        if name in ckpt:
            return ckpt[name], ...
    match = _INDEXED.fullmatch(text)
    if match is not None:
        for name in (match[1], _escaped(match[1])):
            if name in ckpt:
                return ckpt[name], _index(match[2])
    try:
        return ckpt[text if match is None else match[1]], ...
    except KeyError as e:
        raise Failure(f"{e.args[0]}\nhint: jaxshard show {ckpt.path} lists the leaves") from e


def _escaped(text: str) -> str:
    return "/".join(map(escape, text.split("/")))


def _index(text: str) -> tuple[Any, ...]:
    return tuple(_part(part) for part in text.split(",")) if text.strip() else (...,)


def _part(text: str) -> Any:
    if text.strip() == "...":
        return ...
    match = _PART.fullmatch(text)
    if match is None or not text.strip():
        raise Failure(
            f"index: expected integers and slices, found {text.strip()!r}\n"
            "hint: [0:4, ::2], [..., 0]"
        )
    start, colon, stop, step = (g and (g if g == ":" else int(g)) for g in match.groups())
    return slice(start, stop, step) if colon else start


def _exact(value: Any) -> Any:
    """An array or number as Python values that hold it exactly."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return value
    if "float" in dtype.name:
        return value.astype("float64").tolist()
    if dtype.name.startswith(("int", "uint")) and dtype.kind not in "iu":  # of ml_dtypes
        return value.astype("int64").tolist()
    return value.tolist()


def _text(value: Any) -> str:
    import numpy as np  # noqa: PLC0415

    if isinstance(value, np.ndarray) and value.ndim:
        short = sys.stdout.isatty() and value.size > _TERMINAL_ELEMENTS
        if short:
            note(f"{value.size} values, not all are shown; a slice, or a pipe, shows all")
        threshold = _TERMINAL_ELEMENTS if short else sys.maxsize
        return np.array2string(value, threshold=threshold, floatmode="unique", separator=", ")
    return str(value)
