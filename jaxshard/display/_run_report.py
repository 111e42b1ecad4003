"""How well a run used its time, and what a fire drill has found."""

from typing import TYPE_CHECKING

from jaxshard._errors import counted, size_text
from jaxshard._report import RunReport, duration_text
from jaxshard.display._markup import Html, badge, card, element, facts, folded, table
from jaxshard.display._timeline import timeline

if TYPE_CHECKING:
    from jaxshard._drill import DrillReport


def run_report(report: RunReport) -> Html:
    """The display of a `RunReport`."""
    g = report.goodput
    interval = None if g.best_interval_s is None else f"every {duration_text(g.best_interval_s)}"
    saved = f"{g.saves:,}, {size_text(g.nbytes - g.reused_nbytes)} written"
    numbers = facts(
        {
            "time": duration_text(g.wall_s),
            "starts": f"{g.starts:,}",
            "failures": f"{g.failures:,}",
            "steps done again": f"{g.lost_steps:,}",
            "saves": saved,
            "unchanged": size_text(g.reused_nbytes) if g.reused_nbytes else None,
            "failed saves": g.failed_saves or None,
            "a save costs": None if g.save_cost_s is None else duration_text(g.save_cost_s),
            "a failure every": None if g.mtbf_s is None else duration_text(g.mtbf_s),
            "best to save": interval,
            "began with": report.begun_with,
        }
    )
    found = badge(f"{g.goodput:.1%} useful")
    return card(
        "Run report", report.path, numbers, _parts(report), timeline(report.starts), badge=found
    )


def _parts(report: RunReport) -> Html:
    """Where the time went, as a bar and in words."""
    parts = [part for part in report.parts if part[1] > 0]
    bar = [
        element(
            "i", class_=f"j-part-{name}", style=f"width:{share:.3%}", title=f"{name} {share:.1%}"
        )
        for name, _, share in parts
    ]
    words = [
        element(
            "span",
            element("i", class_=f"j-part-{name}"),
            f" {name} {share:.1%}, {duration_text(s)}",
        )
        for name, s, share in parts
    ]
    return element(
        "div", element("div", *bar, class_="j-parts"), element("div", *words, class_="j-keys")
    )


def drill_report(report: "DrillReport") -> Html:
    """The display of a `DrillReport`."""
    missed = sum(not check.ok for check in report.checks)
    found = badge(f"\N{BALLOT X} {missed} of {len(report.checks)} targets missed", "bad")
    if report.ok:
        found = badge("\N{CHECK MARK} all targets reached", "good")
    checks = [[*check.words, "reached" if check.ok else "missed"] for check in report.checks]
    kills = [
        [f"{k.step:,}", f"{k.lost_steps:,}", duration_text(k.lost_s), duration_text(k.resume_s)]
        for k in report.kills
    ]
    header = ["killed at step", "steps lost", "time lost", "to first new step"]
    body = [
        facts(
            {
                "useful": f"{report.goodput.goodput:.1%}",
                "without kills": duration_text(report.whole_s),
                "saving costs": f"{report.slowdown - 1:.1%}",
                "on disk": size_text(report.storage),
            }
        ),
        table(["target", "wanted", "found", "result"], checks, numbers=("wanted", "found")),
        timeline(report.starts),
        table(header, kills, numbers=header),
    ]
    if report.differences:
        title = f"{counted(len(report.differences), 'leaf')} not as without kills"
        body.append(folded(title, table(["leaf"], [[d] for d in report.differences]), open_=True))
    return card("Fire drill", report.path, *body, badge=found)
