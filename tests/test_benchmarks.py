"""The benchmarks run, in their smoke form; what they compute from their numbers is right."""

import ast
import importlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
from support import REPOSITORY

from benchmarks import (
    __main__,
    _docs,
    _results,
    _rounds,
    _states,
    load,
    memory,
    object_store,
    resume,
    save,
)
from benchmarks._process import AbsentError, Worker, require_installed
from benchmarks._results import Result
from benchmarks._rounds import Ask

FOLDER = REPOSITORY / "benchmarks"
QUESTIONS = sorted(p.stem for p in FOLDER.glob("[!_]*.py"))
# What a smoke test of each asks: the smallest state, us and whoever is cheap.
SMOKE = {"behind": "tiny-gpt2", "resume": "tiny-gpt2"}
BESIDE = ("raw-2", "read-2", "bare-loop")
PEERS = ("orbax", "orbax-tuned", "orbax-v1", "torch-dcp", "safetensors")


@pytest.fixture
def need_peer():
    """`need_peer("orbax")` skips where the package is absent, or fails if it must be there."""

    def need(name: str) -> str:
        try:
            require_installed(name)
        except AbsentError:
            reason = f"the package of {name} is not installed"
            if os.environ.get("JAXSHARD_REQUIRE_TOOLS") == "1":
                pytest.fail(reason)
            pytest.skip(reason)
        return name

    return need


def ask(question: str, where, names=BESIDE) -> list[Result]:
    """One round of a question about its smallest state."""
    module = importlib.import_module(f"benchmarks.{question}")
    return module.run(Ask(SMOKE.get(question, "tiny"), 1, str(where), names))


def is_sound(result: Result) -> bool:
    """Every contender has one number for each round, positive unless noise is subtracted in it."""
    values = result.values.values()
    least = -math.inf if "cost of one save" in result.case else 0
    return bool(values) and all(len(v) == 1 and least < v[0] < math.inf for v in values)


# Each of them runs --------------------------------------------------------------------------


@pytest.mark.parametrize("question", [q for q in QUESTIONS if q != "object_store"])
def test_a_benchmark_runs_and_leaves_nothing(question, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling is not what is tested
    results = ask(question, tmp_path)
    assert {r.question for r in results} == {question}
    assert [r.case for r in results if not is_sound(r)] == []
    assert list(tmp_path.iterdir()) == []


def test_a_load_from_a_slow_store_waits_for_each_request(tmp_path, need_tool):
    need_tool("cc")
    (result,) = ask("object_store", tmp_path)
    (note,) = result.notes
    n_read = int(note.split(" read")[0].rpartition(" ")[2])
    assert n_read >= 2  # the manifest, the table, the pack
    assert result.median("jaxshard") >= 3 * object_store.DELAY_S
    assert _states.nbytes("tiny") / 1e6 == pytest.approx(float(note.split()[-2]), abs=0.1)


def test_without_a_compiler_the_slow_store_is_skipped_with_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_COMPILER", "no-such-compiler")
    (result,) = ask("object_store", tmp_path)
    assert (result.values, result.notes) == ({}, ["no-such-compiler is not installed; skipped"])


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_saves_and_loads_the_same_bits(name, need_peer, tmp_path):
    need_peer(name)
    asked = Ask("tiny", 1, str(tmp_path), (name,))
    results = load.run_behind_save(asked)  # compares them
    assert [(r.question, name in r.values) for r in results] == [("save", True), ("load", True)]


def test_a_contender_that_loads_other_bits_is_found_out(tmp_path):
    with Worker("benchmarks._measured:Measured", name="raw-2", state="tiny") as worker:
        worker.ask("save", path=str(tmp_path / "raw"))
        with (tmp_path / "raw" / "0").open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)[0]
            file.seek(1000)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(RuntimeError, match="with exit code 1\nhint: "):
            worker.ask("load", path=str(tmp_path / "raw"))


def test_a_peer_that_is_absent_is_a_note(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "orbax" else find(name)
    )
    (result,) = save.run(Ask("tiny", 1, str(tmp_path), ("orbax",)))
    assert (list(result.values), result.notes) == (
        ["jaxshard"], ["orbax is not installed; skipped"],
    )  # fmt: skip


def test_every_benchmark_has_a_sketch_and_is_in_the_whole_run():
    for question in QUESTIONS:
        doc = ast.get_docstring(ast.parse((FOLDER / f"{question}.py").read_text()))
        first, _, rest = doc.partition("\n")
        assert first.endswith("?"), question
        assert "Sketch: " in rest, question
    for items in (__main__.FULL, __main__.QUICK):
        assert {q for item in items for q in item.questions} == set(QUESTIONS)


