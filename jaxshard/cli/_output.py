"""What the verbs say: tables and JSON on stdout, notes, failures and progress on stderr.

Colours and progress bars appear only on a terminal; piped output is plain and complete.
"""

import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import click

from jaxshard._errors import JaxshardError

PROGRESS_AFTER_S = 1.0
# Hints speak to somebody who writes Python; the same advice for the command line.
_HINTS = (
    (re.compile(r"jaxshard\.verify\('(.*)'\)"), r"jaxshard verify \1"),
    (re.compile(r"jaxshard\.verify\(path\)"), "jaxshard verify CKPT"),
    (re.compile(r"all_steps\(\) lists"), "jaxshard ls RUN lists"),
    (re.compile(r"^load (\S+/step_\S+)$"), r"give \1"),
)


class Failure(click.ClickException):
    """What was asked for could not be done."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """One message on stderr, in the form of all our errors."""
        click.echo(
            f"{click.style('jaxshard:', fg='red', bold=True)} {self.message}", file, err=True
        )


def failure_of(error: Exception) -> Failure:
    """An error of a room as a failure of the command line."""
    message = str(error)
    if isinstance(error, JaxshardError) and error.hint is not None:
        hint = error.hint
        for call, command in _HINTS:
            hint = call.sub(command.replace("RUN", error.path or "RUN"), hint)
        message = f"{message.removesuffix(error.hint)}{hint}"
    return Failure(message)


def note(text: str) -> None:
    """Something to know beside the answer, on stderr."""
    click.echo(f"{click.style('jaxshard:', bold=True)} {text}", err=True)


# JSON ---------------------------------------------------------------------------------------


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document."""
    click.echo(json.dumps(plain(document), allow_nan=False))


def print_page(value: object) -> None:
    """The display of a value as one HTML page."""
    from jaxshard import display  # noqa: PLC0415  (few look-ups need it)

    click.echo(display.page(value), nl=False)


def plain(value: Any) -> Any:
    """A value as JSON has it: NaN and infinities as strings, complex numbers as pairs."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case complex():
            return [plain(value.real), plain(value.imag)]
        case Mapping():
            return {str(key): plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
        case bytes():
            return value.hex()
    return value


# Text ---------------------------------------------------------------------------------------


class Styled(NamedTuple):
    """A text with a colour that it has on a terminal."""

    text: str
    color: str


Cell = str | Styled


def print_table(header: Sequence[str], rows: Sequence[Sequence[Cell]], *, right: str = "") -> None:
    """Columns with two spaces between them; those named in `right` are numbers."""
    texts = [[cell.text if isinstance(cell, Styled) else cell for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    to_right = [name in right.split() for name in header]
    for row in [[Styled(name, "bright_black") for name in header], *rows]:
        padded = [_pad(*cell) for cell in zip(row, widths, to_right, strict=True)]
        click.echo("  ".join(padded).rstrip())


def _pad(cell: Cell, width: int, to_right: bool) -> str:  # noqa: FBT001
    text = cell.text if isinstance(cell, Styled) else cell
    space = " " * (width - len(text))
    shown = click.style(text, fg=cell.color) if isinstance(cell, Styled) else text
    return space + shown if to_right else shown + space


# Progress -----------------------------------------------------------------------------------

OnProgress = Callable[[int, int], None]


@contextlib.contextmanager
def progress(what: str) -> Iterator[OnProgress | None]:
    """A bar for what takes longer than about a second, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with contextlib.ExitStack() as stack:
        yield _Bar(what, stack).update


class _Bar:
    """Bytes done, rate and time left; begins when the work turns out to be long."""

    def __init__(self, what: str, stack: contextlib.ExitStack) -> None:
        self._what = what
        self._stack = stack
        self._started = time.monotonic()
        self._show: OnProgress | None = None

    def update(self, done: int, total: int) -> None:
        if self._show is None and time.monotonic() - self._started >= PROGRESS_AFTER_S:
            self._show = self._begin()
        if self._show is not None:
            self._show(done, total)

    def _begin(self) -> OnProgress:
        from rich import progress as rich  # noqa: PLC0415  (only here, and it takes long)
        from rich.console import Console  # noqa: PLC0415

        bar = self._stack.enter_context(
            rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.DownloadColumn(binary_units=True),
                rich.TransferSpeedColumn(),
                rich.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
        )
        task = bar.add_task(self._what, total=None)
        return lambda done, total: bar.update(task, completed=done, total=total)
