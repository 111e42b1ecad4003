"""The map of rooms is the law: order of imports, no cycles, monopolies, what stays unimported."""

import ast
import functools
import re

import numpy as np
import pytest
from support import REPOSITORY, run_python

import jaxshard

PACKAGE = REPOSITORY / "jaxshard"
CLI = sorted(f"cli/{path.name}" for path in PACKAGE.glob("cli/*.py"))
DISPLAY = sorted(f"display/{path.name}" for path in PACKAGE.glob("display/*.py"))
DATA = sorted(f"data/{path.name}" for path in PACKAGE.glob("data/*.py"))
TESTING = sorted(f"testing/{path.name}" for path in PACKAGE.glob("testing/*.py"))
FLAT = [path.name for path in PACKAGE.glob("*.py")]
MODULES = sorted([*FLAT, *CLI, *DATA, *DISPLAY, *TESTING])
NO_ROOMS = {
    "__init__.py", "data/__init__.py", "monitoring.py", "zarr_dtypes.py", *CLI, *DISPLAY, *TESTING,
}  # fmt: skip
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
ROOM = re.compile(r"^\s*((?:data/)?_\w+\.py)\s+")


def blocks(markdown: str) -> list[str]:
    return re.findall(r"^```[^\n]*\n(.*?)^```$", markdown, re.DOTALL | re.MULTILINE)


def the_map() -> list[str]:
    """Lines of the fenced block that lists the rooms."""
    return max(blocks(CONTRIBUTING), key=lambda b: b.count(".py ")).splitlines()


ROOMS = [match[1] for line in the_map() if (match := ROOM.match(line))]
PURE = [match[1] for line in the_map()[: the_map().index("# bytes")] if (match := ROOM.match(line))]
TREES = {name: ast.parse((PACKAGE / name).read_text()) for name in MODULES}


def type_checking_nodes(tree: ast.Module) -> set[ast.AST]:
    """Everything below `if TYPE_CHECKING:`."""
    guards = (
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")
    )
    return {inner for guard in guards for part in guard.body for inner in ast.walk(part)}


