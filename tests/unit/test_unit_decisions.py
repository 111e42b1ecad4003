"""Decisions and their fold, against a model that knows only what holds."""

import json
import threading

import pytest

from jaxshard import _decisions
from jaxshard._decisions import Decision, Verdict, fold, last_to_undo
from jaxshard._errors import CorruptionError, FormatError
from jaxshard._store import open_store


def decided(*made):
    return [Decision(number, *one) for number, one in enumerate(made, 1)]


def undo(of, *names):
    return (Verdict.UNDO, None, names, "", 0, of)


def test_nothing_was_decided():
    standing = fold([])
    assert standing.counts("step_00000001")
    assert (standing.protected, dict(standing.bad), standing.aside) == (set(), {}, set())
    assert standing.skip_batches is None
    assert last_to_undo([]) is None


def test_protection_comes_and_goes():
    made = decided((Verdict.PROTECT, 1, ("a",)), (Verdict.PROTECT, 2, ("b",)))
    assert fold(made).protected == {"a", "b"}
    made += [Decision(3, Verdict.UNPROTECT, 1, ("a",))]
    assert fold(made).protected == {"b"}
    assert fold([*made, Decision(4, *undo(3))]).protected == {"a", "b"}


def test_bad_and_damaged_steps_do_not_count_and_only_marks_are_somebodys():
    standing = fold(
        decided((Verdict.MARK_BAD, 1, ("a",), "it diverged"), (Verdict.FALLBACK, 2, ("b",), "cut"))
    )
    assert dict(standing.bad) == {"a": "it diverged", "b": "cut"}
    assert standing.marked == {"a"}
    assert not standing.counts("a")
    assert not standing.counts("b")
    assert standing.counts("c")


def test_a_rollback_sets_aside_and_undoing_it_sets_the_new_branch_aside():
    made = decided((Verdict.ROLLBACK, 10, ("20", "30"), "spike", 7))
    assert fold(made).aside == {"20", "30"}
    assert fold(made).skip_batches == (10, 7)
    made += [Decision(2, *undo(1, "20.2"))]
    assert fold(made).aside == {"20.2"}
    assert fold(made).skip_batches is None


def test_what_is_undone_next():
    made = decided((Verdict.PROTECT, 1, ("a",)), (Verdict.MARK_BAD, 2, ("b",)))
    assert last_to_undo(made) == made[1]
    made += [Decision(3, *undo(2))]
    assert last_to_undo(made) == made[0]
    made += [Decision(4, *undo(1))]
    assert last_to_undo(made) is None
    made += [Decision(5, Verdict.PROTECT, 1, ("a",))]
    assert last_to_undo(made) == made[4]


def test_what_was_written_is_read(tmp_path):
    store = open_store(tmp_path)
    first = _decisions.add(
        store, Verdict.MARK_BAD, step=3, names=("step_00000003",), why="ö\n\ud800"
    )
    second = _decisions.add(store, Verdict.UNDO, of=1)
    assert _decisions.read(store) == [first, second]
    assert (first.number, second.number) == (1, 2)
    assert first.by
    assert first.at.endswith("+00:00")


def test_each_gets_a_number_of_its_own_however_many_decide_at_once(tmp_path):
    store = open_store(tmp_path)
    threads = [
        threading.Thread(
            target=lambda: _decisions.add(store, Verdict.PROTECT, step=1, names=("a",))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [d.number for d in _decisions.read(store)] == list(range(1, 9))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"verdict":"promote"}', '{"number":"x"}'])
def test_a_file_of_somebody_else_is_an_error(tmp_path, text):
    store = open_store(tmp_path)
    _decisions.add(store, Verdict.PROTECT, step=1, names=("a",))
    (tmp_path / "decisions/00000001.json").write_text(text)
    wanted = CorruptionError if text in {"", "{"} else FormatError
    with pytest.raises(wanted, match=r"00000001\.json: expected a decision.*\nhint: ") as caught:
        _decisions.read(store)
    assert caught.value.path == str(tmp_path / "decisions/00000001.json")


def test_a_decision_of_a_newer_version_is_not_passed_over(tmp_path):
    store = open_store(tmp_path)
    _decisions.add(store, Verdict.PROTECT, step=1, names=("a",))
    file = tmp_path / "decisions/00000001.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "verdict": "promote"}))
    with pytest.raises(FormatError, match="promote"):
        _decisions.read(store)
