"""Manifests come back as they were written; damaged, newer and hostile ones are refused."""

import json
import time

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given, settings
from support import spelled_out

from jaxshard._errors import CorruptionError, FormatError, JaxshardError, Kind
from jaxshard._manifest import Manifest, ProcessRecord, canonical
from jaxshard._spec import Layout, LeafSpec, MeshSpec, Node, TreeSpec, stored_shape, walk

quick = settings(derandomize=True, deadline=None, max_examples=60)
RECORD = ProcessRecord(120, "0" * 32)


def manifest(tree, /, **changes):
    fields = {
        "attempt": "a-0123456789abcdef",
        "nonce": "n",
        "step": 7,
        "created": "2026-01-01T00:00:00.000+00:00",
        "metadata": {"note": "ü", "nested": {"b": [1, 2.5, None], "a": True}},
        "environment": {"jax": "0.10.2"},
        "compression": None,
        "tree": tree,
        "processes": (RECORD,),
    }
    return Manifest(**{**fields, **changes})


def array(name, shape=(8, 6), **changes):
    layout = Layout(name or "%", "float32", 1, shape, (4, 6), (2, 3), packed=False)
    leaf = LeafSpec(
        name=name,
        kind="array",
        container="jax",
        dtype="float32",
        shape=shape,
        array_shape=shape,
        committed=True,
        spec=("x", None),
        mesh=0,
        memory_kind="device",
        layout=layout,
        digest="ab" * 16,
    )
    return leaf._replace(**changes)


MESHES = (MeshSpec(("x",), (8,), ("Auto",)),)


def example():
    """One leaf of each form, in nested containers."""
    leaves = (
        array("a/0"),
        LeafSpec(name="a/1", kind="int", value="-0xff"),
        LeafSpec(
            name="k",
            kind="key",
            container="jax",
            dtype="uint32",
            shape=(3,),
            array_shape=(3, 2),
            key_impl="threefry2x32",
            layout=Layout("k", "uint32", 1, (3, 2), (3, 2), (3, 2), packed=True),
            digest="0" * 32,
        ),
        array("t", layout=None, digest=None, same_as=0, weak_type=True),
        LeafSpec(
            name="z",
            kind="array",
            container="numpy",
            dtype="int4",
            shape=(3, 5),
            array_shape=(3, 5),
            layout=Layout("z", "uint8", 2, (3, 3), (3, 3), (3, 3), packed=False),
        ),
    )
    root = Node("dict", ("a", "k", "t", "z"), (Node("list", (), (0, 1)), 2, 3, 4), "m.State")
    return manifest(TreeSpec(root, leaves, MESHES))


def body_of(item):
    """The JSON, each leaf with all of its fields."""
    body = json.loads(item.to_bytes())
    del body["xxh3_128"]
    return spelled_out(body)


