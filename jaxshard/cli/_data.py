"""`jaxshard data`: which rows a loader gives, and whether two loaders give the same."""

import ast
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxshard.cli._output import Failure, print_json, print_table
from jaxshard.cli._verb import Verb, json_option

if TYPE_CHECKING:
    from jaxshard.data._compare import Compared
    from jaxshard.data._loader import ElasticLoader

_SHOWN = 12  # rows of a batch in a table


@click.command(
    "data",
    cls=Verb,
    examples=[
        "jaxshard data rows train:make_loader --step 100 --count 3",
        "jaxshard data compare 'train:make_loader(data=8)' 'train:make_loader(data=2)' --count 50",
    ],
    keys={
        "batches[].step": "of rows: batches before this one",
        "batches[].rows": "of rows: numbers of its rows; pairs of source and row of a mixture",
        "loaders": "of compare: the two that were compared",
        "same": "of compare: whether all batches that were looked at are the same",
        "compared": "of compare: how many batches are the same, from --step on",
        "difference.step, .what": "of compare: the first batch that is not, and in which way",
        "difference.rows": "of compare: its rows in both, from the first that differs",
    },
    bad="the loaders give different batches",
)
@click.option(
    "--step", type=click.IntRange(0), default=0, show_default=True, help="Batches before the first."
)
@click.option(
    "--count", type=click.IntRange(1), default=3, show_default=True, help="How many batches."
)
@click.option(
    "--rows-only", is_flag=True, help="Compare numbers of rows, without reading elements."
)
@json_option
@click.argument("what", type=click.Choice(["rows", "compare"]))
@click.argument("loaders", nargs=-1, required=True, metavar="LOADER [LOADER]")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    what: str,
    loaders: tuple[str, ...],
    step: int,
    count: int,
    rows_only: bool,
    as_json: bool,
) -> None:
    """Say which rows a loader gives, or whether two loaders give the same batches.

    LOADER is MODULE:NAME, an ElasticLoader or a function that makes one, with arguments if it wants
    some: 'train:make_loader(batch=64)'; the module may be a file, train.py. Nothing is trained.
    """
    expected = 1 if what == "rows" else 2
    if len(loaders) != expected:
        raise Failure(
            f"data {what}: expected {'one LOADER' if expected == 1 else 'two LOADERs'}, found "
            f"{len(loaders)}\nhint: jaxshard data --help"
        )
    found = [_loader(text) for text in loaders]
    if what == "rows":
        _show_rows(found[0], step, count, as_json=as_json)
        return
    from jaxshard.data._compare import compare  # noqa: PLC0415  (it imports jax)

    compared = compare(*found, step=step, count=count, read=not rows_only)
    _show_compared(compared, loaders, step, as_json=as_json)
    if compared.difference is not None:
        ctx.exit(1)


def _show_rows(loader: "ElasticLoader", step: int, count: int, *, as_json: bool) -> None:
    if loader.batches is not None:
        count = min(count, max(loader.batches - step, 1))
    try:
        batches = [(at, loader.rows(at).tolist()) for at in range(step, step + count)]
    except (IndexError, ValueError) as e:  # beyond the end; a stream
        raise Failure(str(e)) from e
    if as_json:
        print_json({"batches": [{"step": at, "rows": rows} for at, rows in batches]})
        return
    print_table(["STEP", "ROWS"], [[str(at), _rows_text(rows)] for at, rows in batches])


def _rows_text(rows: list[Any]) -> str:
    texts = [str(row) if isinstance(row, int) else ":".join(map(str, row)) for row in rows[:_SHOWN]]
    more = len(rows) - len(texts)
    return " ".join(texts) + (f" … {more} more" if more else "")


def _show_compared(
    compared: "Compared", loaders: tuple[str, ...], step: int, *, as_json: bool
) -> None:
    difference = compared.difference
    if as_json:
        found = None if difference is None else difference._asdict()
        print_json(
            {
                "loaders": list(loaders),
                "same": difference is None,
                "compared": compared.batches,
                "difference": found,
            }
        )
        return
    last = step + compared.batches - 1
    if compared.batches:
        same = f"batches {step} to {last} are the same"
    else:
        same = f"both end before batch {step}" if difference is None else "no batch is the same"
    click.echo(f"{loaders[0]} and {loaders[1]}: {same}")
    if difference is None:
        return
    click.echo(f"batch {difference.step}: {difference.what}")
    for name, rows in zip(loaders, difference.rows, strict=True):
        if rows:
            click.echo(f"  {name}: {_rows_text(rows)}")


# MODULE:NAME and arguments ------------------------------------------------------------------------


def _loader(text: str) -> "ElasticLoader":
    from jaxshard.data import ElasticLoader  # noqa: PLC0415  (it imports jax)

    module, name, arguments = _parsed(text)
    found = getattr(_module(module, text), name, None)
    if found is None:
        raise Failure(
            f"{text}: expected {name!r} in {module}, found nothing\nhint: is it spelt so?"
        )
    if callable(found) and not isinstance(found, ElasticLoader):
        try:
            found = found(**arguments)
        except Exception as e:
            raise Failure(f"{text}: {type(e).__name__}: {e}") from e
    if not isinstance(found, ElasticLoader):
        raise Failure(
            f"{text}: expected an ElasticLoader, found {type(found).__qualname__}\n"
            "hint: a function that returns the loader"
        )
    return found


def _parsed(text: str) -> tuple[str, str, dict[str, Any]]:
    """Module, name and keyword arguments, which are literals: nothing is evaluated."""
    module, colon, call = text.partition(":")
    try:
        node = ast.parse(call, mode="eval").body
        arguments = {}
        if isinstance(node, ast.Call) and not node.args:
            arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            node = node.func
        if isinstance(node, ast.Name) and module and colon:
            return module, node.id, arguments
    except (SyntaxError, ValueError):
        pass
    raise Failure(
        f"{text}: expected MODULE:NAME, or MODULE:NAME(argument=value) with plain values\n"
        "hint: jaxshard data rows train:make_loader"
    )


def _module(name: str, text: str) -> Any:
    path = Path(name)
    sys.path.insert(0, str(path.parent if path.suffix == ".py" else Path.cwd()))
    try:
        return importlib.import_module(path.stem if path.suffix == ".py" else name)
    except ModuleNotFoundError as e:
        raise Failure(
            f"{text}: there is no module {e.name!r}\nhint: run it where `python -c 'import "
            f"{path.stem}'` works, or give the file, ./{path.stem}.py"
        ) from e
