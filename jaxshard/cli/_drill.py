"""`jaxshard drill`: kill a real training, and measure what a failure costs."""

import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from jaxshard._report import duration_text
from jaxshard.cli._output import Cell, Failure, Styled, note, print_json, print_page, print_table
from jaxshard.cli._verb import Duration, Size, Verb, html_option, json_option

if TYPE_CHECKING:
    from jaxshard._drill import DrillReport

_IN_PYPROJECT = (
    "kills", "max_lost", "max_resume", "min_goodput", "max_storage", "max_slowdown",
)  # fmt: skip


@click.command(
    "drill",
    cls=Verb,
    examples=[
        "jaxshard drill --kills 3 --max-lost 30s --max-resume 60s -- python train.py",
        "jaxshard drill --min-goodput 0.5 --root drills/lm -- ./train.sh",
    ],
    keys={
        "path": "the run that was killed; gone unless --root was given",
        "ok": "whether every target is reached",
        "whole_s": "seconds that the run took which nobody killed",
        "kills[].step": "that it had come to",
        "kills[].lost_steps, .lost_s": "done again, and how long they had taken",
        "kills[].resume_s": "from the start of the process to its first new step",
        "goodput": "share of the time in useful steps",
        "storage": "bytes below the root, at most",
        "slowdown": "time in steps with saving, as a multiple of that without",
        "differences": "leaves of the end state that are not as without kills",
        "checks[].name, .target, .found, .ok": "each target",
    },
    bad="a target is missed",
    context_settings={"ignore_unknown_options": False},
)
@click.option("--kills", type=click.IntRange(1), default=3, show_default=True, help="How many.")
@click.option("--max-lost", type=Duration(), metavar="TIME", help="Training that a kill may lose.")
@click.option(
    "--max-resume", type=Duration(), metavar="TIME", help="From a start to the first new step."
)
@click.option(
    "--min-goodput", type=click.FloatRange(0, 1), metavar="SHARE", help="Time in useful steps."
)
@click.option("--max-storage", type=Size(), metavar="SIZE", help="Below the root, such as 20GB.")
@click.option(
    "--max-slowdown", type=click.FloatRange(1), metavar="FACTOR", help="By saving, such as 1.05."
)
@click.option(
    "--allow-drift", is_flag=True, help="The end state may differ from that without kills."
)
@click.option("--root", metavar="DIR", help="Keep the runs and their logs here; must not exist.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the moments of the kills.")
@html_option
@json_option
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    command: tuple[str, ...],
    *,
    kills: int,
    allow_drift: bool,
    root: str | None,
    seed: int,
    as_html: bool,
    as_json: bool,
    **targets: float | None,
) -> None:
    """Kill a real training at random moments, and measure what that costs.

    COMMAND runs once undisturbed, and once with SIGKILLs, each followed by another start; both
    write to directories of the drill (its ResumeManager is given another root). Then what was
    measured is compared with the targets. A gate before a long run, and for CI. Kills and targets
    may also stand in [tool.jaxshard.drill] of ./pyproject.toml, as max_lost = "30s".
    """
    from jaxshard._drill import Targets, drill  # noqa: PLC0415  (NumPy)

    wanted = {**_from_pyproject(ctx), **{k: v for k, v in targets.items() if v is not None}}
    if ctx.get_parameter_source("kills") is not ParameterSource.COMMANDLINE:
        kills = int(wanted.pop("kills", kills))
    with tempfile.TemporaryDirectory(prefix="jaxshard-drill-") as made:
        if root is not None:
            if Path(root).exists():
                raise Failure(f"{root}: expected nothing, found something\nhint: --root another")
            Path(root).mkdir(parents=True)
        report = drill(
            command,
            Path(made if root is None else root).resolve(),
            kills=kills,
            targets=Targets(
                max_lost_s=wanted.get("max_lost"),
                max_resume_s=wanted.get("max_resume"),
                min_goodput=wanted.get("min_goodput"),
                max_storage=wanted.get("max_storage"),
                max_slowdown=wanted.get("max_slowdown"),
                exact=not allow_drift,
            ),
            seed=seed,
            say=note,
        )
    if as_html:
        print_page(report)
    elif as_json:
        _print_json(report)
    else:
        _print(report)
    if not report.ok:
        missed = sum(not check.ok for check in report.checks)
        note(f"{missed} of {len(report.checks)} targets missed")
        ctx.exit(1)


def _from_pyproject(ctx: click.Context) -> dict[str, float]:
    """Targets of the project, as their options would read them."""
    try:
        text = Path("pyproject.toml").read_text(encoding="utf-8")
        found = tomllib.loads(text).get("tool", {}).get("jaxshard", {}).get("drill", {})
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as e:
        raise Failure(f"pyproject.toml: {e}") from e
    unknown = sorted(set(found) - set(_IN_PYPROJECT))
    if unknown:
        raise Failure(
            f"pyproject.toml: [tool.jaxshard.drill] has {', '.join(unknown)}\n"
            f"hint: known are {', '.join(_IN_PYPROJECT)}"
        )
    options = {option.name: option for option in ctx.command.params}
    return {
        name: options[name].type.convert(value, options[name], ctx) for name, value in found.items()
    }


def _print(report: "DrillReport") -> None:
    rows = [
        [
            str(kill.step),
            str(kill.lost_steps),
            duration_text(kill.lost_s),
            duration_text(kill.resume_s),
        ]
        for kill in report.kills
    ]
    print_table(["KILLED AT STEP", "STEPS LOST", "TIME LOST", "TO FIRST NEW STEP"], rows)
    click.echo()
    checks: list[list[Cell]] = [
        [
            *check.words,
            Styled("reached", "green") if check.ok else Styled("missed", "red"),
        ]
        for check in report.checks
    ]
    print_table(["TARGET", "WANTED", "FOUND", "RESULT"], checks)
    for line in report.differences[:10]:
        click.echo(f"  {line}")
    click.echo()
    click.echo(report.summary)


def _print_json(report: "DrillReport") -> None:
    document: dict[str, Any] = {
        "path": report.path,
        "ok": report.ok,
        "whole_s": report.whole_s,
        "kills": [kill._asdict() for kill in report.kills],
        "goodput": report.goodput.goodput,
        "storage": report.storage,
        "slowdown": report.slowdown,
        "differences": report.differences,
        "checks": [check._asdict() for check in report.checks],
    }
    print_json(document)
