"""What saving, loading, checking, comparing, counting and pruning found."""

from typing import TYPE_CHECKING

from jaxshard._errors import counted, rate_text, size_text
from jaxshard.display import _words
from jaxshard.display._markup import Html, badge, card, facts, folded, table

if TYPE_CHECKING:  # some of these rooms need jax, a report does not
    from jaxshard._diff import DiffReport
    from jaxshard._options import LoadReport
    from jaxshard._prune import PruneReport
    from jaxshard._saving import SaveReport
    from jaxshard._stats import LeafStats, StatsReport
    from jaxshard._verify import VerifyReport

_WHOLE_TREE = "(the whole tree)"


def save_report(report: "SaveReport") -> Html:
    """The display of a `SaveReport`."""
    blocked = f"{report.blocked_s:.3f} s" if report.blocked_s < report.seconds else None
    return card(
        "Saved",
        report.path,
        facts(
            {
                "step": report.step,
                "size": size_text(report.nbytes),
                "unchanged": size_text(report.reused_nbytes) if report.reused_nbytes else None,
                "files": f"{report.files:,}",
                "time": f"{report.seconds:.2f} s",
                "rate": rate_text(report.nbytes, report.seconds),
                "caller blocked": blocked,
            }
        ),
    )


def load_report(report: "LoadReport") -> Html:
    """The display of a `LoadReport`."""
    lists = [
        folded(f"{title}: {counted(len(names), 'leaf')}", table(["leaf"], [[n] for n in names]))
        for title, names in (("kept from like", report.filled), ("converted", report.cast))
        if names
    ]
    return card(
        "Loaded",
        report.path,
        facts(
            {
                "step": report.step,
                "needed": size_text(report.bytes_needed),
                "read": size_text(report.bytes_read),
                "time": f"{report.seconds:.2f} s",
                "rate": rate_text(report.bytes_needed, report.seconds),
            }
        ),
        *lists,
    )


def verify_report(report: "VerifyReport") -> Html:
    """The display of a `VerifyReport`."""
    found = badge("✓ sound", "good")
    body = [
        facts(
            {
                "files": f"{report.files:,}",
                "compared": size_text(report.nbytes),
                "leftover files": len(report.leftovers) or None,
            }
        )
    ]
    if not report.ok:
        found = badge(f"✗ {counted(len(report.problems), 'problem')}", "bad")
        rows = [[p.leaf or "", p.file, p.kind, p.message] for p in report.problems]
        body.append(table(["leaf", "file", "kind", "what is wrong"], rows))
    if report.leftovers:
        names = table(["file"], [[name] for name in report.leftovers])
        body.append(folded("leftovers (harmless)", names))
    return card("Verified", report.path, *body, badge=found)


def diff_report(report: "DiffReport") -> Html:
    """The display of a `DiffReport`."""
    number = len(report.differences)
    found = badge("identical", "good") if report.identical else badge(f"{number:,} differ", "bad")
    body = [
        facts(
            {
                "a": report.path_a,
                "b": report.path_b,
                "leaves": f"{report.leaves:,}",
                "read": size_text(report.nbytes) if report.nbytes else None,
            }
        )
    ]
    if report.differences:
        rows = [[d.name or _WHOLE_TREE, d.what] for d in report.differences]
        body.append(table(["leaf", "difference"], rows))
    return card("Compared", "", *body, badge=found)


def stats_report(report: "StatsReport") -> Html:
    """The display of a `StatsReport`."""
    found = badge("all finite", "good") if report.finite else badge("not finite", "bad")
    header = ["leaf", "type", "shape", "min", "max", "mean", "norm", "NaN", "inf"]
    rows = [_stats_row(leaf) for leaf in report.leaves]
    body = facts({"step": report.step, "read": size_text(report.nbytes)})
    numbers = table(header, rows, numbers=("min", "max", "mean", "norm", "NaN", "inf"))
    return card("Statistics", report.path, body, numbers, badge=found)


def _stats_row(leaf: "LeafStats") -> list[str]:
    numbers = (leaf.min, leaf.max, leaf.mean, leaf.norm)
    cells = ["" if n is None else f"{n:.4g}" for n in numbers]
    counts = [f"{n:,}" if n else "" for n in (leaf.nans, leaf.infs)]
    return [leaf.name or _WHOLE_TREE, leaf.dtype, _words.shape(leaf.shape), *cells, *counts]


def prune_report(report: "PruneReport") -> Html:
    """The display of a `PruneReport`."""
    lists = {
        "step, released": report.steps,
        "leftover": report.leftovers,
        "kept, changed recently": report.recent,
        "kept, damaged": report.damaged,
    }
    rows = [[name, why] for why, names in lists.items() for name in names]
    body = [facts({"freed": size_text(report.nbytes), "deleted": f"{len(report.deleted):,}"})]
    if rows:
        body.append(table(["name", "why"], rows))
    title = "Would prune" if report.dry_run else "Pruned"
    return card(title, report.path, *body)
