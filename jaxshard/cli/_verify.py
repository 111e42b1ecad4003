"""`jaxshard verify`: is every byte what was written, and if not, which leaf is damaged."""

from typing import Any

import click

import jaxshard
from jaxshard._errors import counted, size_text
from jaxshard._manifest import FILE
from jaxshard._run import Run
from jaxshard._steps import committed_versions
from jaxshard._store import open_store, storage_errors
from jaxshard.cli._output import Failure, note, print_json, print_table, progress
from jaxshard.cli._verb import Verb, json_option, locate


@click.command(
    "verify",
    cls=Verb,
    examples=["jaxshard verify ckpt", "jaxshard verify runs/lm --no-data --json"],
    keys={
        "path": "the run or checkpoint",
        "ok": "whether nothing is wrong",
        "checkpoints[].path, .ok": "one for each that was looked at",
        "checkpoints[].files, .nbytes": "files looked at, bytes of elements read and compared",
        "checkpoints[].problems[].kind": "missing, length, damaged, misplaced or extra",
        "checkpoints[].problems[].file": "relative to the checkpoint",
        "checkpoints[].problems[].leaf, .piece": "whose data is in the file, or null",
        "checkpoints[].problems[].message": "what is wrong, in words",
        "checkpoints[].leftovers": "files of other attempts and temporary ones: harmless",
    },
    bad="damage was found",
)
@click.argument("path")
@click.option(
    "--no-data", is_flag=True, help="Only presence and lengths of files, and the small ones."
)
@json_option
@click.pass_context
def command(ctx: click.Context, path: str, *, no_data: bool, as_json: bool) -> None:
    """Find damaged files, and the leaves that they belong to.

    PATH is a checkpoint, a run (every committed step is looked at) or RUN@STEP. All data is read
    and compared with the digests that were made when it was saved, so that a missing, cut, changed,
    exchanged or stale file is noticed.
    """
    url, targets = _targets(path)
    documents = []
    for target in targets:
        report = _verify(target, read_data=not no_data)
        if report is None:
            continue
        documents.append(_json(report))
        if not as_json:
            _print(report)
    ok = all(document["ok"] for document in documents)
    if as_json:
        print_json({"path": url, "ok": ok, "checkpoints": documents})
    if not ok:
        bad = sum(not document["ok"] for document in documents)
        way_out = "; a run resumes from its newest sound step" if len(documents) > 1 else ""
        note(f"{bad} of {counted(len(documents), 'checkpoint')} damaged{way_out}")
        ctx.exit(1)


def _targets(path: str) -> tuple[str, list[str]]:
    """What a path stands for, and the checkpoints in it."""
    try:
        found = locate(path)
    except (jaxshard.CorruptionError, jaxshard.FormatError):  # of the manifest: a finding as well
        url = open_store(path).url
        return url, [url]
    if not isinstance(found, Run):
        return found.path, [found.path]
    with storage_errors("listing", found.path):
        steps = committed_versions(open_store(found.path))
    if not steps:
        raise Failure(f"{found.path}: expected a committed step, found none")
    return found.path, [f"{found.path}/{step.name}" for step in steps]


def _verify(path: str, *, read_data: bool) -> "jaxshard.VerifyReport | None":
    name = path.rpartition("/")[2]
    with progress(name) as on_progress:
        try:
            return jaxshard.verify(path, read_data=read_data, on_progress=on_progress)
        except (jaxshard.NotFoundError, jaxshard.CheckpointReplacedError):
            if open_store(path).size(FILE) is not None:
                raise
            note(f"{name} was deleted meanwhile, as a run deletes its old steps")
            return None


def _json(report: "jaxshard.VerifyReport") -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "files": report.files,
        "nbytes": report.nbytes,
        "problems": [problem._asdict() for problem in report.problems],
        "leftovers": report.leftovers,
    }


def _print(report: "jaxshard.VerifyReport") -> None:
    looked = f"{counted(report.files, 'file')}, {size_text(report.nbytes)} compared"
    if report.leftovers:
        looked += f", {counted(len(report.leftovers), 'leftover')} for jaxshard prune"
    if report.ok:
        click.echo(f"{report.path}: {click.style('sound', fg='green')} ({looked})")
        return
    problems = click.style(counted(len(report.problems), "problem"), fg="red")
    click.echo(f"{report.path}: {problems} ({looked})")
    rows = [["-" if p.leaf is None else p.leaf, p.kind, p.file, p.message] for p in report.problems]
    print_table(["LEAF", "PROBLEM", "FILE", "WHAT"], rows)