def test_the_whole_run_asks_only_about_states_and_contenders_that_there_are():
    from benchmarks._contenders import CONTENDERS

    for item in (*__main__.FULL, *__main__.QUICK):
        module = importlib.import_module(f"benchmarks.{item.questions[-1]}")
        assert item.state in module.STATES, item
        assert set(item.names or ()) <= set(CONTENDERS), item


def test_one_question_alone_by_its_command_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks.verify", "--state", "tiny", "--rounds", "2"]
    command += ["--dir", str(tmp_path), "--contenders", "read-1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| tiny")]
    assert [row.split(" | ")[1] for row in rows] == ["jaxshard", "read-1"]


@pytest.mark.parametrize("arguments", [["--only", "lode"], ["--contenders", "orbacks"]])
def test_a_name_that_there_is_not_is_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(arguments)
    assert f"unknown: ['{arguments[1]}']" in capsys.readouterr().err


def test_all_questions_write_tables_numbers_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(__main__, "RESULTS", tmp_path / "results")
    verify = __main__.Item(("verify",), "tiny", 1, ("read-1",))
    monkeypatch.setattr(__main__, "QUICK", (verify,))
    __main__.main(["--quick", "--dir", str(tmp_path)])
    (result,) = _results.from_json((tmp_path / "results/latest.json").read_text())
    assert result.question == "verify"
    assert _results.markdown([result]) in (tmp_path / "results/latest.md").read_text()
    assert (tmp_path / "results/verify.png").read_bytes().startswith(b"\x89PNG")


# States -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_the_size_of_a_state_is_known_without_making_it(name):
    leaves = _states.host_state(name).values()
    assert sum(leaf.nbytes for leaf in leaves) == _states.nbytes(name)


def test_all_leaves_of_a_state_have_different_bits():
    leaves = [leaf.tobytes() for leaf in _states.host_state("tiny").values()]
    assert len(set(leaves)) == len(leaves)


def test_every_state_is_described():
    assert {*_states.ARRAYS, *_states.MODELS} == set(_states.WHAT)


# Rounds -------------------------------------------------------------------------------------


def test_contenders_take_turns_and_the_first_round_does_not_count(capsys):
    order = []

    def measure(contender):
        order.append(contender)
        return len(order)

    values = _rounds.in_turn({"a": "A", "b": "B"}, 2, measure)
    assert order == ["A", "B"] * 3
    assert values == {"a": [3, 5], "b": [4, 6]}
    assert capsys.readouterr().err == "...\n"


def test_those_who_are_asked_are_filtered_and_we_are_always_there():
    everybody = ("jaxshard", "orbax", "raw-2")
    assert Ask("tiny", 1).among(everybody) == everybody
    assert Ask("tiny", 1, names=("raw-2", "torch-dcp")).among(everybody) == ("jaxshard", "raw-2")


def test_a_directory_is_made_below_the_given_one_and_removed(tmp_path):
    with _rounds.folder(str(tmp_path)) as made:
        assert [str(p) for p in tmp_path.iterdir()] == [made]
    assert list(tmp_path.iterdir()) == []


def test_memory_is_touched_once_and_never_more_than_is_free(monkeypatch):
    monkeypatch.setattr(_rounds, "_touched", 0)
    made = []
    monkeypatch.setattr(_rounds.np, "ones", lambda n, _: made.append(n))
    monkeypatch.setattr(_rounds, "available_bytes", lambda: 7 << 30)
    _rounds.touch(5 << 29)
    _rounds.touch(1 << 30)
    _rounds.touch(99 << 30)
    assert made == [1 << 30, 1 << 30, 1 << 29, 1 << 30, 1 << 30, 1 << 30]


# Results ------------------------------------------------------------------------------------


def result(**values: list[float]) -> Result:
    return Result("save", "big", "s", {k.replace("_", "-"): v for k, v in values.items()})


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    found = result(jaxshard=[1, 2, 10], orbax=[5, 8, 10])
    assert found.ratio("orbax") == 4  # of 5, 4, 1; that of the medians would be 4 as well
    assert found.ratio("jaxshard", "orbax") == 0.25
    found = result(jaxshard=[1, 2, 10], orbax=[1, 8, 100])
    assert found.ratio("orbax") == 4
    assert result(jaxshard=[1, 2, 4], orbax=[4, 2, 4]).ratio("orbax") == 1  # medians: 2


def test_a_ratio_needs_as_many_rounds_of_both():
    with pytest.raises(ValueError, match="longer"):
        result(jaxshard=[1, 2], orbax=[1]).ratio("orbax")


def test_median_difference_and_the_best():
    found = result(jaxshard=[1, 2, 9], raw_2=[3, 1, 1], raw_4=[2, 2, 2])
    assert (found.median("jaxshard"), found.difference("jaxshard", "raw-2")) == (2, 1)
    assert found.best(("raw-2", "raw-4", "raw-16")) == "raw-2"
    assert found.best(("raw-16",)) is None


