"""`jaxshard show`: what is in a checkpoint, and where its bytes go."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from jaxshard._errors import counted, size_text
from jaxshard._reader import Checkpoint, LeafInfo, select_leaves
from jaxshard._spec import decode_value
from jaxshard.cli._output import plain, print_json, print_table
from jaxshard.cli._verb import Verb, json_option, open_one

if TYPE_CHECKING:
    from collections.abc import Iterator

_VALUES = {"bool", "int", "float", "complex", "str", "bytes", "iterator"}  # kept in the manifest
_VALUE_SHOWN = 40
_WHOLE_TREE = "(the whole tree)"


@dataclasses.dataclass(slots=True)
class _Group:
    """A part of the tree: all leaves whose names begin with its name."""

    name: str
    depth: int
    leaves: int = 0
    nbytes: int = 0
    children: "dict[str, _Group | LeafInfo]" = dataclasses.field(default_factory=dict)


@click.command(
    "show",
    cls=Verb,
    examples=[
        "jaxshard show runs/lm --depth 2 --sort size",
        "jaxshard show runs/lm@300 'params/**'",
        "jaxshard show ckpt --flat | grep bfloat16",
    ],
    keys={
        "path, step, saved": "of the checkpoint",
        "metadata, environment": "what was given to save; versions and flags at that time",
        "nbytes": "bytes of all arrays in memory, shared ones once",
        "reused_nbytes, thinned_to": "as in ls",
        "selected_nbytes": "of the leaves that are listed",
        "groups[].name": "a part of the tree",
        "groups[].leaves, groups[].nbytes": "what is below it",
        "leaves[].name": "components of the path, joined by /",
        "leaves[].kind, .dtype, .shape": "what it is",
        "leaves[].nbytes": "bytes in memory",
        "leaves[].spec, .mesh, .memory_kind": "how it was placed; spec has one entry for each axis",
        "leaves[].stored": "array (a Zarr array of its own), pack (shares files), manifest",
        "leaves[].zarr_path": "of its own array, below CKPT/ATTEMPT/data",
        "leaves[].same_as": "name of the leaf that is the same array; its bytes count there",
        "leaves[].reused_nbytes": "bytes in files that are also those of the step before",
        "leaves[].reused_saves": "how many saves in a row have shared a file",
        "leaves[].digest": "equal for equal elements on an equal grid of tiles",
        "leaves[].value": "of numbers and short texts; complex: [real, imaginary]; NaN and "
        "infinities as strings",
    },
)
@click.argument("checkpoint", metavar="CKPT")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Show N levels of the tree.")
@click.option(
    "--sort",
    type=click.Choice(["tree", "size"]),
    default="tree",
    show_default=True,
    help="In the order of the tree, or the largest first.",
)
@click.option("--flat", is_flag=True, help="Only leaves, without the totals of groups.")
@json_option
def command(
    checkpoint: str,
    patterns: tuple[str, ...],
    *,
    depth: int | None,
    sort: str,
    flat: bool,
    as_json: bool,
) -> None:
    """Show the tree of a checkpoint, and where its memory goes.

    For each leaf its type, sharding, storage and bytes, for each part of the tree the total. CKPT
    is a checkpoint, a run (its newest step) or RUN@STEP. Only leaves that match a PATTERN are
    shown, all if there is none. Reads the manifest only. Piped, every line has a full name. --depth
    and --flat do not matter to --json.
    """
    ckpt = open_one(checkpoint)
    leaves = select_leaves(ckpt, patterns or None)
    if sort == "size":
        leaves.sort(key=_bytes_of, reverse=True)
    root = _tree(leaves)
    if as_json:
        _print_json(ckpt, leaves, root)
        return
    _print_head(ckpt, leaves, root.nbytes)
    rows: list[_Group | LeafInfo] = list(leaves)
    if not flat:
        rows = list(_lines(root, by_size=sort == "size", depth=depth or sys.maxsize))
    _print_rows(ckpt, rows, root.nbytes, indent=not flat and sys.stdout.isatty())


def _bytes_of(entry: "_Group | LeafInfo") -> int:
    """What an entry adds to the whole."""
    return 0 if isinstance(entry, LeafInfo) and entry.same_as is not None else entry.nbytes


def _tree(leaves: list[LeafInfo]) -> _Group:
    root = _Group("", 0)
    for info in leaves:
        here = root
        components = info.name.split("/")
        for number in range(len(components)):
            here.leaves += 1
            here.nbytes += _bytes_of(info)
            name = "/".join(components[: number + 1])
            if number < len(components) - 1:
                child = here.children.setdefault(name, _Group(name, number + 1))
                assert isinstance(child, _Group), f"{name} is a leaf and has leaves below"
                here = child
        here.children[info.name] = info
    return root


def _lines(group: _Group, *, by_size: bool, depth: int) -> "Iterator[_Group | LeafInfo]":
    children = list(group.children.values())
    if by_size:
        children.sort(key=_bytes_of, reverse=True)
    for child in children:
        yield child
        if isinstance(child, _Group) and child.depth < depth:
            yield from _lines(child, by_size=by_size, depth=depth)


# Text ---------------------------------------------------------------------------------------


def _print_head(ckpt: Checkpoint, leaves: list[LeafInfo], nbytes: int) -> None:
    step = "" if ckpt.step is None else f"step {ckpt.step}, "
    saved = ckpt.created[:19].replace("T", " ")
    size = f"{counted(len(ckpt), 'leaf')}, {size_text(ckpt.nbytes)}"
    click.echo(f"{ckpt.path}: {step}{size}, saved {saved} UTC")
    if ckpt.metadata:
        click.echo(f"metadata: {json.dumps(plain(ckpt.metadata))}")
    if ckpt.thinned_to:
        click.echo(f"thinned to {', '.join(ckpt.thinned_to)}: cannot be resumed from")
    if ckpt.reused_nbytes:
        click.echo(f"unchanged since the step before: {size_text(ckpt.reused_nbytes)}")
    if len(leaves) < len(ckpt):
        click.echo(f"selected: {counted(len(leaves), 'leaf')}, {size_text(nbytes)}")
    click.echo()


def _print_rows(
    ckpt: Checkpoint, rows: "list[_Group | LeafInfo]", total: int, *, indent: bool
) -> None:
    header = ["NAME", "TYPE", "SPEC", "STORED", "BYTES", "SHARE"]
    table = []
    for row in rows:
        name = row.name
        if indent:
            above, _, last = name.rpartition("/")
            name = "  " * (above.count("/") + 1 if above else 0) + last
        if isinstance(row, _Group):
            what = (f"{name}/", counted(row.leaves, "leaf"), "", "")
        else:
            what = (name or _WHOLE_TREE, _type(ckpt, row), _spec(row), _stored(row))
        share = f"{_bytes_of(row) / total:.1%}" if total else ""
        table.append([*what, size_text(_bytes_of(row)), share])
    print_table(header, table, right="BYTES SHARE")


def _type(ckpt: Checkpoint, info: LeafInfo) -> str:
    text = ckpt.leaf_spec(info.name).describe().removeprefix("an ")
    value = _value(ckpt, info)
    if value is None:
        return text
    shown = repr(value)
    return f"{text} {shown if len(shown) <= _VALUE_SHOWN else shown[: _VALUE_SHOWN - 1] + '…'}"


def _value(ckpt: Checkpoint, info: LeafInfo) -> Any:
    """The value, if it is a Python one that the manifest keeps."""
    leaf = ckpt.leaf_spec(info.name)
    return decode_value(leaf) if leaf.kind in _VALUES and not leaf.has_array else None


def _spec(info: LeafInfo) -> str:
    return "" if info.spec is None else f"P({', '.join(map(repr, info.spec))})"


def _stored(info: LeafInfo) -> str:
    if info.same_as is not None:
        return f"same as {info.same_as}"
    return _place(info) + (", unchanged" if info.reused is not None else "")


def _place(info: LeafInfo) -> str:
    if info.tile_shape is None:
        return "manifest"
    return "pack" if info.packed else "array"


# JSON ---------------------------------------------------------------------------------------


def _print_json(ckpt: Checkpoint, leaves: list[LeafInfo], root: _Group) -> None:
    groups = (g for g in _lines(root, by_size=False, depth=sys.maxsize) if isinstance(g, _Group))
    print_json(
        {
            "path": ckpt.path,
            "step": ckpt.step,
            "saved": ckpt.created,
            "metadata": ckpt.metadata,
            "environment": ckpt.environment,
            "nbytes": ckpt.nbytes,
            "reused_nbytes": ckpt.reused_nbytes,
            "thinned_to": ckpt.thinned_to,
            "selected_nbytes": root.nbytes,
            "groups": [{"name": g.name, "leaves": g.leaves, "nbytes": g.nbytes} for g in groups],
            "leaves": [_leaf_json(ckpt, info) for info in leaves],
        }
    )


def _leaf_json(ckpt: Checkpoint, info: LeafInfo) -> dict[str, Any]:
    fields = ("name", "kind", "dtype", "shape", "nbytes", "spec")
    out = {field: getattr(info, field) for field in fields}
    out["mesh"] = None if info.mesh is None else info.mesh._asdict()
    out["memory_kind"] = info.memory_kind
    out["stored"] = _place(info)
    for field in ("zarr_path", "same_as", "digest"):
        out[field] = getattr(info, field)
    out["reused_nbytes"] = 0 if info.reused is None else info.reused.nbytes
    out["reused_saves"] = 0 if info.reused is None else info.reused.saves
    out["value"] = _value(ckpt, info)
    return out