@functools.cache
def lazy_nodes(name: str) -> set[ast.AST]:
    """Everything inside functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    outer = (n for n in ast.walk(TREES[name]) if isinstance(n, functions))
    return {inner for n in outer for inner in ast.walk(n)}


@functools.cache
def imports(name: str, *, top_level: bool = False) -> set[str]:
    """Dotted names that a module imports, lazily too; `from a import b` gives `a` and `a.b`."""
    tree = TREES[name]
    skipped = type_checking_nodes(tree) if name in {"__init__.py", "data/__init__.py"} else set()
    if top_level:
        skipped |= lazy_nodes(name)
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def rooms_imported_by(name: str) -> set[str]:
    parts = (dotted.split(".") for dotted in imports(name))
    found = {f"{'/'.join(p[1:n])}.py" for p in parts if p[0] == "jaxshard" for n in (2, 3)}
    return found & set(MODULES)


def importers(package: str, *, top_level: bool = False) -> set[str]:
    """Modules that import a package or anything below it."""
    return {
        name
        for name in MODULES
        if any(f"{i}.".startswith(f"{package}.") for i in imports(name, top_level=top_level))
    }


@functools.cache
def attributes(name: str) -> set[str]:
    """Dotted texts of all attribute accesses."""
    return {ast.unparse(n) for n in ast.walk(TREES[name]) if isinstance(n, ast.Attribute)}


@functools.cache
def strings(name: str) -> set[str]:
    """String constants that are not docstrings."""
    tree = TREES[name]
    statements = {
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    }
    constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in statements)
    return {n.value for n in constants if isinstance(n.value, str)}


# The map ------------------------------------------------------------------------------------


def test_the_map_lists_every_room_once():
    assert sorted(ROOMS) == [name for name in MODULES if name not in NO_ROOMS]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room):
    assert rooms_imported_by(room) <= set(ROOMS[: ROOMS.index(room)])


def test_no_other_room_imports_the_data():
    assert importers("jaxshard.data") - set(DATA) == {"cli/_data.py"}


def test_no_room_imports_the_command_line():
    assert importers("jaxshard.cli") - set(CLI) == {"__main__.py"}
    assert "cli/_verb.py" in importers("jaxshard._run")


def test_verbs_share_two_files_and_know_nothing_of_each_other():
    shared = {f"jaxshard.cli.{name}" for name in ("_output", "_verb")}
    for name in CLI:
        found = {i for i in imports(name) if i.startswith("jaxshard.cli.")}
        assert {i for i in found if i.count(".") == 2} <= shared, name


def test_no_room_imports_a_display_or_what_is_for_zarr():
    assert importers("jaxshard.display") - set(DISPLAY) == {"cli/_output.py"}
    assert importers("jaxshard.zarr_dtypes") == set()
    assert importers("jaxshard.monitoring") == set()
    assert "display/_outline.py" in importers("jaxshard._reader")


def test_displays_share_their_parts_and_know_nothing_of_each_other():
    shown = {where.partition(":")[0] for where in jaxshard._registry.displays.values()}
    for name in DISPLAY:
        assert imports(name) & shown == set(), name


@pytest.mark.parametrize("name", [*CLI, *DISPLAY, "monitoring.py", "zarr_dtypes.py"])
def test_what_is_no_room_opens_with_what_it_is_for(name):
    assert ast.get_docstring(TREES[name]).splitlines()[0].endswith(".")


def test_only_the_registry_is_imported_while_the_front_page_is_read():
    assert rooms_imported_by("__init__.py") == {"_registry.py"}
    assert imports("_registry.py") == {"importlib", "logging", "typing", "typing.Any"}


def test_the_front_page_maps_names_to_rooms_of_the_map():
    assert {f"{room}.py" for room in jaxshard._ROOMS} <= set(ROOMS)


def test_no_two_classes_share_a_name():
    names = [n.name for tree in TREES.values() for n in tree.body if isinstance(n, ast.ClassDef)]
    public = [name for name in names if not name.startswith("_")]
    assert sorted(public) == sorted(set(public))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_opens_with_what_it_is_for(room):
    docstring = ast.get_docstring(TREES[room])
    assert docstring is not None
    assert docstring.splitlines()[0].endswith((".", "`."))


# Monopolies ---------------------------------------------------------------------------------


def test_only_durable_syncs():
    syncing = {
        name
        for name in MODULES
        if any(a.endswith(("fsync", "F_FULLFSYNC", "fdatasync")) for a in attributes(name))
    }
    assert syncing == {"_durable.py"}


def test_only_store_and_tensors_import_tensorstore():
    assert importers("tensorstore") == {"_store.py", "_tensors.py"}


def test_only_piecefile_makes_checksums():
    assert importers("google_crc32c") == {"_piecefile.py"}


def test_tensorstore_is_imported_at_first_use_only():
    assert importers("tensorstore", top_level=True) == set()


def test_only_the_command_line_knows_click_and_rich():
    assert importers("click") == {"cli/__init__.py", *CLI}
    assert importers("rich") == {"cli/_output.py"}
    assert importers("rich", top_level=True) == set()


def test_only_what_is_for_zarr_knows_zarr():
    assert importers("zarr") == {"zarr_dtypes.py"}


def test_only_arrays_and_placement_read_shardings():
    reading = {n for n in MODULES if any(a.endswith(".sharding") for a in attributes(n))}
    assert reading | importers("jax.sharding") == {"_arrays.py", "_placement.py", "data/_share.py"}


def test_only_arrays_touches_what_is_private_in_jax():
    touching = {n for n in MODULES if any("jax._src" in a for a in attributes(n) | strings(n))}
    assert touching | importers("jax._src") == {"_arrays.py"}


def test_only_nnx_knows_flax():
    knowing = {n for n in MODULES if any("flax" in text for text in strings(n))}
    assert knowing | importers("flax") == {"_nnx.py"}


def test_flax_is_never_imported():
    assert importers("flax") == set()


IMPURE = {
    "jax", "tensorstore", "time", "datetime", "os", "pathlib", "mmap", "io", "shutil", "random",
    "secrets", "threading", "socket", "subprocess",
}  # fmt: skip


@pytest.mark.parametrize("room", PURE)
def test_a_pure_room_has_no_jax_no_clock_and_no_disk(room):
    assert {dotted.partition(".")[0] for dotted in imports(room)} & IMPURE == set()


@pytest.mark.parametrize(
    "banned", ["asyncio", "pickle", "marshal", "shelve", "dill", "cloudpickle", "runpy", "code"]
)
def test_nothing_imports_what_runs_code_or_event_loops(banned):
    assert importers(banned) == set()


def test_nothing_evaluates_text():
    calls = {
        (name, node.func.id)
        for name in MODULES
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {c for c in calls if c[1] in {"eval", "exec", "compile", "__import__"}} == set()


def test_only_front_pages_and_the_registry_import_by_name_and_only_what_is_ours():
    pages = {
        "__init__.py": "jaxshard.{room}",
        "cli/__init__.py": "jaxshard.cli._{module}",
        "data/__init__.py": "jaxshard.data.{room}",
    }
    named = {n for n in MODULES if "importlib.import_module" in attributes(n)}
    users = {"testing/_trainer.py", "cli/_data.py"}  # imports what its user wants to be tested
    assert named == {*pages, "_registry.py", *users}
    assert all(w.startswith("jaxshard.display._") for w in jaxshard._registry.displays.values())
    for page, name in pages.items():
        assert f'importlib.import_module(f"{name}")' in (PACKAGE / page).read_text()


# What stays unimported ----------------------------------------------------------------------

LOADED = (
    "import sys; print([m for m in ('jax', 'jaxlib', 'tensorstore', 'flax') if m in sys.modules])"
)


def test_importing_jaxshard_imports_neither_jax_nor_tensorstore():
    assert run_python(f"import jaxshard; {LOADED}").strip() == "[]"


def test_looking_into_a_checkpoint_imports_neither_jax_nor_tensorstore(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.ones(3), "n": 1})
    code = f"""
