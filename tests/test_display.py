"""Displays in notebooks: complete, escaped, bounded, and never in the way of a look at a value."""

import dataclasses
import doctest
import html.parser
import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covers_exactly_once
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.lib.pretty import pretty
from support import mesh, on, run_python

import jaxshard
from jaxshard import _grid, _registry
from jaxshard._boxes import Box
from jaxshard._diff import Difference
from jaxshard._drill import DrillReport, KillCost, Targets
from jaxshard._goodput import Goodput, JobStart
from jaxshard._reader import Checkpoint
from jaxshard._spec import Layout, LeafSpec, MeshSpec, Node, TreeSpec
from jaxshard._store import MemoryStore
from jaxshard._verify import Problem
from jaxshard.display import _markup, _mosaic, _outline, _style, _words
from jaxshard.display import html as html_of

FILED = jaxshard.SaveOptions(pack_below=0)
HOSTILE = "</style><script>alert('1')</script>\"'&<img src=x onerror=alert(2)>\u202e\ud800\x00"
ALLOWED = {
    "div", "span", "style", "dl", "dt", "dd", "details", "summary", "i", "table", "thead", "tbody",
    "tr", "th", "td", "figure", "figcaption", "svg", "g", "rect", "title", "path", "text",
    "polyline", "circle",
}  # fmt: skip


class Page(html.parser.HTMLParser):
    """What a display holds; fails where it is not well-formed or not harmless."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []  # tag around it, text
        self.classes: list[tuple[str, str]] = []  # class around it, text
        self.unopened: list[str] = []  # how many leaves are in a container that cannot be opened
        self._classes: list[str] = []
        text.encode()  # no lone surrogates
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in ALLOWED, tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in {"src", "href", "srcset", "id"}, name
            assert name != "style" or re.fullmatch(r"[-\w:;.%]*", value), value
        if tag == "polyline":
            assert re.fullmatch(r"-?[\d.]+,-?[\d.]+( -?[\d.]+,-?[\d.]+)*", dict(attrs)["points"])
        self.open.append(tag)
        self._classes.append(dict(attrs).get("class", ""))
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._classes.pop()

    def handle_data(self, data):
        self.texts.append((self.open[-1], data))
        if self.open[-1] == "style":
            assert re.search(r"url|@import|http|expression", data) is None
        self.classes.append((self._classes[-1], data))
        if "j-count" in self._classes[-1] and self.open[-2] == "div":
            self.unopened.append(data)

    @property
    def words(self) -> str:
        """All that can be read."""
        words = " ".join(text for tag, text in self.texts if tag not in {"style", "title"})
        return words.replace(_words.TIMES, " x ")

    def of_class(self, name: str) -> list[str]:
        """Texts directly in elements of a class."""
        return [text for classes, text in self.classes if name in classes.split()]

    def all(self, tag: str) -> list[dict]:
        """Attributes of all elements of a name."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def titles(self) -> list[str]:
        """Words that appear over a cell of a mosaic."""
        return [text for tag, text in self.texts if tag == "title"]


def page(value) -> Page:
    return Page(html_of(value))


@pytest.fixture(scope="module")
def tree():
    grid = mesh((2, 4), ("data", "model"))
    w = jax.device_put(jnp.ones((64, 128)), on(grid, "data", "model"))
    return {
        "params": {"w": w, "b": jnp.zeros(128, jnp.bfloat16), "w2": w},
        "layers": [{"k": jnp.ones((2, 3)), "n": i} for i in range(3)],
        "key": jax.random.key(7),
        "step": 1200,
        "nothing": None,
        "text": "warm-up",
        "huge": 10**5000,
    }


