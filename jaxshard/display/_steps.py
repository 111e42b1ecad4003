"""A run: its committed steps, and what the newest one holds."""

from jaxshard._errors import JaxshardError, counted, size_text
from jaxshard._run import Run
from jaxshard.display import _words
from jaxshard.display._markup import Html, card, facts, note, span

STEPS_MAX = 24


def run(shown: Run) -> Html:
    """The display of a run."""
    try:
        steps = shown.all_steps()
    except (JaxshardError, OSError) as e:
        return card(
            "Run", shown.path, note(f"its steps cannot be listed: {str(e).splitlines()[0]}")
        )
    if not steps:
        return card("Run", shown.path, note("no step was committed yet"))
    return card("Run", shown.path, facts({"steps": _list(steps), **_newest(shown, steps[-1])}))


def _list(steps: list[int]) -> Html:
    shown = [str(step) for step in steps[-STEPS_MAX:]]
    before = "… " if len(steps) > STEPS_MAX else ""
    how_many = span("count", f" ({len(steps):,})") if len(steps) > 1 else ""
    return span("steps", f"{before}{', '.join(shown)}", how_many)


def _newest(shown: Run, step: int) -> dict[str, object]:
    try:
        newest = shown.open(step)
    except (JaxshardError, OSError) as e:
        return {"newest": f"step {step} cannot be opened: {str(e).splitlines()[0]}"}
    size = f"{counted(len(newest), 'leaf')}, {size_text(newest.nbytes)}"
    return {"newest": f"step {step}: {size}", "saved": _words.saved_at(newest.created)}
