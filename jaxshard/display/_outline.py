"""A checkpoint: its facts, and its tree with sizes, as far as a page can hold it.

Big trees are cut, widest levels first: each level shows some of its children and says how many more
there are, until the rows of the whole are used up. Totals always count everything.
"""

import collections
import dataclasses

from jaxshard._errors import counted, size_text
from jaxshard._keypaths import components
from jaxshard._reader import Checkpoint
from jaxshard._spec import Node, TreeSpec, child_keys
from jaxshard.display import _words
from jaxshard.display._markup import (
    Html,
    card,
    element,
    facts,
    folded,
    join,
    more,
    span,
    table,
)

ROWS_MAX = 400
CHILDREN_MAX = 100
OPEN_ROWS_MAX = 24
_COLUMNS = {"shape": 20, "dtype": 18, "spec": 22}  # and how wide they may become, in digits


@dataclasses.dataclass(slots=True)
class Entry:
    """A leaf, or a container with its totals."""

    label: str
    number: int | None  # of a leaf
    hint: str = ""
    leaves: int = 1
    nbytes: int = 0
    children: list["Entry"] = dataclasses.field(default_factory=list)
    shown: int = 0  # of the children
    is_open: bool = False


def checkpoint(ckpt: Checkpoint) -> Html:
    """The display of a checkpoint."""
    manifest = ckpt.source.manifest
    tree = manifest.tree
    root = _entry("", tree.root, tree)
    _cut(root)
    head = facts(
        {
            "step": ckpt.step,
            "leaves": f"{len(ckpt):,}",
            "size": size_text(ckpt.nbytes),
            "saved": _words.saved_at(ckpt.created),
            "mesh": ", ".join(map(_words.mesh, tree.meshes[:3])) or None,
            "compression": manifest.compression,
        }
    )
    more_facts = [
        folded(title, table(["name", "value"], list(_words.plain(document).items())))
        for title, document in (("metadata", ckpt.metadata), ("environment", ckpt.environment))
        if document
    ]
    return card("Checkpoint", ckpt.path, head, _tree(root, tree), *more_facts)


# What is shown -------------------------------------------------------------------------------


def _entry(label: str, node: Node | int, tree: TreeSpec) -> Entry:
    if isinstance(node, int):
        leaf = tree.leaves[node]
        return Entry(label, node, nbytes=leaf.nbytes if leaf.same_as is None else 0)
    names = components(child_keys(node))
    children = [_entry(n, c, tree) for n, c in zip(names, node.children, strict=True)]
    if label and len(children) == 1 and children[0].number is None:  # a row for each says nothing
        only = children[0]
        only.label = f"{label}/{only.label}"
        return only
    return Entry(
        label,
        None,
        hint="" if node.type == "dict" else (node.class_name or node.type).rpartition(".")[2],
        leaves=sum(child.leaves for child in children),
        nbytes=sum(child.nbytes for child in children),
        children=children,
    )


def _cut(root: Entry) -> None:
    """Choose what is shown and what is open, level by level."""
    left, visible = ROWS_MAX, 0
    waiting = collections.deque([(root, True)])
    while waiting:
        entry, in_sight = waiting.popleft()
        entry.shown = min(len(entry.children), CHILDREN_MAX, left)
        left -= entry.shown
        fits = visible + entry.shown <= OPEN_ROWS_MAX
        entry.is_open = entry is root or (in_sight and fits)
        visible += entry.shown if entry.is_open else 0
        shown = entry.children[: entry.shown]
        waiting.extend((child, entry.is_open) for child in shown if child.children)


# How it is shown -----------------------------------------------------------------------------


def _tree(root: Entry, tree: TreeSpec) -> Html:
    page = _Page(root, tree)
    rows = page.children(root) if root.number is None else page.leaf(root)
    return element("div", page.titles(), rows, class_="j-tree", style=page.widths())


class _Page:
    """The rows of a tree; columns are as wide as what is shown in them."""

    def __init__(self, root: Entry, tree: TreeSpec) -> None:
        self.tree = tree
        self.total = root.nbytes
        cells = [self.cells(n) for n in _numbers(root)]
        self.width = {c: max((len(cell[c]) for cell in cells), default=0) for c in _COLUMNS}

    def cells(self, number: int) -> dict[str, str]:
        """What a leaf is, by column."""
        leaf = self.tree.leaves[number]
        same = "" if leaf.same_as is None else f"= {self.tree.first(number).name}"
        inline = "" if leaf.has_array else _words.value(leaf)
        return {
            "shape": same or inline or (_words.shape(leaf.shape) if leaf.has_array else ""),
            "dtype": _words.dtype(leaf),
            "spec": _words.partitions(leaf.spec),
        }

    def widths(self) -> str:
        """Widths of the columns, as the style sheet asks for them."""
        least = {"shape": 12, "dtype": 6, "spec": 9 if self.width["spec"] else 0}
        found = {c: min(most, max(least[c], self.width[c])) for c, most in _COLUMNS.items()}
        return ";".join(f"--{name}:{width}ch" for name, width in found.items())

    def titles(self) -> Html:
        """The heads of the columns."""
        spec = "partition" if self.width["spec"] else ""
        shape, kind = span("shape", "shape or value"), span("dtype", "type")
        cells = [span("name", "name"), shape, kind, span("spec", spec), span("num", "size")]
        return _row("div", *cells, Html("<span></span>"), class_="j-row j-titles")

    def children(self, entry: Entry) -> Html:
        """The rows below an entry, and how many are missing."""
        shown = entry.children[: entry.shown]
        rows = [
            self.leaf(child) if child.number is not None else self.group(child) for child in shown
        ]
        rest = entry.children[entry.shown :]
        leaves, nbytes = sum(e.leaves for e in rest), sum(e.nbytes for e in rest)
        return join([*rows, more(len(rest), f" ({counted(leaves, 'leaf')}, {size_text(nbytes)})")])

    def group(self, entry: Entry) -> Html:
        """A container: what it is and what it holds, with what is in it behind a click."""
        name = [entry.label, Html(" "), span("hint", entry.hint)]
        count = span("shape j-count", counted(entry.leaves, "leaf"))
        cells = (count, span("dtype"), span("spec"), *self.size(entry))
        if not entry.shown:
            return _row("div", span("name", *name), *cells)
        inside = [
            _row("summary", span("name", *name), *cells),
            element("div", self.children(entry), class_="j-kids"),
        ]
        return (
            element("details", *inside, open="") if entry.is_open else element("details", *inside)
        )

    def leaf(self, entry: Entry) -> Html:
        """A leaf: what it is and how large."""
        assert entry.number is not None
        cells = self.cells(entry.number)
        what = [span(column, cells[column], title=cells[column]) for column in _COLUMNS]
        name = entry.label or "(the whole tree)"
        return _row("div", span("name", name, title=name), *what, *self.size(entry))

    def size(self, entry: Entry) -> tuple[Html, Html]:
        """Bytes, and a bar for their share of the whole."""
        if not entry.nbytes:
            return span("num"), span("none")
        share = f"{entry.nbytes / self.total:.1%}"
        bar = span("bar", element("i", style=f"width:{share}"), title=share)
        return span("num", size_text(entry.nbytes)), bar


def _numbers(entry: Entry) -> list[int]:
    """Leaves that have a row."""
    if entry.number is not None:
        return [entry.number]
    return [n for child in entry.children[: entry.shown] for n in _numbers(child)]


def _row(tag: str, *cells: Html, class_: str = "j-row") -> Html:
    """Cells of one line; the spaces are for where there is no style."""
    return element(tag, Html(" ".join(cells)), class_=class_)