@pytest.fixture(scope="module")
def path(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("display") / "ckpt"
    metadata = {"note": "before the end", "config": {"layers": 3}}
    jaxshard.save(path, tree, metadata=metadata, options=FILED)
    return path


@pytest.fixture(scope="module")
def ckpt(path):
    return jaxshard.open(path)


def manifest_of(ckpt: Checkpoint, **changes) -> Checkpoint:
    """A checkpoint whose manifest says something else."""
    return Checkpoint(ckpt.source.store, dataclasses.replace(ckpt.source.manifest, **changes))


# All of them --------------------------------------------------------------------------------


def everything(root: Path, tree) -> Iterator[object]:
    """A value of every class that has a display."""
    reports: list[object] = []
    options = jaxshard.LoadOptions(on_report=reports.append)
    yield jaxshard.save(root / "a", tree, options=FILED)
    jaxshard.load(root / "a", tree, options=options)
    yield from reports
    jaxshard.save(root / "b", {**tree, "step": 1201})
    ckpt = jaxshard.open(root / "a")
    yield ckpt
    yield ckpt["params/w"]
    with jaxshard.ResumeManager(root / "run") as run:
        run.save(3, {"w": np.zeros(2)}, wait=True)
    yield jaxshard.open(root / "run")
    yield jaxshard.verify(root / "a")
    yield jaxshard.diff(root / "a", root / "b")
    yield jaxshard.stats(root / "a", select="params/**")
    yield jaxshard.prune(root / "run", dry_run=True)
    yield jaxshard.report(root / "run")
    yield DrillReport(
        path="run", kills=(), whole_s=1.0, goodput=goodput_of(()), starts=(), storage=0,
        differences=(), targets=Targets(),
    )  # fmt: skip


def test_every_class_with_a_display_shows_itself(tmp_path, tree):
    seen = set()
    for value in everything(tmp_path, tree):
        found = value._repr_html_()
        assert found == html_of(value)
        assert len(found) < 50_000
        Page(found)
        seen.add(type(value).__name__)
    assert seen == set(_registry.displays)


def test_a_value_without_a_display_is_refused():
    with pytest.raises(
        TypeError, match=r"found dict\nhint: there are displays of Checkpoint, Diff"
    ):
        html_of({})


def test_a_display_that_fails_leaves_the_plain_text(ckpt, monkeypatch, caplog):
    monkeypatch.setitem(_registry.displays, "Checkpoint", "jaxshard.display._outline:gone")
    with caplog.at_level("DEBUG", "jaxshard"):
        assert ckpt._repr_html_() is None
    assert "no display of Checkpoint" in caplog.text


def test_importing_jaxshard_imports_no_display():
    code = "import sys, jaxshard; print([m for m in sys.modules if 'jaxshard.display' in m])"
    assert run_python(code).strip() == "[]"


def test_a_display_imports_neither_jax_nor_tensorstore(path):
    code = f"""
import sys, jaxshard
assert "params" in jaxshard.open({str(path)!r})._repr_html_()
print([m for m in ("jax", "tensorstore", "flax", "IPython") if m in sys.modules])
"""
    assert run_python(code).strip() == "[]"


def test_rules_of_the_style_touch_nothing_but_displays():
    rules = re.sub(r"@container [^{]*\{(.*)\}", r"\1", _style.CSS)
    selectors = re.findall(r"([^{}]+)\{", rules)
    assert len(selectors) > 30
    for selector in selectors:
        for part in re.split(r",(?![^(]*\))", selector):
            assert part.startswith(f".{_style.ROOT}"), part


def test_colours_follow_the_text_around():
    assert "currentColor" in _style.CSS
    assert "--jp-content-font-color1" in _style.CSS
    assert "--vscode-editor-foreground" in _style.CSS
    backgrounds = re.findall(r"background:([^;}]+)", _style.CSS)
    assert set(backgrounds) == {
        "none", *(f"var(--{name})" for name in ("soft", "blue", "good", "bad", "warm", "muted")),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["jaxshard.display", "jaxshard.monitoring", "jaxshard.zarr_dtypes"]
)
def test_examples_run(name):
    MemoryStore("doc").remove_tree("")
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


# Markup -------------------------------------------------------------------------------------


@given(st.text())
def test_any_text_stays_text(words):
    found = Page(_markup.element("div", words, title=words))
    assert [tag for tag, _ in found.elements] == ["div"]
    if words.isprintable() and len(words) < _markup.TEXT_MAX:
        assert "".join(text for _, text in found.texts) == words
        assert found.elements[0][1].get("title", "") == words


@given(st.text(min_size=_markup.TEXT_MAX))
def test_long_text_is_cut(words):
    assert len(_markup.text(words)) <= 12 * _markup.TEXT_MAX


def test_a_table_is_cut_and_says_so():
    found = Page(_markup.table(["a"], [[str(i)] for i in range(_markup.ROWS_MAX + 1234)]))
    assert len(found.all("tr")) == _markup.ROWS_MAX + 1
    assert found.of_class("j-more") == ["… and 1,234 more"]


# A checkpoint -------------------------------------------------------------------------------


def test_a_checkpoint_shows_its_facts_and_its_tree(ckpt):
    words = page(ckpt).words
    for text in (ckpt.path, "14", "32.3 KiB", "data 2 x model 4", "before the end", '"layers": 3'):
        assert text in words
    for text in ("params", "64 x 128", "float32", "P(data, model)", "32.0 KiB", "bfloat16", "1200"):
        assert text in words
    for text in ("key<threefry2x32>", "'warm-up'", "= params/w", "0x", "list"):
        assert text in words
    assert f"{ckpt.created[:10]}" in words


def test_a_group_counts_what_is_below_it_and_a_shared_array_once(ckpt):
    root = _outline._entry("", ckpt.source.manifest.tree.root, ckpt.source.manifest.tree)
    groups = {child.label: (child.leaves, child.nbytes) for child in root.children}
    assert (root.leaves, root.nbytes) == (len(ckpt), ckpt.nbytes)
    assert groups["params"] == (3, 64 * 128 * 4 + 256)
    assert groups["layers"] == (6, 3 * 24)
    bars = [a["style"] for a in page(ckpt).all("i")]
    assert f"width:{(64 * 128 * 4 + 256) / ckpt.nbytes:.1%}" in bars


def test_a_chain_of_containers_is_one_row(tmp_path):
    jaxshard.save(tmp_path / "c", {"a": {"b": {"c": {"x": 1, "y": 2}}}, "z": 3})
    assert "a/b/c" in page(jaxshard.open(tmp_path / "c")).words


@pytest.mark.parametrize("tree", [{}, 5, np.ones((2, 3)), [], {"a": {}}, None])
def test_a_tree_of_any_size_has_a_display(tmp_path, tree):
    jaxshard.save(tmp_path / "c", tree)
    ckpt = jaxshard.open(tmp_path / "c")
    page(ckpt)
    for leaf in ckpt.values():
        page(leaf)


def wide(branches: int, leaves: int) -> TreeSpec:
    """A list of dicts with some leaves each."""
    specs = [
        LeafSpec(f"{b}/leaf{n:06}", "int", value=hex(n))
        for b in range(branches)
        for n in range(leaves)
    ]
    keys = tuple(f"leaf{n:06}" for n in range(leaves))
    nodes = tuple(
        Node("dict", keys, tuple(range(b * leaves, (b + 1) * leaves))) for b in range(branches)
    )
    return TreeSpec(Node("list", (), nodes), tuple(specs))


@pytest.mark.parametrize(("branches", "leaves"), [(1, 100_000), (100_000, 1), (300, 300), (20, 12)])
def test_a_big_tree_is_cut_and_says_how_much_is_missing(ckpt, branches, leaves):
    found = html_of(manifest_of(ckpt, tree=wide(branches, leaves)))
    assert len(found) < 250_000
    shown = Page(found)
    rows = [a for _, a in shown.elements if a.get("class") == "j-row"]
    assert len(rows) <= _outline.ROWS_MAX
    assert f"{branches * leaves:,}" in shown.words
    left_out = [re.search(r"(\d+) lea", t)[1] for t in shown.unopened + shown.of_class("j-more")]
    assert shown.of_class("j-dtype").count("int") + sum(map(int, left_out)) == branches * leaves


def test_a_deep_tree_has_a_display(tmp_path):
    tree: object = {"x": 1, "y": 2}
    for _ in range(200):
        tree = [tree, 0]
    jaxshard.save(tmp_path / "c", tree)
    assert len(html_of(jaxshard.open(tmp_path / "c"))) < 300_000


def test_a_display_reads_no_data(path, ckpt, tmp_path):
    shutil.copytree(path, tmp_path / "c")
    for folder in ("data", "packs"):
        shutil.rmtree(tmp_path / "c" / ckpt.attempt / folder, ignore_errors=True)
    left = jaxshard.open(tmp_path / "c")
    assert html_of(left["params/w"]) == html_of(ckpt["params/w"])
    assert "64 x 128" in page(left).words


# Hostile files ------------------------------------------------------------------------------


def hostile_leaf(number: int, leaf: LeafSpec) -> LeafSpec:
    """A leaf with all that the manifest does not check."""
    return leaf._replace(
        name=f"{HOSTILE}{number}", container=HOSTILE, memory_kind=HOSTILE, digest=HOSTILE,
        spec=(HOSTILE, (HOSTILE, 7), {"x": HOSTILE}), mesh=0,
        key_impl=HOSTILE if leaf.kind == "key" else None,
        value=HOSTILE if leaf.value is not None else None,
    )  # fmt: skip


def hostile(ckpt: Checkpoint) -> Checkpoint:
    old = ckpt.source.manifest.tree
    leaves = tuple(hostile_leaf(n, leaf) for n, leaf in enumerate(old.leaves))
    root = Node(
        "dict", tuple(f"{HOSTILE}{n}" for n in range(len(leaves))), tuple(range(len(leaves)))
    )
    root = Node("object", ("x",), (root,), HOSTILE)
    meshes = (MeshSpec((HOSTILE, "b", 3), (2, "x", 0), ("Auto",)),)
    return manifest_of(
        ckpt, tree=TreeSpec(root, leaves, meshes), created=HOSTILE, compression=HOSTILE,
        metadata={HOSTILE: HOSTILE, "deep": [HOSTILE]}, environment={"jax": HOSTILE},
    )  # fmt: skip


def test_what_a_hostile_manifest_says_is_only_text(ckpt):
    bad = hostile(ckpt)
    bad.path = HOSTILE
    shown = page(bad)
    assert "script>alert" in shown.words
    for leaf in bad.values():
        page(leaf)


def test_what_reports_quote_is_only_text():
    problem = Problem("damaged", HOSTILE, HOSTILE, 3, HOSTILE)
    page(jaxshard.VerifyReport(HOSTILE, (problem,), (HOSTILE,), 1, 0))
    page(jaxshard.DiffReport(HOSTILE, HOSTILE, (Difference(HOSTILE, HOSTILE),), 1, 0))
    names = (HOSTILE,)
    page(
        jaxshard.LoadReport(
            path=HOSTILE,
            step=None,
            bytes_needed=1,
            bytes_read=1,
            filled=names,
            cast=names,
            seconds=0,
        )
    )
    page(
        jaxshard.PruneReport(
            path=HOSTILE, steps=names, leftovers=names, nbytes=1, recent=names, damaged=names,
            dry_run=True,
        )
    )  # fmt: skip
    assert (
        len(html_of(jaxshard.VerifyReport("p", (problem,) * 10_000, names * 10_000, 1, 0)))
        < 600_000
    )


# A leaf -------------------------------------------------------------------------------------


def test_a_leaf_shows_its_facts(ckpt):
    words = page(ckpt["params/w"]).words
    for text in ("params/w", "jax array, committed", "float32", "64 x 128", "32.0 KiB", "device",
                 "P(data, model)", "data 2 x model 4", "Zarr array params/w",
                 "8 pieces of 32 x 32; written by process 0",
                 ckpt.leaves["params/w"].digest):  # fmt: skip
        assert text in words, text
    assert "params/w" in page(ckpt["params/w2"]).words
    assert "1200" in page(ckpt["step"]).words
    assert "in the manifest" in page(ckpt["step"]).words


def test_a_mosaic_has_a_cell_for_each_piece_that_says_where_it_was(ckpt):
    titles = page(ckpt["params/w"]).titles
    assert titles[5] == "[32:64, 32:64] · data 1 · model 1 · piece 5 · process 0"
    assert len(titles) == 8


def test_a_packed_leaf_has_the_same_mosaic(tree, ckpt, tmp_path):
    jaxshard.save(tmp_path / "c", tree)
    found = page(jaxshard.open(tmp_path / "c")["params/w"])
    assert found.titles == page(ckpt["params/w"]).titles
    assert "in a pack" in found.words


@pytest.mark.parametrize("how", ["damaged", "gone", "all gone"])
def test_a_table_that_is_gone_does_not_break_the_display(path, tmp_path, how):
    shutil.copytree(path, tmp_path / "c")
    ckpt = jaxshard.open(tmp_path / "c")
    (table,) = (tmp_path / "c").glob("a-*/tables/0/*.bin")
    if how == "damaged":
        table.write_bytes(b"JXSTABL1")
    elif how == "gone":
        table.unlink()
    else:
        shutil.rmtree(tmp_path / "c")
    found = page(ckpt["params/w"])
    assert "Who wrote which piece is not known: table" in found.words
    assert found.titles[0] == "[0:32, 0:32] · data 0 · model 0 · piece 0"
    page(ckpt)


# Mosaics ------------------------------------------------------------------------------------

GRID = MeshSpec(("a", "b"), (2, 4), ("Auto", "Auto"))


def cut(shape, spec, mesh=GRID, *, piece_bytes_max=4096, dtype="float32", per_byte=1):
    """Axes of an array as a save would cut it."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    names = [(p,) if isinstance(p, str) else p or () for p in spec]
    parts = [int(np.prod([sizes[n] for n in some])) for some in names]
    stored = (*shape[:-1], shape[-1] // per_byte)
    grid = _grid.choose(stored, tuple(parts), 4, piece_bytes_max=piece_bytes_max)
    layout = Layout("x", dtype, per_byte, stored, grid.piece, grid.tile, False)
    return _mosaic.axes(layout, shape, spec, mesh), layout


def boxes(titles: list[str], rank: int) -> list[Box]:
    """The elements of each cell."""
    found = []
    for title in titles:
        spans = re.findall(r"(\d+):(\d+)", title.partition("]")[0])
        assert len(spans) == rank, title
        start, stop = zip(*((int(a), int(b)) for a, b in spans), strict=True)
        found.append(Box(start, tuple(b - a for a, b in zip(start, stop, strict=True))))
    return found


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.permutations(["a", "b", None, ("a", "b"), None]),
    st.sampled_from([8, 64, 4096]),
)
def test_cells_cover_an_array_exactly_once(sides, order, piece_bytes_max):
    spec = tuple(order[: len(sides)])
    shape = tuple(8 * n for n in sides)
    axes, _ = cut(shape, spec, piece_bytes_max=piece_bytes_max)
    found = Page(_mosaic.mosaic(axes, {}))
    cells = found.all("rect")
    assert len(cells) <= _mosaic.PANELS_MAX * _mosaic.CELLS_MAX**2
    assert len(html_of_mosaic(axes)) < 150_000
    if cells and "panels" not in found.words:
        assert covers_exactly_once(boxes(found.titles, len(shape)), Box.whole(shape))


def html_of_mosaic(axes) -> str:
    return _mosaic.mosaic(axes, {})


def test_cells_of_a_shard_have_one_colour_and_other_shards_another():
    axes, _ = cut((64, 64), ("a", "b"), piece_bytes_max=256)
    found = Page(_mosaic.mosaic(axes, {}))
    colours: dict[str, set[str]] = {}
    for title, cell in zip(found.titles, found.all("rect"), strict=True):
        where = re.search(r"a \d · b \d", title)[0]
        colours.setdefault(where, set()).add(cell["fill"])
    assert len(colours) == 8
    assert all(len(some) == 1 for some in colours.values())
    assert len({c for some in colours.values() for c in some}) == 8


def test_cells_lie_where_their_elements_are():
    axes, _ = cut((100, 8), (None, "b"), piece_bytes_max=128)
    found = Page(_mosaic.mosaic(axes, {}))
    height = max(float(c["y"]) + float(c["height"]) for c in found.all("rect")) + 0.5
    width = max(float(c["x"]) + float(c["width"]) for c in found.all("rect")) + 0.5
    for box, cell in zip(boxes(found.titles, 2), found.all("rect"), strict=True):
        assert abs(float(cell["y"]) - box.offset[0] * height / 100) < 1
        assert abs(float(cell["x"]) - box.offset[1] * width / 8) < 1


def test_leading_axes_are_panels():
    axes, _ = cut((8, 16, 16), ("b", None, None), piece_bytes_max=4096)
    found = Page(_mosaic.mosaic(axes, {}))
    captions = [text for tag, text in found.texts if tag == "figcaption"]
    assert captions == [f"[{2 * i}:{2 * i + 2}] · b {i}" for i in range(4)]


def test_too_many_panels_are_counted():
    axes, _ = cut((8, 8, 8, 8), ("b", "a", None, None), piece_bytes_max=256)
    found = Page(_mosaic.mosaic(axes, {}))
    assert len(found.all("svg")) == _mosaic.PANELS_MAX
    assert "… and 8 more panels" in found.words


def test_where_pieces_are_too_many_a_cell_stands_for_some_of_one_shard():
    axes, _ = cut((8192, 4), ("b", None), piece_bytes_max=512)
    found = Page(_mosaic.mosaic(axes, {}))
    assert "256 pieces of 32 x 4; a cell stands for 16 x 1 pieces" in found.words
    assert len(found.all("rect")) == 16
    assert "piece" not in found.titles[0]


def test_tiles_are_lines_where_there_is_room():
    layout = Layout("x", "float32", 1, (64, 64), (32, 64), (8, 32), False)
    found = Page(_mosaic.mosaic(_mosaic.axes(layout, (64, 64), None, None), {}))
    (lines,) = (a["d"] for a in found.all("path"))
    assert lines.count("h") == 6
    assert lines.count("v") == 1
    fine = layout._replace(tile=(1, 1), piece=(64, 64), shape=(640, 640))
    found = Page(_mosaic.mosaic(_mosaic.axes(fine, (640, 640), None, None), {}))
    assert all("d" not in a for a in found.all("path"))
    assert "tiles of 1 x 1" in found.words


def test_elements_that_share_a_byte_are_counted_as_elements():
    axes, _ = cut((4, 64), (None, "b"), per_byte=2, dtype="uint8")
    found = Page(_mosaic.mosaic(axes, {}))
    assert boxes(found.titles, 2)[1] == Box((0, 16), (4, 16))


def test_several_processes_are_told_apart():
    axes, _ = cut((8, 4), ("b", None))
    found = Page(_mosaic.mosaic(axes, {0: 3, 1: 3, 2: 5, 3: 5}))
    assert [t.rpartition("· ")[2] for t in found.titles] == ["process 3"] * 2 + ["process 5"] * 2
    assert "written by 2 processes, 3 to 5" in found.words


def test_what_is_not_cut_has_no_picture():
    for shape in [(4, 4), (0, 4), (7,)]:
        axes, _ = cut(shape, (None,) * len(shape))
        assert Page(_mosaic.mosaic(axes, {})).all("svg") == []
    assert Page(_mosaic.mosaic([], {0: 0})).words == "one piece; written by process 0"


@pytest.mark.parametrize("side", [1 << 61, (1 << 61) - 1])
@pytest.mark.parametrize("sizes", [(2, 4), (1 << 61, 1 << 61), (0, -3), ("x", None)])
def test_sizes_that_nobody_has_are_drawn_at_once(side, sizes):
    layout = Layout("x", "uint8", 1, (side,) * 5, (1,) * 5, (1,) * 5, False)
    axes = _mosaic.axes(
        layout, (side,) * 5, ("a", "b", ("a", "b")), MeshSpec(("a", "b"), sizes, ())
    )
    assert len(_mosaic.mosaic(axes, {})) < 200_000


# Reports ------------------------------------------------------------------------------------


def test_a_sound_checkpoint_is_green_and_a_damaged_one_lists_its_problems(path, tmp_path):
    shutil.copytree(path, tmp_path / "c")
    good = page(jaxshard.verify(tmp_path / "c"))
    assert good.of_class("j-good") == ["✓ sound"]
    assert good.all("table") == []
    root = Path(jaxshard.open(tmp_path / "c").zarr_root)
    (root / "params/w/c/1/2").unlink()
    bad = page(jaxshard.verify(tmp_path / "c"))
    assert bad.of_class("j-bad") == ["✗ 1 problem"]
    cells = [text for tag, text in bad.texts if tag == "td"]
    assert cells[0] == "params/w"
    assert cells[1].endswith("data/params/w/c/1/2")
    assert cells[2:] == ["missing", "expected to exist, found nothing"]


def test_a_comparison_is_a_table(tmp_path):
    jaxshard.save(tmp_path / "a", {"w": np.ones(3), "n": 1})
    jaxshard.save(tmp_path / "b", {"w": np.ones(3), "n": 2})
    found = page(jaxshard.diff(tmp_path / "a", tmp_path / "b"))
    assert [text for tag, text in found.texts if tag == "td"] == ["n", "1 and 2"]
    assert found.of_class("j-badge") == ["1 differ"]
    same = page(jaxshard.diff(tmp_path / "a", tmp_path / "a"))
    assert same.of_class("j-good") == ["identical"]


SAVED = jaxshard.SaveReport(
    path="runs/a", step=3, nbytes=3 << 30, files=2, seconds=2.0, blocked_s=2.0
)
LOADED = jaxshard.LoadReport(
    path="runs/a", step=3, bytes_needed=1 << 20, bytes_read=3 << 20, filled=("a", "b"), cast=("c",),
    seconds=0.5,
)  # fmt: skip


def test_sizes_times_and_rates_of_a_save():
    words = page(SAVED).words
    for text in ("runs/a", "3.0 GiB", "2", "2.00 s", "1.61 GB/s"):
        assert text in words
    assert "blocked" not in words
    waited = dataclasses.replace(SAVED, blocked_s=0.25)
    assert "caller blocked 0.250 s" in " ".join(page(waited).words.split())


def test_sizes_times_and_rates_of_a_load():
    words = page(LOADED).words
    for text in ("runs/a", "1.0 MiB", "3.0 MiB", "0.50 s", "0.00 GB/s", "kept from like: 2 leaves"):
        assert text in words


def test_reports_of_saving_and_loading_are_lines_to_read():
    assert str(SAVED) == "runs/a: saved 3.0 GiB in 2 files, 2.00 s (1.61 GB/s)"
    waited = dataclasses.replace(SAVED, blocked_s=0.25, files=1)
    assert str(waited) == (
        "runs/a: saved 3.0 GiB in 1 file, 2.00 s (1.61 GB/s), the caller waited 0.250 s"
    )
    assert str(LOADED) == (
        "runs/a: loaded 1.0 MiB (3.0 MiB read) in 0.50 s (0.00 GB/s)\n"
        "  2 leaves kept from like\n  1 leaf converted"
    )
    assert repr(SAVED).startswith("SaveReport(path='runs/a'")


def test_statistics_say_whether_all_is_finite(tmp_path):
    jaxshard.save(tmp_path / "c", {"w": np.array([1.0, 3.0]), "x": np.array([np.nan, np.inf, 2])})
    found = page(jaxshard.stats(tmp_path / "c"))
    cells = [text for tag, text in found.texts if tag == "td"]
    assert cells[:7] == ["w", "float64", "2", "1", "3", "2", "3.162"]
    assert found.of_class("j-bad") == ["not finite"]
    assert page(jaxshard.stats(tmp_path / "c", select="w")).of_class("j-good") == ["all finite"]


# A run --------------------------------------------------------------------------------------


def test_a_run_shows_its_steps_and_the_newest_one(tmp_path):
    with jaxshard.ResumeManager(tmp_path / "run", keep=jaxshard.Keep(last=40)) as manager:
        assert "no step was committed yet" in page(jaxshard.open(tmp_path / "run")).words
        for step in range(1, 31):
            manager.save(step, {"w": np.zeros(4)}, wait=True)
    run = jaxshard.open(tmp_path / "run")
    words = page(run).words
    assert "… 7, 8, 9" in words
    assert "(30)" in words
    assert "step 30: 1 leaf, 32 B" in words
    (tmp_path / "run/step_00000030/manifest.json").write_bytes(b"{}")
    assert "step 30 cannot be opened:" in page(run).words


def test_a_run_that_is_gone_still_has_a_repr(tmp_path, monkeypatch):
    with jaxshard.ResumeManager(tmp_path / "run") as manager:
        manager.save(1, {"w": np.zeros(4)}, wait=True)
    run = jaxshard.open(tmp_path / "run")

    def fail(*args):
        raise PermissionError("no")

    monkeypatch.setattr(type(run._store), "entries", fail)
    assert repr(run) == f"<Run {run.path!r}, which cannot be listed>"
    assert "its steps cannot be listed" in page(run).words


def test_a_terminal_of_ipython_shows_what_print_shows(tmp_path):
    jaxshard.save(tmp_path / "c", {"w": np.ones(3)})
    report = jaxshard.verify(tmp_path / "c")
    assert pretty(report) == str(report) != repr(report)


# Run reports and drills ---------------------------------------------------------------------


def job(began_s, steps, *, ended=False, kept=None, every=10, resumed=0):
    """A start that makes a step in a second, and saves every so many."""
    saves = tuple((began_s + s - resumed, s) for s in range(resumed + every, steps + 1, every))
    last_s = began_s + steps - resumed
    return JobStart(began_s, began_s, resumed, saves, last_s, steps, ended, kept or steps)


def goodput_of(starts):
    return Goodput(100.0, 60.0, 5.0, 20.0, 5.0, 10.0, len(starts), 1, 7, 12, 0, 10**9, 0, 0.4, 50.0)


def test_the_report_of_a_run_shows_where_its_time_went():
    starts = (job(0, 27, kept=20), job(30, 60, ended=True, resumed=20))
    page = Page(html_of(jaxshard.RunReport("runs/<lm>", goodput_of(starts), starts)))
    said = [text for _, text in page.texts]
    assert "60.0% useful" in said
    for name, share in {"useful": 60, "saving": 5, "lost": 20, "restoring": 5, "down": 10}.items():
        assert any(text.startswith(f" {name} {share}.0%, ") for text in said), name
        (bar,) = (a for _, a in page.elements if a.get("title") == f"{name} {share}.0%")
        assert bar["style"] == f"width:{share}.000%"
    legend = next(text for text in said if text.startswith("line: steps over time; "))
    assert legend.endswith("dots: saves; \u00d7: killed or failed; red: done again")
    assert "ended in step 28, 27.0 s" in said
    assert len([a for tag, a in page.elements if tag == "circle"]) == 2 + 4
    (lost,) = (a for _, a in page.elements if a.get("class") == "j-lost")
    assert lost["points"].count(",") == 2


def test_the_line_breaks_where_steps_were_lost():
    """At step 20 of 60, a third of the way up: what is above it is red."""
    starts = (job(0, 30, kept=20), job(30, 60, ended=True, resumed=20))
    page = Page(html_of(jaxshard.RunReport("lm", goodput_of(starts), starts)))
    lines = {a["class"]: a["points"] for tag, a in page.elements if tag == "polyline"}
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in lines["j-lost"].split())
    kept = [a["points"] for _, a in page.elements if a.get("class") == "j-kept"]
    assert kept[0].split()[-1] == f"{x0},{y0}"
    assert x0 < x1
    assert y0 > y1


@pytest.mark.parametrize(
    "starts",
    [
        (),
        (JobStart(0.0, None, 0, (), 3.0, 0, False, 0),),
        (JobStart(0.0, None, 0, (), 0.0, 0, False, 0), job(5, 1, ended=True)),
        tuple(job(30 * n, 20 * n + 25, kept=20 * n + 20, resumed=20 * n) for n in range(700)),
        (job(0, 5000, every=1),),
    ],
)
def test_a_report_of_any_length_is_well_formed_and_bounded(starts):
    text = html_of(jaxshard.RunReport(HOSTILE, goodput_of(starts), starts))
    Page(text)
    assert len(text) < 400_000


def test_a_drill_shows_targets_kills_and_the_way(tmp_path):
    starts = (job(0, 27, kept=20), job(30, 60, ended=True, resumed=20))
    report = DrillReport(
        path=str(tmp_path),
        kills=(KillCost(27, 7, 7.0, 3.5),),
        whole_s=60.0,
        goodput=goodput_of(starts),
        starts=starts,
        storage=5 << 20,
        differences=(f"params/w: {HOSTILE}",),
        targets=Targets(max_lost_s=5.0, min_goodput=0.5),
    )
    page = Page(html_of(report))
    said = [text for _, text in page.texts]
    assert "\u2717 2 of 3 targets missed" in said
    assert said[said.index("max-lost") :][:4] == ["max-lost", "5.0 s", "7.0 s", "missed"]
    assert said[said.index("27") :][:4] == ["27", "7", "7.0 s", "3.5 s"]
    assert "1 leaf not as without kills" in said
    assert any(tag == "polyline" for tag, _ in page.elements)
    assert "max-lost: 7.0 s, wanted 5.0 s: missed" in str(report)
    good = dataclasses.replace(report, differences=(), targets=Targets(min_goodput=0.5))
    assert "\u2713 all targets reached" in [text for _, text in Page(html_of(good)).texts]


def test_a_page_is_one_file_that_needs_nothing_else():
    text = jaxshard.display.page(jaxshard.RunReport("lm", goodput_of(()), ()))
    assert text.startswith('<!doctype html>\n<html lang="en">\n<meta charset="utf-8">')
    assert "<title>lm - jaxshard</title>" in text
    assert "color-scheme: light dark" in text
    assert re.search(r"<script|https?:|url\(|@import", text) is None
