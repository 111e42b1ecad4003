"""The command line: `jaxshard VERB …`.

Each verb is a file of its own, imported when it is called; what takes long to import (jax,
tensorstore, numpy) is imported where a verb needs it. Data goes to stdout, everything else to
stderr. A room never imports from here.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import click

import jaxshard
from jaxshard.cli._output import Failure, failure_of, note

VERBS = (
    "ls", "show", "verify", "diff", "stats", "cat", "prune", "report", "protect", "unprotect",
    "mark-bad", "rollback", "undo", "drill", "data",
)  # fmt: skip
_INTERRUPTED = 130  # 128 + SIGINT, as shells count
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_PATHS = {
    "CKPT": "a checkpoint; or a run, whose newest committed step is taken",
    "RUN@STEP": "one step of a run, as in runs/lm@300; the same as runs/lm/step_00000300",
    "PATTERN": "leaf names: * within one component, ** across, {a,b} alternatives; quote it",
}
_EXIT_CODES = {
    "0": "done, and all is well",
    "1": "done, and the answer is bad: damage was found, checkpoints differ",
    "2": "could not be done: wrong usage, nothing there, not readable",
    "130": "interrupted (Ctrl-C)",
}


class _Jaxshard(click.Group):
    """The verbs by name, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        module = cmd_name.replace("-", "_")
        command: click.Command = importlib.import_module(f"jaxshard.cli._{module}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        verbs: list[Any] = [self.get_command(ctx, name) for name in VERBS]
        with formatter.section("Verbs"):
            formatter.write_dl([(verb.name, verb.get_short_help_str(90)) for verb in verbs])
        with formatter.section("Examples"):
            for verb in verbs:
                formatter.write(f"{'':{formatter.current_indent}}{verb.examples[0]}\n")
        for title, lines in (("Paths and patterns", _PATHS), ("Exit codes", _EXIT_CODES)):
            with formatter.section(title):
                formatter.write_dl(list(lines.items()))

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get("NO_COLOR"):  # https://no-color.org
            ctx.color = False
        with _failures(ctx):
            value = super().invoke(ctx)
            sys.stdout.flush()  # here a reader that has gone away is noticed
        return value


@contextlib.contextmanager
def _failures(ctx: click.Context) -> Iterator[None]:
    """Turn what a verb raises into one message and an exit code, never a traceback.

    Only a bug of ours shows one; it must not be taken for a bad answer either.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except KeyboardInterrupt:
        note("interrupted")
        ctx.exit(_INTERRUPTED)
    except BrokenPipeError:
        # Nobody reads on, as `| head` after its lines; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ctx.exit(_BROKEN_PIPE)
    except (jaxshard.JaxshardError, OSError) as e:
        failure_of(e).show()
        ctx.exit(getattr(e, "exit_code", Failure.exit_code))
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        raise Failure(
            "this is a bug in jaxshard\nhint: please report it with the lines above"
        ) from None


@click.command(cls=_Jaxshard, invoke_without_command=True, subcommand_metavar="VERB ...")
@click.version_option(jaxshard.__version__, prog_name="jaxshard")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Look into checkpoints and runs, check them, and free what nobody needs.

    Every verb has --json: one JSON document on stdout, whose keys `jaxshard VERB --help` lists.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command line, as the script `jaxshard` does."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a text that the terminal cannot show is no failure
            stream.reconfigure(errors="backslashreplace")
    command(prog_name="jaxshard")