def test_a_target_says_what_was_found():
    found = result(jaxshard=[1.0], orbax=[3.0], raw_2=[2.0])
    found.expect_ratio(("orbax", "torch-dcp", "raw-2"), 2.5)
    found.expect("jaxshard in s", 1.0, at_most=1)
    assert found.targets == [
        ("orbax / jaxshard >= 2.5: 3", True),
        ("raw-2 / jaxshard >= 2.5: 2", False),
        ("jaxshard in s <= 1: 1", True),
    ]
    assert _results.summary([found]) == (
        "2 of 3 targets reached; missed:\n\n* save: big: raw-2 / jaxshard >= 2.5: 2"
    )


def test_the_table():
    found = result(jaxshard=[1.0, 2.0, 3.0], orbax=[4.0, 4.0, 4.0])
    found.expect_ratio(("orbax",), 3)
    found.notes.append("torch-dcp is not installed; skipped")
    other = Result("scale", "plan", "s", {"1000 leaves": [0.5]})
    assert _results.markdown([found, other]) == (
        "### save\n"
        "\n"
        "| case | contender | median | min | max | unit | ÷ jaxshard |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| big | jaxshard | 2 | 1 | 3 | s | 1.00 |\n"
        "| big | orbax | 4 | 4 | 4 | s | 2.00 |\n"
        "\n"
        "* **missed**: big: orbax / jaxshard >= 3: 2\n"
        "* big: torch-dcp is not installed; skipped\n"
        "\n"
        "### scale\n"
        "\n"
        "| case | contender | median | min | max | unit | ÷ jaxshard |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| plan | 1000 leaves | 0.5 | 0.5 | 0.5 | s |  |\n"
    )


def test_numbers_survive_json():
    found = result(jaxshard=[1.0, 2.0], orbax=[4.0, 4.5])
    found.expect_ratio(("orbax",), 3)
    text = _results.as_json([found])
    assert _results.from_json(text) == [found]
    assert json.loads(text)["machine"]["packages"]["jaxshard"]


@pytest.mark.parametrize(
    ("judge", "case", "seconds", "missed"),
    [
        (save.judged, "big", {"orbax": 4, "orbax-tuned": 2, "torch-dcp": 2}, ["orbax-tuned"]),
        (save.judged, "big", {"raw-2": 0.9, "raw-4": 0.8}, ["raw-4"]),
        (save.judged, "small", {"orbax": 20, "torch-dcp": 1.9, "safetensors": 0.7}, ["torch-dcp"]),
        (save.judged, "tiny", {"orbax": 0.1}, []),
        (load.judged, "big", {"orbax": 3.5, "torch-dcp": 3}, ["orbax"]),
        (load.judged, "big", {"raw-2": 0.3}, ["jaxshard"]),
        (load.judged, "big, mesh 4x2", {"orbax": 3.5}, []),
    ],
)
def test_targets_follow_the_state(judge, case, seconds, missed):
    values = {"jaxshard": [1.0], **{name: [float(s)] for name, s in seconds.items()}}
    judged = judge(Result("?", case, "s", values))
    assert [what.split(" / ")[0] for what, reached in judged.targets if not reached] == missed


def test_the_stages_of_a_restart_add_up():
    at = {"python": 11, "imports": 13, "abstract": 14, "restore": 17, "compile": 22, "step": 23}
    stages = resume._stages(10, at)
    assert stages == {
        "python": 1, "imports": 2, "abstract": 1, "restore": 3, "compile": 5, "step": 1,
    }  # fmt: skip


def test_one_array_of_eight_budgets_is_what_it_says():
    assert _states.nbytes("huge") == 8 * memory.BUDGET_BYTES


# The page -----------------------------------------------------------------------------------


def test_results_go_between_the_markers_of_the_page(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "latest.md"
    page.write_text(f"before\n{_docs.BEGIN}\nold\n{_docs.END}\nafter\n")
    results.write_text("new\n")
    for _ in range(2):
        _docs.update(results, page)
        text = page.read_text()
        assert text == f"before\n{_docs.BEGIN}\n\nnew\n\n{_docs.END}\nafter\n"


def test_a_page_without_markers_and_results_that_are_not_there_are_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{_docs.END} {_docs.BEGIN}")
    with pytest.raises(SystemExit, match="expected results, found nothing\nhint: "):
        _docs.update(tmp_path / "latest.md", page)
    (tmp_path / "latest.md").write_text("new")
    with pytest.raises(SystemExit, match="and then"):
        _docs.update(tmp_path / "latest.md", page)


def test_the_page_has_the_markers(tmp_path):
    page = shutil.copy(_docs.PAGE, tmp_path)
    (tmp_path / "latest.md").write_text("### new")
    _docs.update(tmp_path / "latest.md", tmp_path / "performance.md")
    assert "### new" in (tmp_path / page).read_text()
