"""One leaf: its facts, and where its pieces were written."""

from jaxshard import _source
from jaxshard._errors import JaxshardError, size_text
from jaxshard._plan import piece_lattice, tile_lattice
from jaxshard._reader import Leaf
from jaxshard._spec import Layout, LeafSpec
from jaxshard.display import _words
from jaxshard.display._markup import Html, card, facts, join, note, span
from jaxshard.display._mosaic import axes, mosaic

_TYPED = {"numpy_scalar", "iterator"}  # without elements, and yet with a type of their own


def leaf(shown: Leaf) -> Html:
    """The display of a leaf."""
    info = shown.info
    own = shown.source.manifest.tree.leaves[shown.number]
    stored = shown.source.leaf(shown.number)  # another one, if this is the same array
    where = {
        "kind": _kind(own),
        "type": _words.dtype(own) if own.has_array or own.kind in _TYPED else None,
        "shape": _words.shape(info.shape) if own.has_array else None,
        "value": None if own.has_array else _words.value(own) or None,
        "size": size_text(info.nbytes) if own.has_array else None,
        "partition": _words.partitions(info.spec) or None,
        "mesh": info.mesh and _words.mesh(info.mesh),
        "memory": info.memory_kind,
        "stored": _place(info.zarr_path, stored),
        "same array as": info.same_as,
        "digest": info.digest and span("mono", info.digest),
    }
    body = [facts(where)]
    if stored.layout is not None:
        body.append(_pieces(shown, stored.layout))
    return card("Leaf", info.name or "(the whole tree)", *body)


def _kind(own: LeafSpec) -> str:
    """`jax array`, `key`, `int`."""
    bound = ", committed" if own.committed else ""
    return f"{own.container} array{bound}" if own.kind == "array" else own.kind.replace("_", " ")


def _place(zarr_path: str | None, stored: LeafSpec) -> str:
    if stored.layout is None:
        return "in the manifest"
    return "in a pack" if zarr_path is None else f"Zarr array {zarr_path}"


def _pieces(shown: Leaf, layout: Layout) -> Html:
    number = shown.source.resolve(shown.number)
    trouble = Html()
    writer: dict[int, int] = {}
    try:
        writer = _writers(shown.source, number, layout)
    except (JaxshardError, OSError) as e:  # a table is gone or damaged; the manifest is not
        trouble = note(f"Who wrote which piece is not known: {str(e).splitlines()[0]}")
    info = shown.info
    cut = axes(layout, shown.shape, info.spec, info.mesh)
    return join([mosaic(cut, writer), trouble])


def _writers(source: _source.Source, number: int, layout: Layout) -> dict[int, int]:
    """Process by number of piece, from the tables."""
    pieces, tiles = piece_lattice(layout), tile_lattice(layout)
    found: dict[int, int] = {}
    for process, table in enumerate(source.tables):
        rows = table.pieces[table.pieces["leaf"] == number]
        found.update(dict.fromkeys(rows["piece"].tolist(), process))
        packed = table.entries[table.entries["leaf"] == number]["tile"].tolist()
        for tile in packed:
            if tile < tiles.size:
                at = zip(tiles.position(tile), layout.tile, layout.piece, strict=True)
                found[pieces.number(tuple(i * t // p for i, t, p in at))] = process
    return found