def signed(body):
    """A manifest with a valid digest, whatever it says."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    digest = xxhash.xxh3_128_hexdigest(text)
    return text[:-1] + f',"xxh3_128":"{digest}"}}\n'.encode()


def read(data):
    return Manifest.from_bytes(data, "ckpt/manifest.json")


# There and back -----------------------------------------------------------------------------

keys = st.text(max_size=3) | st.integers(-2, 2) | st.none() | st.binary(max_size=2)
weird = st.sampled_from(
    ["", "a/b", "\ud800", "é", "\x00", True, 0.5, -0.0, (1, ("x", None)), b"\xff"]
)
leaf_kinds = st.sampled_from(["array", "none", "bool", "int", "float", "str", "function"])
VALUES = {"bool": True, "int": "0x7", "float": "3ff0000000000000", "str": "x\ud800"}


@st.composite
def trees(draw):
    leaves = []

    def build(depth):
        kind = draw(st.sampled_from(["leaf", "leaf", "dict", "list", "tuple", "namedtuple"]))
        if kind == "leaf" or depth == 3:
            leaves.append(draw(leaf_kinds))
            return len(leaves) - 1
        children = draw(st.integers(0, 3))
        names = ()
        if kind == "dict":
            some = st.lists(keys | weird, min_size=children, max_size=children, unique_by=repr)
            names = tuple(draw(some))
        elif kind == "namedtuple":
            names = tuple("abc"[:children])
        return Node(kind, names, tuple(build(depth + 1) for _ in range(children)))

    root = build(0)
    names = [name for name, here in walk(root) if isinstance(here, int)]
    specs = [
        array(name, mesh=None, spec=None)
        if kind == "array"
        else LeafSpec(name=name, kind=kind, value=VALUES.get(kind))
        for name, kind in zip(names, leaves, strict=True)
    ]
    paths = [f"p{i}" for i in range(len(specs))]
    specs = [
        s if s.layout is None else s._replace(layout=s.layout._replace(path=path))
        for s, path in zip(specs, paths, strict=True)
    ]
    return TreeSpec(root, tuple(specs))


@quick
@given(trees())
def test_any_tree_with_any_keys_comes_back(tree):
    written = manifest(tree)
    back = read(written.to_bytes())
    assert back == written
    assert repr(back.tree.root) == repr(tree.root)  # True is not 1, 0.0 is not -0.0


def test_every_field_comes_back():
    assert read(example().to_bytes()) == example()


@pytest.mark.parametrize(
    "changes",
    [
        {"step": None},
        {"step": 0},
        {"metadata": {}},
        {"compression": "zstd"},
        {"processes": (RECORD,) * 3},
        {"attempt": "a-12345678"},
    ],
)
def test_unusual_fields_come_back(changes):
    written = manifest(example().tree, **changes)
    assert read(written.to_bytes()) == written


@pytest.mark.parametrize(
    "tree",
    [
        TreeSpec(Node("dict", (), ()), ()),
        TreeSpec(0, (array("", mesh=None, spec=None),)),
        TreeSpec(Node("namedtuple", ("x",), (0,)), (array("x", mesh=None, spec=None),)),
    ],
)
def test_unusual_trees_come_back(tree):
    assert read(manifest(tree).to_bytes()).tree == tree


@quick
@given(trees())
def test_the_bytes_are_the_same_each_time(tree):
    data = manifest(tree).to_bytes()
    assert read(data).to_bytes() == data
    backwards = dict(reversed(manifest(tree).metadata.items()))
    assert manifest(tree, metadata=backwards).to_bytes() == data


def test_it_is_json_of_ascii_in_one_line():
    data = example().to_bytes()
    assert data.isascii()
    assert data.index(b"\n") == len(data) - 1
    assert data.startswith(b'{"a_format":"jaxshard","a_version":1,')
    assert list(json.loads(data)) == sorted(json.loads(data))


def test_it_ends_with_the_digest_of_the_rest():
    data = example().to_bytes()
    body = json.loads(data)
    digest = body.pop("xxh3_128")
    assert digest == xxhash.xxh3_128_hexdigest(canonical(body))


def test_only_fields_that_say_something_take_space():
    text = canonical(body_of(example())["leaves"][1])
    assert text == b'{"kind":"int","name":"a/1","value":"-0xff"}'


def test_shared_arrays_count_once():
    assert example().nbytes == 8 * 6 * 4 + 3 * 2 * 4 + 3 * 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}])
def test_canonical_json_has_no_nan_and_no_infinity(value):
    with pytest.raises(ValueError, match="JSON"):
        canonical(value)


@pytest.mark.parametrize(
    ("shape", "per_byte", "stored"),
    [((3, 5), 2, (3, 3)), ((3, 5), 1, (3, 5)), ((), 2, ()), ((4, 0), 8, (4, 0)), ((9,), 8, (2,))],
)
def test_packing_shortens_the_last_axis(shape, per_byte, stored):
    assert stored_shape(shape, per_byte) == stored


def test_20_000_leaves_are_written_and_read_quickly_and_stay_small():
    count = 20_000
    leaves = tuple(array(f"l{i:05d}") for i in range(count))
    root = Node("dict", tuple(leaf.name for leaf in leaves), tuple(range(count)))
    began = time.perf_counter()
    data = manifest(TreeSpec(root, leaves, MESHES)).to_bytes()
    assert len(read(data).tree.leaves) == count
    assert time.perf_counter() - began < 15
    assert len(data) < 400 * count


# Damage -------------------------------------------------------------------------------------


def test_every_cut_is_damage():
    data = example().to_bytes()
    for end in range(len(data)):
        with pytest.raises(CorruptionError, match=r"manifest\.json: the manifest is damaged: "):
            read(data[:end])


def test_every_changed_byte_is_damage():
    data = example().to_bytes()
    version = data.index(b'"a_version":') + len(b'"a_version":')
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        kind = FormatError if changed[version : version + 1] > b"1" else CorruptionError
        with pytest.raises(kind, match=r"ckpt/manifest\.json: "):
            read(changed)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null\n", b"\x80\x04pickle", b"{" * 100_000, b"[" * 100_000, b"\0" * 4096]
)
def test_another_file_is_damage(data):
    with pytest.raises(CorruptionError, match="cut, or not written by jaxshard") as e:
        read(data)
    assert e.value.kind is Kind.MANIFEST_DAMAGED
    assert e.value.path == "ckpt/manifest.json"


def test_bytes_behind_the_end_are_damage():
    with pytest.raises(CorruptionError, match="the manifest is damaged"):
        read(example().to_bytes() + b" ")


def test_a_newer_version_is_refused_by_its_number():
    text = example().to_bytes().replace(b'"a_version":1,', b'"a_version":12,')
    with pytest.raises(FormatError, match="version 1 or older, found version 12\nhint: pip") as e:
        read(text)
    assert e.value.kind is Kind.FORMAT_VERSION


# Hostile ------------------------------------------------------------------------------------


def at(*path, value):
    """A change of one place of the body."""

    def change(body):
        here = body
        for step in path[:-1]:
            here = here[step]
        if value is KeyError:
            del here[path[-1]]
        else:
            here[path[-1]] = value

    return change


LAYOUT = ("leaves", 0, "layout")
FIELDS = [
    "attempt", "compression", "created", "environment", "epoch", "leaves", "meshes", "metadata",
    "nonce", "processes", "step", "tree",
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_refused(field):
    body = body_of(example())
    del body[field]
    with pytest.raises(
        FormatError, match=r"ckpt/manifest\.json: a field is missing or of the wrong"
    ):
        read(signed(body))


@pytest.mark.parametrize("value", [None, 1, "x", [1], {"a": 1}, [[]], [{}], True, 1.5, -1, [None]])
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type_is_refused_or_reads_as_it_says(field, value):
    body = body_of(example())
    body[field] = value
    try:
        found = read(signed(body))
    except FormatError as e:
        assert str(e).startswith("ckpt/manifest.json: ")  # noqa: PT017
    else:
        assert field not in {"attempt", "leaves", "tree", "processes"}
        assert found.attempt == example().attempt


@pytest.mark.parametrize(
    "attempt",
    [
        "",
        "a-",
        "a-1234567",
        "a-XYZ45678",
        "../a-12345678",
        "a-12345678/",
        "a-" + "0" * 33,
        "a-12345678\n",
    ],
)
def test_an_attempt_that_could_be_elsewhere_is_refused(attempt):
    body = body_of(example())
    body["attempt"] = attempt
    with pytest.raises(FormatError, match="does not fit together: attempt"):
        read(signed(body))


@pytest.mark.parametrize(
    "path", ["", "..", "../../etc/passwd", "/etc/passwd", "a/../../b", "a//b", ".", "a\\b", "a\0b"]
)
def test_a_path_that_leaves_the_checkpoint_is_refused(path):
    body = body_of(example())
    body["leaves"][0]["layout"]["path"] = path
    with pytest.raises(FormatError, match=r"leaf 0 \('a/0'\), path"):
        read(signed(body))


@pytest.mark.parametrize(
    "change",
    [
        at(*LAYOUT, "shape", value=[8, 7]),
        at(*LAYOUT, "shape", value=[8]),
        at(*LAYOUT, "shape", value=[8, -6]),
        at(*LAYOUT, "shape", value=[8, 6.0]),
        at(*LAYOUT, "shape", value=[8, True]),
        at(*LAYOUT, "shape", value="86"),
        at(*LAYOUT, "piece", value=[4]),
        at(*LAYOUT, "piece", value=[3, 6]),
        at(*LAYOUT, "piece", value=[0, 6]),
        at(*LAYOUT, "tile", value=[0, 3]),
        at(*LAYOUT, "tile", value=[3, 3]),
        at(*LAYOUT, "tile", value=[-2, 3]),
        at(*LAYOUT, "tile", value=[2, 3, 1]),
        at(*LAYOUT, "tile", value=[1 << 62, 3]),
        at(*LAYOUT, "dtype", value="float64"),
        at(*LAYOUT, "dtype", value="object"),
        at(*LAYOUT, "per_byte", value=2),
        at(*LAYOUT, "per_byte", value=0),
        at(*LAYOUT, "per_byte", value="1"),
        at(*LAYOUT, "path", value=7),
        at(*LAYOUT, "tile", value=KeyError),
        at("leaves", 0, "layout", value=KeyError),
        at("leaves", 0, "shape", value=KeyError),
        at("leaves", 0, "dtype", value=KeyError),
        at("leaves", 0, "name", value=KeyError),
        at("leaves", 0, "name", value=5),
        at("leaves", 0, "name", value="k"),
        at("leaves", 0, "kind", value="pickle"),
        at("leaves", 0, "kind", value=["array"]),
        at("leaves", 0, "dtype", value="object"),
        at("leaves", 0, "dtype", value=["float32"]),
        at("leaves", 0, "shape", value=[8] * 65),
        at("leaves", 0, "shape", value=[8, 1 << 62]),
        at("leaves", 0, "mesh", value=1),
        at("leaves", 0, "mesh", value=-1),
        at("leaves", 0, "mesh", value="0"),
        at("leaves", 0, "spec", value=5),
        at("leaves", 0, value=None),
        at("leaves", 2, "array_shape", value=[3, 3]),
        at("leaves", 3, "same_as", value=3),
        at("leaves", 3, "same_as", value=1),
        at("leaves", 3, "same_as", value=5),
        at("leaves", 3, "same_as", value=-1),
        at("leaves", 3, "same_as", value="0"),
        at("leaves", 4, "layout", "per_byte", value=8),
        at("tree", "nodes", 1, value=3),
        at("tree", "nodes", 1, value=99),
        at("tree", "nodes", 1, value=-1),
        at("tree", "nodes", 1, value=True),
        at("tree", "nodes", 1, value="os"),
        at("tree", "nodes", 0, "type", value="module"),
        at("tree", "nodes", 0, "type", value=["list"]),
        at("tree", "nodes", 0, "keys", value=["a", "b"]),
        at("tree", "keys", value=["a"]),
        at("tree", "keys", 0, value={"object": "x"}),
        at("tree", "keys", 0, value=None),
        at("processes", value=[]),
        at("processes", 0, "table_bytes", value=KeyError),
        at("processes", 0, "table_bytes", value="x"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(change):
    body = body_of(example())
    change(body)
    with pytest.raises(FormatError, match=r"ckpt/manifest\.json: "):
        read(signed(body))


@pytest.mark.parametrize(
    "change",
    [
        at("leaves", 3, "shape", value=[800, 6]),
        at("leaves", 3, "dtype", value="int32"),
        at("leaves", 3, "kind", value="str"),
        at("leaves", 2, "same_as", value=0),
        at("leaves", 1, "same_as", value=0),
    ],
)
def test_a_leaf_that_is_another_one_must_have_its_shape_and_type(change):
    body = body_of(example())
    change(body)
    with pytest.raises(FormatError, match=r"ckpt/manifest\.json: "):
        read(signed(body))


@pytest.mark.parametrize(
    "change",
    [
        at("leaves", 0, "kind", value="int"),
        at("leaves", 0, "kind", value="none"),
        at("leaves", 0, "kind", value="str"),
        at("leaves", 0, "array_shape", value=[8, 6, 1]),
        at("leaves", 2, "key_impl", value=KeyError),
        at("leaves", 2, "key_impl", value=5),
    ],
)
def test_a_kind_must_have_what_its_values_are_made_of(change):
    body = body_of(example())
    change(body)
    with pytest.raises(FormatError, match=r"ckpt/manifest\.json: "):
        read(signed(body))


@pytest.mark.parametrize(
    "change",
    [
        at("tree", "keys", value=["a", "k", "k", "z"]),
        at("tree", "keys", value=["a", "k", "t", "other"]),
        at("tree", "nodes", 0, value={"type": "tuple", "nodes": [1, 0]}),
        at("leaves", 1, "name", value="elsewhere"),
        at("tree", "class", value=5),
    ],
)
def test_names_must_be_those_of_the_tree(change):
    body = body_of(example())
    change(body)
    with pytest.raises(FormatError, match=r"ckpt/manifest\.json: "):
        read(signed(body))


@pytest.mark.parametrize(
    "key", [{"float": "0x1p99999"}, {"float": "zz"}, {"bytes": "f"}, {"tuple": [[]]}]
)
def test_a_key_that_cannot_be_read_is_refused(key):
    body = body_of(example())
    body["tree"]["keys"][0] = key
    with pytest.raises(FormatError, match=r"ckpt/manifest\.json: "):
        read(signed(body))


@pytest.mark.parametrize("number", ["Infinity", "1e999", "NaN", "9" * 5000])
@pytest.mark.parametrize("field", [b'"step":7', b'"table_bytes":120'])
def test_a_number_beyond_all_bounds_is_refused(field, number):
    name = field.split(b":")[0]
    text = canonical(body_of(example())).replace(field, name + b":" + number.encode())
    digest = xxhash.xxh3_128_hexdigest(text)
    with pytest.raises(FormatError, match=r"ckpt/manifest\.json: "):
        read(text[:-1] + f',"xxh3_128":"{digest}"}}\n'.encode())


@pytest.mark.parametrize("depth", [257, 400, 100_000])
def test_a_tree_that_is_too_deep_is_refused(depth):
    body = canonical(body_of(manifest(TreeSpec(0, (array("", mesh=None, spec=None),)))))
    deep = b'{"nodes":[' * depth + b"0" + b'],"type":"list"}' * depth
    text = body.replace(b'"tree":0', b'"tree":' + deep)
    digest = xxhash.xxh3_128_hexdigest(text)
    with pytest.raises(FormatError, match=r"ckpt/manifest\.json: "):
        read(text[:-1] + f',"xxh3_128":"{digest}"}}\n'.encode())


def test_a_tree_as_deep_as_allowed_is_read():
    root = 0
    for _ in range(256):
        root = Node("list", (), (root,))
    leaf = array("/".join("0" * 256), mesh=None, spec=None)
    leaf = leaf._replace(layout=leaf.layout._replace(path="p"))
    data = manifest(TreeSpec(root, (leaf,))).to_bytes()
    assert read(data).to_bytes() == data


scalars = st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text()
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)


def places(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


@settings(derandomize=True, deadline=None, max_examples=250)
@given(st.data(), junk)
def test_junk_in_any_place_is_refused_or_harmless(data, value):
    body = body_of(example())
    where = data.draw(st.sampled_from(sorted(places(body), key=repr)))
    at(*where, value=value)(body)
    try:
        found = read(signed(body))
    except JaxshardError as e:
        assert isinstance(e, FormatError | CorruptionError)  # noqa: PT017
    else:
        for leaf in found.tree.leaves:
            assert leaf.layout is None or not leaf.layout.path.startswith((".", "/"))


# Templates ----------------------------------------------------------------------------------


def with_templates(item=None):
    body = json.loads((item or example()).to_bytes())
    del body["xxh3_128"]
    return body


def test_what_arrays_have_in_common_is_written_once():
    leaves = tuple(array(f"a{i}") for i in range(1000))
    root = Node("list", (), tuple(range(1000)))
    leaves = tuple(leaf._replace(name=str(i)) for i, leaf in enumerate(leaves))
    item = manifest(TreeSpec(root, leaves, MESHES))
    body = with_templates(item)
    assert len(body["templates"]) == 1
    assert {*body["leaves"][7]} <= {"name", "digest", "template", "path"}
    assert read(item.to_bytes()) == item
    assert len(item.to_bytes()) < 130 * 1000


def test_leaves_that_say_all_of_themselves_are_read_too():
    assert read(signed(body_of(example()))) == example()


@pytest.mark.parametrize(
    "change",
    [
        at("templates", value=[]),
        at("templates", value=KeyError),
        at("templates", 0, value=None),
        at("templates", 0, "layout", value=KeyError),
        at("templates", 0, "layout", "tile", value=[3, 3]),
        at("templates", 0, "value", value="0x1"),
        at("templates", 0, "mesh", value=9),
        at("leaves", 0, "template", value=99),
        at("leaves", 0, "template", value=-1),
        at("leaves", 0, "template", value=True),
        at("leaves", 0, "template", value="0"),
        at("leaves", 0, "path", value="../x"),
        at("leaves", 0, "path", value=7),
        at("leaves", 0, "digest", value=KeyError),
        at("leaves", 0, "name", value=5),
        at("leaves", 0, "name", value=KeyError),
    ],
)
def test_templates_that_do_not_fit_are_refused(change):
    body = with_templates()
    change(body)
    with pytest.raises(FormatError, match=r"ckpt/manifest\.json: "):
        read(signed(body))
