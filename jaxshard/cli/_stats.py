"""`jaxshard stats`: what the numbers in a checkpoint look like."""

from typing import Any

import click

import jaxshard
from jaxshard.cli._output import Styled, note, print_json, print_table, progress
from jaxshard.cli._verb import Verb, json_option, open_one


@click.command(
    "stats",
    cls=Verb,
    examples=["jaxshard stats runs/lm", "jaxshard stats runs/lm@300 'params/**' --json"],
    keys={
        "path, step": "of the checkpoint",
        "nbytes": "bytes of elements that were read",
        "leaves[].name, .dtype, .shape, .size": "what it is, and its number of elements",
        "leaves[].min, .max": "exactly; of absolute values if it is complex; null without a "
        "finite element",
        "leaves[].mean": "complex: [real, imaginary]; null without a finite element",
        "leaves[].norm": "square root of the sum of squares; a string if beyond float64",
        "leaves[].nans, .infs": "elements that are not finite; they are left out of all the others",
    },
)
@click.argument("checkpoint", metavar="CKPT")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@json_option
def command(checkpoint: str, patterns: tuple[str, ...], *, as_json: bool) -> None:
    """Show minimum, maximum, mean, norm and NaNs of each leaf.

    CKPT is a checkpoint, a run (its newest step) or RUN@STEP. Only leaves that match a PATTERN are
    read, all if there is none. Keys and texts have no numbers and are left out.
    """
    ckpt = open_one(checkpoint)
    with progress("reading") as on_progress:
        report = jaxshard.stats(ckpt.path, select=patterns or None, on_progress=on_progress)
    if as_json:
        leaves = [leaf._asdict() for leaf in report.leaves]
        print_json(
            {"path": report.path, "step": report.step, "nbytes": report.nbytes, "leaves": leaves}
        )
        return
    print_table(
        ["NAME", "TYPE", "MIN", "MAX", "MEAN", "NORM", "NAN", "INF"],
        [
            [
                leaf.name or "(the whole tree)",
                leaf.dtype + (f"[{','.join(map(str, leaf.shape))}]" if leaf.shape else ""),
                *(_number(n) for n in (leaf.min, leaf.max, leaf.mean, leaf.norm)),
                _alarm(leaf.nans),
                _alarm(leaf.infs),
            ]
            for leaf in report.leaves
        ],
        right="MIN MAX MEAN NORM NAN INF",
    )
    odd = [leaf.name for leaf in report.leaves if not leaf.finite]
    if odd:
        note(f"not finite: {', '.join(odd)}")


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}"


def _alarm(count: int) -> Styled | str:
    return Styled(str(count), "red") if count else "0"
