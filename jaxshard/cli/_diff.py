"""`jaxshard diff`: in which leaves two checkpoints differ."""

import click

import jaxshard
from jaxshard.cli._output import print_json, print_table
from jaxshard.cli._verb import Verb, json_option, open_one


@click.command(
    "diff",
    cls=Verb,
    examples=["jaxshard diff runs/lm@200 runs/lm@300", "jaxshard diff ckpt copy-of-ckpt"],
    keys={
        "a, b": "paths of the checkpoints",
        "identical": "whether all leaves have the same names, types and bits",
        "leaves": "number of leaves that were compared",
        "nbytes": "bytes that had to be read, where digests could not tell",
        "differences[].name": "a leaf",
        "differences[].what": "how it differs, in words",
    },
    bad="they differ",
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@json_option
@click.pass_context
def command(ctx: click.Context, first: str, second: str, *, as_json: bool) -> None:
    """Say in which leaves two checkpoints differ.

    Leaves differ in presence, type, shape or bits; shardings are no difference. A and B are each a
    checkpoint, a run (its newest step) or RUN@STEP. Digests are compared; data is read only where
    the two were cut into other tiles.
    """
    a, b = open_one(first), open_one(second)
    report = jaxshard.diff(a.path, b.path)
    if as_json:
        print_json(
            {
                "a": a.path,
                "b": b.path,
                "identical": report.identical,
                "leaves": report.leaves,
                "nbytes": report.nbytes,
                "differences": [d._asdict() for d in report.differences],
            }
        )
    elif report.identical:
        click.echo(f"identical: {report.leaves} leaves")
    else:
        click.echo(f"{len(report.differences)} of {report.leaves} leaves differ")
        click.echo(f"A: {a.path}\nB: {b.path}\n")
        print_table(["LEAF", "A AND B"], [[d.name, d.what] for d in report.differences])
    if not report.identical:
        ctx.exit(1)