from jaxshard import open
ckpt = open({str(tmp_path / "ckpt")!r})
print(ckpt.leaves["w"].shape, ckpt["n"].read(), ckpt)
{LOADED}
"""
    assert run_python(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize(("compression", "needed"), [(None, []), ("zstd", ["tensorstore"])])
def test_reading_values_of_a_checkpoint_imports_no_jax(tmp_path, compression, needed):
    options = jaxshard.SaveOptions(pack_below=0, compression=compression)
    jaxshard.save(tmp_path / "ckpt", {"w": np.arange(3)}, options=options)
    code = f"""
import jaxshard
print(jaxshard.open({str(tmp_path / "ckpt")!r})["w"].read().tolist())
{LOADED}
"""
    assert run_python(code).splitlines() == ["[0, 1, 2]", str(needed)]


def test_listing_the_steps_of_a_run_imports_no_jax(tmp_path):
    with jaxshard.ResumeManager(tmp_path / "run", when=jaxshard.Every(steps=1)) as run:
        run.resume({"w": np.zeros(2)})
        run.save(1, {"w": np.zeros(2)}, wait=True)
    code = f"""
import jaxshard
print(jaxshard.open({str(tmp_path / "run")!r}).all_steps())
{LOADED}
"""
    assert run_python(code).splitlines() == ["[1]", "[]"]


def test_verify_and_diff_import_no_jax(tmp_path):
    jaxshard.save(tmp_path / "ckpt", {"w": np.arange(3)})
    code = f"""
import jaxshard
path = {str(tmp_path / "ckpt")!r}
print(jaxshard.verify(path).ok, jaxshard.diff(path, path).identical)
{LOADED}
"""
    assert run_python(code).splitlines() == ["True True", "[]"]
