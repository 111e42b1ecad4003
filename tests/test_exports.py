"""Every name of the front page is there, documented, and its examples run; so does the README."""

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import re
import sys
import types

import pytest
from support import REPOSITORY, run_python

import jaxshard
from jaxshard import _errors
from jaxshard._store import MemoryStore

ROOMS = sorted(p.stem for p in (REPOSITORY / "jaxshard").glob("_*.py") if p.stem != "__init__")
README = (REPOSITORY / "README.md").read_text()
FRONT_PAGE = ast.parse((REPOSITORY / "jaxshard/__init__.py").read_text())
EXPORTS = {name: getattr(jaxshard, name) for name in jaxshard.__all__}
FUNCTIONS = [name for name, value in EXPORTS.items() if inspect.isfunction(value)]
CLASSES = [name for name, value in EXPORTS.items() if inspect.isclass(value)]
ERRORS = [name for name in CLASSES if issubclass(EXPORTS[name], Exception)]
# In the order of DESIGN.md, section 3: what else each error is.
ALSO = {
    "JaxshardError": Exception,
    "NotFoundError": FileNotFoundError,
    "NotCommittedError": Exception,
    "ConflictError": FileExistsError,
    "CheckpointReplacedError": Exception,
    "LeafMismatchError": ValueError,
    "UnsupportedLeafError": TypeError,
    "CorruptionError": Exception,
    "FormatError": Exception,
    "StorageError": OSError,
    "StorageTimeoutError": TimeoutError,
    "DisagreementError": Exception,
}
METHOD_LIKE = (
    types.FunctionType,
    property,
    functools.cached_property,
    classmethod,
    staticmethod,
)
MEMBERS = [
    (name, member)
    for name in CLASSES
    for member, value in vars(EXPORTS[name]).items()
    if not member.startswith("_") and isinstance(value, METHOD_LIKE)
]


RECORDS = [
    name
    for name in CLASSES
    if dataclasses.is_dataclass(EXPORTS[name]) or hasattr(EXPORTS[name], "_fields")
]


# Names --------------------------------------------------------------------------------------


def test_the_names_are_sorted_and_unique():
    assert list(jaxshard.__all__) == sorted(set(jaxshard.__all__))


def test_the_names_are_those_that_the_front_page_maps_to_rooms():
    mapped = [name for names in jaxshard._ROOMS.values() for name in names]
    assert sorted(mapped) == list(jaxshard.__all__)


def test_type_checkers_see_the_names_in_the_same_rooms():
    seen = {
        (node.module.removeprefix("jaxshard."), alias.name)
        for node in ast.walk(FRONT_PAGE)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxshard.")
        for alias in node.names
    }
    assert seen == {(room, name) for room, names in jaxshard._ROOMS.items() for name in names}


@pytest.mark.parametrize("name", jaxshard.__all__)
def test_a_name_is_defined_in_the_room_that_it_is_mapped_to(name):
    assert EXPORTS[name].__module__ == f"jaxshard.{jaxshard._ROOM_OF[name]}"


def test_dir_shows_every_name():
    assert set(jaxshard.__all__) <= set(dir(jaxshard))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jaxshard' has no attribute 'lode'"):
        _ = jaxshard.lode


def test_a_star_import_gives_the_names():
    namespace: dict = {}
    exec("from jaxshard import *", namespace)
    assert set(jaxshard.__all__) <= set(namespace)


def test_the_version_is_that_of_the_package():
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert f'version = "{jaxshard.__version__}"' in text


# Documentation ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", jaxshard.__all__)
def test_an_export_is_documented(name):
    docstring = vars(EXPORTS[name]).get("__doc__") or EXPORTS[name].__doc__
    assert docstring is not None
    assert len(docstring.split()) >= 4
    assert not docstring.startswith(f"{name}(")  # not the text that dataclasses make


@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_a_public_method_or_property_is_documented(name, member):
    assert inspect.getdoc(vars(EXPORTS[name])[member])


