"""`jaxshard prune`: free what nobody needs any more."""

import click

import jaxshard
from jaxshard._errors import size_text
from jaxshard.cli._output import note, print_json, print_table
from jaxshard.cli._verb import Duration, Verb, json_option


@click.command(
    "prune",
    cls=Verb,
    examples=[
        "jaxshard prune runs/lm --keep-last 3 --keep-every 1000 --dry-run",
        "jaxshard prune runs/lm --older-than 1d",
    ],
    keys={
        "path": "the run or checkpoint",
        "dry_run": "whether nothing was deleted",
        "steps": "names of committed steps that were deleted",
        "leftovers": "names of attempts, temporary files and uncommitted steps that were deleted",
        "nbytes": "bytes freed",
        "recent": "leftovers that stay, because something in them changed too recently",
        "damaged": "steps that are not whole; they stay, and do not count as kept",
    },
)
@click.argument("path", metavar="RUN")
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the newest N steps.")
@click.option("--keep-every", type=click.IntRange(1), metavar="K", help="Keep the multiples of K.")
@click.option(
    "--older-than",
    type=Duration(),
    default="1h",
    show_default=True,
    metavar="AGE",
    help="Age of leftovers that are deleted, such as 90s, 30m, 2h, 7d.",
)
@click.option("--dry-run", is_flag=True, help="Delete nothing, only say what would be deleted.")
@json_option
def command(
    path: str,
    *,
    keep_last: int | None,
    keep_every: int | None,
    older_than: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete leftovers of killed saves, and steps that are not to be kept.

    RUN is a run, or one checkpoint. Without --keep-last and --keep-every all committed steps stay;
    with them the others go, except the newest, which always stays. A step with missing or cut files
    neither counts nor goes; jaxshard verify finds changed ones, so run it first. Leftovers go when
    nothing in them has changed for --older-than: a save that is going on changes its files. Files
    that are not jaxshard's are never touched.
    """
    keep = None
    if keep_last is not None or keep_every is not None:
        keep = jaxshard.Keep(last=keep_last, every_steps=keep_every)
    report = jaxshard.prune(path, keep=keep, older_than_s=older_than, dry_run=dry_run)
    if as_json:
        names = ("path", "dry_run", "steps", "leftovers", "nbytes", "recent", "damaged")
        print_json({name: getattr(report, name) for name in names})
        return
    done = "would delete" if dry_run else "deleted"
    rows = [[done, "step", name] for name in report.steps]
    rows += [[done, "leftover", name] for name in report.leftovers]
    rows += [["keeps", "recent", name] for name in report.recent]
    rows += [["keeps", "damaged", name] for name in report.damaged]
    if rows:
        print_table(["ACTION", "WHAT", "NAME"], rows)
    click.echo(f"{done} {len(report.deleted)}, {size_text(report.nbytes)}")
    if report.recent:
        note("recent leftovers may be a save that is going on; --older-than says what is recent")
    if report.damaged:
        note("jaxshard verify says what is damaged")
