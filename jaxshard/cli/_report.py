"""`jaxshard report`: how well a run used its time."""

import click

import jaxshard
from jaxshard.cli._output import print_json, print_page
from jaxshard.cli._verb import Verb, html_option, json_option


@click.command(
    "report",
    cls=Verb,
    examples=["jaxshard report runs/lm", "jaxshard report runs/lm --html > report.html"],
    keys={
        "path": "the run",
        "begun_with": "the checkpoint that it began with (init_from), or null",
        "goodput": "share of the time that was useful, from 0 to 1",
        "wall_s": "from the first start to the last sign of life; the next five add up to it",
        "useful_s": "in steps that count",
        "saving_s": "what saves cost training: blocked, and slower steps beside them",
        "lost_s": "in steps that had to be done again",
        "restoring_s": "from a start to the state being there",
        "down_s": "between an end and the next start",
        "starts, failures": "of the job; failures were killed, or ended with an error",
        "lost_steps": "steps that had to be done again",
        "saves, failed_saves, nbytes": "committed ones, others, bytes saved",
        "reused_nbytes": "of these, in files that the step before has too: not written",
        "save_cost_s": "what one save costs training, the median; or null",
        "mtbf_s": "mean time between failures; or null",
        "best_interval_s": "how often saves would have lost the least time; or null",
    },
)
@click.argument("path", metavar="RUN")
@html_option
@json_option
def command(path: str, *, as_html: bool, as_json: bool) -> None:
    """Say how well a run used its time, and how often it should save.

    Also while its job is running. The numbers come from the ledger that each job writes.
    """
    report = jaxshard.report(path)
    if as_html:
        print_page(report)
        return
    if not as_json:
        click.echo(str(report))
        return
    found = report.goodput
    print_json(
        {
            "path": report.path,
            "begun_with": report.begun_with,
            "goodput": found.goodput,
            **found._asdict(),
            "best_interval_s": found.best_interval_s,
        }
    )