@pytest.mark.parametrize("section", ["Args:", "Raises:", "Example:"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_documents(name, section):
    assert section in inspect.getdoc(EXPORTS[name]).splitlines()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_documents_each_argument(name):
    args = inspect.getdoc(EXPORTS[name]).partition("Args:")[2].partition("\n\n")[0]
    documented = re.findall(r"^  (\w+):", args, re.MULTILINE)
    assert documented == list(inspect.signature(EXPORTS[name]).parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_names_only_errors_that_exist_and_says_their_cause(name):
    section = inspect.getdoc(EXPORTS[name]).partition("Raises:")[2].partition("\n\n")[0]
    raised = re.findall(r"^  (\w+): \S", section, re.MULTILINE)
    assert raised
    assert set(raised) <= set(ERRORS)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_documents_each_field(name):
    fields = getattr(EXPORTS[name], "_fields", None) or EXPORTS[name].__dataclass_fields__
    attributes = inspect.getdoc(EXPORTS[name]).partition("Attributes:")[2].partition("\n\n")[0]
    assert re.findall(r"^  (\w+):", attributes, re.MULTILINE) == list(fields)


@pytest.mark.parametrize("room", ROOMS)
def test_examples_run(room):
    module = importlib.import_module(f"jaxshard.{room}")
    MemoryStore("doc").remove_tree("")  # what the examples of another test run left
    runner = doctest.DocTestRunner(verbose=False)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(example, out=sys.stdout.write)
    assert runner.summarize(verbose=False).failed == 0


def test_the_main_doors_have_examples():
    tried = {
        example.name.rpartition(".")[2]
        for room in ROOMS
        for example in doctest.DocTestFinder().find(importlib.import_module(f"jaxshard.{room}"))
        if example.examples
    }
    assert {*FUNCTIONS, "ResumeManager", "Run", "Checkpoint", "Every", "Keep"} <= tried


# Errors -------------------------------------------------------------------------------------


def test_the_front_page_has_every_error():
    tree = [v for v in vars(_errors).values() if inspect.isclass(v) and issubclass(v, Exception)]
    assert sorted(e.__name__ for e in tree) == sorted(ERRORS) == sorted(ALSO)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_in_the_documented_tree(name):
    assert re.search(rf"[─ ]{name}\b" if name != "JaxshardError" else name, _errors.__doc__)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_a_jaxshard_error_and_what_a_caller_would_catch(name):
    assert issubclass(EXPORTS[name], jaxshard.JaxshardError)
    assert issubclass(EXPORTS[name], ALSO[name])


@pytest.mark.parametrize("name", [name for name in ALSO if ALSO[name] is Exception])
def test_an_error_without_another_parent_has_none(name):
    builtins = {c for c in EXPORTS[name].__mro__ if c.__module__ == "builtins"}
    assert builtins == {Exception, BaseException, object}


def test_a_time_out_is_a_storage_error():
    assert issubclass(jaxshard.StorageTimeoutError, jaxshard.StorageError)


@pytest.mark.parametrize("name", [name for name in ERRORS if name != "JaxshardError"])
def test_an_error_carries_kind_path_and_hint_and_shows_all_of_its_message(name):
    error = EXPORTS[name]("step 3: expected x, found y", hint="look there")
    assert str(error) == "step 3: expected x, found y\nhint: look there"
    assert error.kind is EXPORTS[name].default_kind
    assert (error.hint, error.path, error.step) == ("look there", None, None)
    assert error.exit_code != 0


def test_kinds_are_unique_and_of_lower_case_words():
    values = [kind.value for kind in _errors.Kind.__members__.values()]
    assert len(values) == len(set(values)) == len(_errors.Kind.__members__)
    assert [v for v in values if not re.fullmatch(r"[a-z]+(-[a-z]+)*", v)] == []


@pytest.mark.parametrize("kind", list(_errors.Kind))
def test_a_kind_is_used(kind):
    texts = [p.read_text() for p in (REPOSITORY / "jaxshard").glob("_*.py")]
    assert sum(text.count(f"Kind.{kind.name}") for text in texts) >= 1


# README -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "door", ["save", "load", "open", "verify", "diff", "ResumeManager", "SaveOptions", "Every"]
)
def test_the_readme_shows(door):
    assert re.search(rf"\b{door}\(", README)


def python_blocks(markdown: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", markdown, re.DOTALL | re.MULTILINE)


def test_every_block_of_the_readme_is_closed():
    assert len(re.findall(r"^```", README, re.MULTILINE)) % 2 == 0
    assert len(python_blocks(README)) >= 3


def test_the_readme_runs(tmp_path):
    code = f"""
import os
os.chdir({str(tmp_path)!r})
namespace = {{"__name__": "__main__"}}
for number, block in enumerate({python_blocks(README)!r}):
    exec(compile(block, f"README.md, python block {{number}}", "exec"), namespace)
print("ran", sorted(os.listdir()))
"""
    assert "\nran ['ckpt'" in run_python(code)


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [t for t in targets if not (REPOSITORY / t).exists()] == []


def test_a_big_endian_machine_is_refused_before_it_writes_other_bytes():
    code = """
import sys
sys.byteorder = "big"
try:
    import jaxshard
except ImportError as e:
    print(e)
"""
    expected = "jaxshard: expected a little-endian machine, found a big-endian one"
    assert run_python(code).strip() == expected


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").glob("*.md")), ids=lambda p: p.stem)
def test_the_python_of_a_guide_is_python(page):
    """Parts of a training, that stand in a guide without the rest of it."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, page.name, "exec")
