"""A picture of one array: its pieces, coloured by where on the mesh they were written.

The last two axes span a panel; positions along the axes before them are panels side by side. Where
pieces are too many to be drawn, a cell stands for several of them, and the caption says so.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxshard._boxes import Lattice
from jaxshard._spec import Layout, MeshSpec
from jaxshard.display import _words
from jaxshard.display._markup import Html, element, join, more, note

PANELS_MAX = 8
CELLS_MAX = 20  # along an axis of a single panel
CELLS_MAX_OF_MANY = 8
_LINES_MIN_PX = 4  # tile edges closer than this are left out
_TRIED = 64  # sizes of a cell
_MARGIN_PX = 16  # for the length of an axis


class Axis(NamedTuple):
    """One axis of an array, as it was cut.

    Lengths are in stored elements; `scale` logical ones lie in each.
    """

    length: int
    piece: int
    tile: int
    names: tuple[str, ...]  # of the mesh axes over which it is sharded
    sizes: tuple[int, ...]
    scale: int
    end: int  # length in logical elements

    @property
    def shards(self) -> int:
        """Into how many parts the mesh cuts it."""
        return math.prod(self.sizes)

    @property
    def pieces(self) -> int:
        """Number of pieces along it."""
        return -(-self.length // self.piece)

    def shard(self, piece: int) -> int:
        """The part that a piece lies in."""
        return min(piece * self.piece * self.shards // self.length, self.shards - 1)

    def coordinates(self, shard: int) -> list[str]:
        """Position on the mesh axes, the first one slowest: `data 1`."""
        found = []
        for name, size in reversed(list(zip(self.names, self.sizes, strict=True))):
            shard, here = divmod(shard, size)
            found.append(f"{name} {here}")
        return found[::-1]

    def span(self, start: int, stop: int) -> str:
        """Pieces as a slice of logical elements."""
        edge = self.piece * self.scale
        return f"{start * edge}:{min(stop * edge, self.end)}"

    def describe(self) -> str:
        """`4096 over model`."""
        return f"{self.end}{' over ' + ', '.join(self.names) if self.names else ''}"


def axes(
    layout: Layout, shape: tuple[int, ...], spec: tuple[Any, ...] | None, mesh: MeshSpec | None
) -> list[Axis]:
    """The axes of an array; a partition that does not fit its shape counts as none."""
    sizes_of_axes = () if mesh is None else zip(mesh.names, mesh.sizes, strict=False)
    size_of = {
        n: s for n, s in sizes_of_axes if isinstance(n, str) and isinstance(s, int) and s > 0
    }
    found = []
    for d, (n, piece, tile) in enumerate(zip(layout.shape, layout.piece, layout.tile, strict=True)):
        names = _names(spec[d] if spec is not None and d < len(spec) else None, size_of)
        sizes = tuple(size_of[name] for name in names)
        if shape[d] % math.prod(sizes):
            names, sizes = (), ()
        scale = layout.per_byte if d == len(layout.shape) - 1 else 1
        found.append(Axis(n, piece, tile, names, sizes, scale, shape[d]))
    return found


def _names(partition: Any, size_of: Mapping[str, int]) -> tuple[str, ...]:
    wanted = partition if isinstance(partition, tuple) else (partition,)
    return tuple(n for n in wanted if isinstance(n, str) and n in size_of)


# Picture ------------------------------------------------------------------------------------


def mosaic(all_axes: Sequence[Axis], writer: Mapping[int, int]) -> Html:
    """The picture of an array that is cut, and in words how any array is.

    Args:
      all_axes: its axes.
      writer: process by number of piece, as far as it is known.
    """
    words = [_cut(all_axes), _processes(writer)]
    lengths = [axis.length for axis in all_axes]
    if 0 in lengths or all(axis.length <= axis.tile for axis in all_axes):
        return note("; ".join(filter(None, words)))
    drawing = _Drawing([*[_ONE] * (2 - len(all_axes)), *all_axes], writer)
    words.insert(1, drawing.grouping())
    panels = list(itertools.islice(drawing.panels(), PANELS_MAX))
    left_out = math.prod(map(drawing.cells, drawing.axes[:-2])) - len(panels)
    picture = element("div", *panels, class_="j-panels")
    return join([picture, more(left_out, " panels"), note("; ".join(filter(None, words)))])


def _cut(all_axes: Sequence[Axis]) -> str:
    """How an array is cut."""
    pieces = math.prod(axis.pieces for axis in all_axes)
    piece = _words.shape(tuple(min(a.piece * a.scale, a.end) for a in all_axes))
    if pieces == 0:
        return "no elements"
    words = f"{pieces:,} pieces of {piece}" if pieces > 1 else "one piece"
    if all(axis.tile >= min(axis.piece, axis.length) for axis in all_axes):
        return words
    tile = _words.shape(tuple(min(a.tile * a.scale, a.end) for a in all_axes))
    return f"{words}, tiles of {tile}"


def _processes(writer: Mapping[int, int]) -> str:
    """By how many processes it was written."""
    found = set(writer.values())
    if len(found) > 1:
        return f"written by {len(found)} processes, {min(found)} to {max(found)}"
    return f"written by process {min(found)}" if found else ""


_ONE = Axis(1, 1, 1, (), (), 1, 1)  # what a 1-d array lacks


class _Drawing:
    """How large everything is drawn, and everything at that size."""

    def __init__(self, all_axes: Sequence[Axis], writer: Mapping[int, int]) -> None:
        self.axes = all_axes
        self.writer = writer
        self.lattice = Lattice(tuple(a.length for a in all_axes), tuple(a.piece for a in all_axes))
        self.is_single = all(axis.pieces == 1 for axis in all_axes[:-2])
        self.rows, self.columns = all_axes[-2:]
        self.height, self.width = self._size()

    def _size(self) -> tuple[int, int]:
        """Pixels of a panel, near the shape of the array."""
        if self.rows is _ONE:
            return 28, 420
        side = 300 if self.is_single else 132
        ratio = min(2.0, max(0.15, self.rows.end / self.columns.end))
        return (round(side * ratio), side) if ratio <= 1 else (side, round(side / ratio))

    def per_cell(self, axis: Axis) -> int:
        """Pieces that one cell stands for; cells end where shards do, if that is possible."""
        least = -(-axis.pieces // (CELLS_MAX if self.is_single else CELLS_MAX_OF_MANY))
        of_shard = axis.pieces // axis.shards if axis.pieces % axis.shards == 0 else 1
        return next((n for n in range(least, least + _TRIED) if of_shard % n == 0), least)

    def cells(self, axis: Axis) -> int:
        """Number of cells along an axis."""
        return -(-axis.pieces // self.per_cell(axis))

    def panels(self) -> Iterator[Html]:
        """One for each position along the leading axes."""
        leading = self.axes[:-2]
        for position in itertools.product(*(range(self.cells(axis)) for axis in leading)):
            first = tuple(p * self.per_cell(a) for p, a in zip(position, leading, strict=True))
            caption = "" if self.is_single else self._where((*first,), leading)
            yield element("figure", element("figcaption", caption), self._panel(first))

    def _where(self, position: tuple[int, ...], some: Sequence[Axis]) -> str:
        """`[0:1, 0:512] · data 1`: the elements of a cell, and where on the mesh they were."""
        pairs = list(zip(some, position, strict=True))
        spans = ", ".join(a.span(p, p + self.per_cell(a)) for a, p in pairs if a is not _ONE)
        return " · ".join([f"[{spans}]", *_coordinates(pairs)])

    def _panel(self, first: tuple[int, ...]) -> Html:
        top = _MARGIN_PX if self.is_single else 1
        left = _MARGIN_PX if self.is_single and self.rows is not _ONE else 1
        down, across = (range(0, a.pieces, self.per_cell(a)) for a in (self.rows, self.columns))
        shapes = [self._cell((*first, i, j)) for i in down for j in across]
        shapes += [element("path", d=self._tile_edges(), fill="none", stroke="currentColor",
                           stroke_opacity=".22", stroke_width=".6"), *self._labels()]  # fmt: skip
        moved = element("g", *shapes, transform=f"translate({left} {top})")
        width, height = self.width + left + 1, self.height + top + 1
        lengths = self._lengths(left, top) if self.is_single else ()
        return element(
            "svg", moved, *lengths, viewBox=f"0 0 {width} {height}", width=f"{width}", role="img"
        )

    def _lengths(self, left: int, top: int) -> Iterator[Html]:
        """What the sides of the panel are."""
        yield _word(self.columns.describe(), left + self.width / 2, 10)
        if self.rows is not _ONE:
            turn = f"translate(10 {top + self.height // 2}) rotate(-90)"
            yield _word(self.rows.describe(), 0, 0, transform=turn)

    def _cell(self, position: tuple[int, ...]) -> Html:
        y, height = _pixels(self.rows, position[-2], self.per_cell(self.rows), self.height)
        x, width = _pixels(self.columns, position[-1], self.per_cell(self.columns), self.width)
        words = [self._where(position, self.axes)]
        if all(self.per_cell(axis) == 1 for axis in self.axes):
            number = self.lattice.number(position)
            words += [f"piece {number}"]
            words += [f"process {self.writer[number]}"] if number in self.writer else []
        return element(
            "rect", element("title", " · ".join(words)),
            x=f"{x + 0.5:.1f}", y=f"{y + 0.5:.1f}", width=f"{max(0.5, width - 1):.1f}",
            height=f"{max(0.5, height - 1):.1f}", rx="1.5", fill=_colour(position, self.axes),
            fill_opacity=".62",
        )  # fmt: skip

    def _tile_edges(self) -> str:
        """Lines where tiles meet within pieces, as far as they can be told apart."""
        found = []
        for axis, pixels, mark in (
            (self.rows, self.height, f"M0 {{:.1f}}h{self.width}"),
            (self.columns, self.width, f"M{{:.1f}} 0v{self.height}"),
        ):
            step = axis.tile * pixels / axis.length
            if axis.tile < axis.piece and step >= _LINES_MIN_PX:
                edges = range(axis.tile, axis.length, axis.tile)
                found += [mark.format(e * pixels / axis.length) for e in edges if e % axis.piece]
        return "".join(found)

    def _labels(self) -> Iterator[Html]:
        """Where on the mesh the shards were, in as many words as there is room for."""
        down, across = self.rows.shards, self.columns.shards
        height, width = self.height / down, self.width / across
        if down * across == 1 or height < 16 or width < 24:
            return
        for i, j in itertools.product(range(down), range(across)):
            words = [*self.rows.coordinates(i), *self.columns.coordinates(j)]
            label = " · ".join(words)
            if len(label) * 6.2 + 8 > width:
                label = ",".join(word.rpartition(" ")[2] for word in words)
            yield _word(label, j * width + 6, i * height + 13, text_anchor="start")

    def grouping(self) -> str:
        """For what a cell stands, if it is not one piece."""
        group = [self.per_cell(axis) for axis in self.axes if axis is not _ONE]
        return f"a cell stands for {_words.shape(tuple(group))} pieces" if max(group) > 1 else ""


def _pixels(axis: Axis, piece: int, count: int, pixels: int) -> tuple[float, float]:
    """Start and length of some pieces."""
    start = piece * axis.piece
    stop = min(start + count * axis.piece, axis.length)
    return start * pixels / axis.length, (stop - start) * pixels / axis.length


def _coordinates(pairs: Sequence[tuple[Axis, int]]) -> list[str]:
    return [word for axis, piece in pairs for word in axis.coordinates(axis.shard(piece))]


def _colour(position: Sequence[int], all_axes: Sequence[Axis]) -> str:
    """Hue by the first sharded axis, lightness by the others."""
    hue, light, shades = 0.0, 0, 1
    first = True
    for axis, piece in zip(all_axes, position, strict=True):
        if axis.shards > 1 and first:
            hue, first = axis.shard(piece) / axis.shards, False
        elif axis.shards > 1:
            light, shades = light * axis.shards + axis.shard(piece), shades * axis.shards
    return f"hsl({205 + 165 * hue:.0f} 48% {70 - 24 * light / max(1, shades - 1):.0f}%)"


def _word(words: str, x: float, y: float, **attributes: str) -> Html:
    look = {"text_anchor": "middle", "fill": "currentColor", **attributes}
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **look)
