"""When the model goes wrong, or a file does: falling back, marks, rollback, undo; metrics."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import jaxshard
from jaxshard import (
    ConflictError,
    CorruptionError,
    Every,
    Keep,
    NotFoundError,
    ResumeManager,
    YoungDaly,
    _ledger,
)
from jaxshard._errors import Kind
from jaxshard._store import open_store
from jaxshard.cli import command


def state_of(step: int, branch: str = "") -> dict[str, Any]:
    return {"n": np.full(100, step), "branch": branch}


def run_with(root: Path, *steps: int) -> Path:
    with ResumeManager(root, keep=Keep()) as run:
        for step in steps:
            run.save(step, state_of(step), wait=True)
    return root


def damage(root: Path, step: int) -> None:
    (file,) = (root / f"step_{step:08d}").glob("a-*/packs/00000/c/0")
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(data)


def events(root: Path, *names: str) -> list[dict[str, Any]]:
    return [dict(e) for e in _ledger.read(open_store(root)) if e["event"] in names]


def names(root: Path) -> list[str]:
    return sorted(p.name.removeprefix("step_") for p in root.glob("step_*"))


# Falling back -------------------------------------------------------------------------------


def test_a_damaged_step_is_tried_once_and_never_again(tmp_path, caplog):
    root = run_with(tmp_path / "run", 10, 20, 30)
    damage(root, 30)
    with ResumeManager(root) as run:
        assert run.resume(state_of(0))[1] == 20
    assert "step 30 is damaged and is skipped" in caplog.text
    (decision,) = events(root, "fallback")
    assert decision["names"] == ["step_00000030"]
    assert decision["why"].startswith("leaf 'n', tile 0, file 'a-")
    caplog.clear()
    with ResumeManager(root) as run:
        assert run.resume(state_of(0))[1] == 20
        assert run.all_steps() == [10, 20]
    assert caplog.text == ""
    assert jaxshard.open(root).latest_step() == 20


def test_nothing_sound_stays_an_error_at_every_start(tmp_path):
    root = run_with(tmp_path / "run", 10, 20)
    damage(root, 10)
    damage(root, 20)
    for _ in range(2):
        with ResumeManager(root) as run, pytest.raises(CorruptionError) as caught:
            run.resume(state_of(0))
        assert caught.value.kind is Kind.NOTHING_SOUND
        text = str(caught.value)
        assert f"{root}: none of 2 committed steps is sound:\n  - step_00000010: " in text
        assert f"`jaxshard undo {root}` takes back the last mark or rollback" in text
        with ResumeManager(root) as run, pytest.raises(ConflictError, match="resume"):
            run.steps(10)


def test_a_step_that_was_mended_is_tried_again_after_undo(tmp_path):
    root = run_with(tmp_path / "run", 10, 20)
    damage(root, 20)
    with ResumeManager(root) as run:
        assert run.resume(state_of(0))[1] == 10
        damage(root, 20)  # the same bit again
        run.undo()
        assert run.resume(state_of(0))[1] == 20


def test_a_step_that_is_written_again_does_not_bear_the_mark_of_the_damaged_one(tmp_path):
    root = run_with(tmp_path / "run", 10, 20)
    damage(root, 20)
    with ResumeManager(root, keep=Keep()) as run:
        run.resume(state_of(0))
        run.save(20, state_of(20), wait=True)
        assert run.all_steps() == [10, 20]
    assert names(root) == ["00000010", "00000020.2"]  # it has been replaced
    assert jaxshard.open(root).load()["n"][0] == 20


# Marks --------------------------------------------------------------------------------------


def test_a_protected_step_outlives_every_rule(tmp_path):
    root = tmp_path / "run"
    with ResumeManager(root, keep=Keep(last=1)) as run:
        run.save(1, state_of(1), wait=True)
        run.protect(1)
        for step in (2, 3, 4):
            run.save(step, state_of(step), wait=True)
        assert run.all_steps() == [1, 4]
        run.unprotect(1)
        run.save(5, state_of(5), wait=True)
        assert run.all_steps() == [5]


def test_a_bad_step_is_not_resumed_from_and_stays_as_long_as_if_it_were_good(tmp_path):
    root = tmp_path / "run"
    with ResumeManager(root, keep=Keep(last=2)) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step), wait=True)
        run.mark_bad(3, "the loss was NaN")
        assert run.all_steps() == [2]
        assert run.latest_step() == 2
    with ResumeManager(root, keep=Keep(last=2)) as run:
        assert run.resume(state_of(0))[1] == 2
        run.save(4, state_of(4), wait=True)
        assert run.all_steps() == [2, 4]
        assert names(root) == ["00000002", "00000003", "00000004"]  # undo would bring it back
        run.save(5, state_of(5), wait=True)
        assert names(root) == ["00000004", "00000005"]


@pytest.mark.parametrize("decide", ["protect", "unprotect", "mark_bad", "rollback"])
def test_only_steps_that_are_there_can_be_meant(tmp_path, decide):
    root = run_with(tmp_path / "run", 1, 2)
    with (
        ResumeManager(root) as run,
        pytest.raises(NotFoundError, match="expected step 7, found: 1, 2"),
    ):
        getattr(run, decide)(7, *(["why"] if decide in {"mark_bad", "rollback"} else []))
    assert not (root / "decisions").exists()


def test_undo_takes_back_one_decision_after_the_other(tmp_path):
    with ResumeManager(run_with(tmp_path / "run", 1, 2, 3), keep=Keep(last=1)) as run:
        run.mark_bad(3, "a")
        run.mark_bad(2, "b")
        assert run.all_steps() == [1]
        run.undo()
        assert run.all_steps() == [1, 2]
        run.undo()
        assert run.all_steps() == [1, 2, 3]
        with pytest.raises(
            ConflictError, match="expected a decision to undo, found none"
        ) as caught:
            run.undo()
        assert caught.value.kind is Kind.NOTHING_TO_UNDO


# Rollback -----------------------------------------------------------------------------------


def train(run: ResumeManager, total: int, branch: str) -> list[int]:
    state, _ = run.resume(state_of(0))
    seen = []
    for step in run.steps(total):
        assert state["n"][0] == step - 1
        state = state_of(step, branch)
        run.maybe_save(step, state)
        seen.append(step)
    return seen


def test_after_a_rollback_training_goes_on_from_there_and_the_rest_is_set_aside(tmp_path):
    root = tmp_path / "run"
    options: dict[str, Any] = {"when": Every(steps=1), "when_busy": "wait", "keep": Keep()}
    with ResumeManager(root, **options) as run:
        train(run, 6, "first")
        run.rollback(3, "spike at 4", skip_batches=5)
        assert run.all_steps() == [1, 2, 3]
        assert run.skip_batches == 0  # not resumed yet
        with pytest.raises(ConflictError, match=r"expected resume\(\) before steps"):
            run.steps(6)
        state, step = run.resume(state_of(0))
        assert (step, state["branch"], run.skip_batches) == (3, "first", 5)
        assert list(run.steps(6)) == [4, 5, 6]
    assert jaxshard.open(root).all_steps() == [1, 2, 3]
    with ResumeManager(root, **options) as run:  # also at the next start
        assert train(run, 5, "second") == [4, 5]
        assert run.skip_batches == 0
        assert [run.load(step)["branch"] for step in run.all_steps()] == [
            *["first"] * 3, *["second"] * 2
        ]  # fmt: skip
    assert names(root) == [
        "00000001", "00000002", "00000003", "00000004", "00000004.2", "00000005", "00000005.2",
        "00000006",
    ]  # fmt: skip


def test_what_was_set_aside_goes_when_training_has_gone_beyond_it(tmp_path):
    root = tmp_path / "run"
    with ResumeManager(root, when=Every(steps=2), when_busy="wait", keep=Keep(last=2)) as run:
        train(run, 8, "first")
        assert names(root) == ["00000006", "00000008"]
        run.rollback(6, "why not")
        train(run, 7, "second")
        assert names(root) == ["00000006", "00000007", "00000008"]
        train(run, 10, "second")
        assert names(root) == ["00000008.2", "00000010"]


def test_undoing_a_rollback_comes_back_to_the_branch_that_was_left(tmp_path):
    root = tmp_path / "run"
    with ResumeManager(root, when=Every(steps=1), when_busy="wait", keep=Keep()) as run:
        train(run, 4, "first")
        run.rollback(2, "a spike")
        train(run, 3, "second")
        run.undo()
        assert run.all_steps() == [1, 2, 3, 4]
        assert run.resume(state_of(0))[1] == 4
        assert {run.load(step)["branch"] for step in run.all_steps()} == {"first"}
        assert train(run, 5, "first") == [5]


def test_the_newest_step_of_another_branch_is_not_in_the_way(tmp_path):
    with ResumeManager(run_with(tmp_path / "run", 1, 5, 9)) as run:
        run.rollback(1, "all over")
        with pytest.raises(ConflictError, match=r"expected resume\(\) before another save"):
            run.save(5, state_of(5, "too soon"))
        run.resume(state_of(0))
        run.save(5, state_of(5, "again"), wait=True)
        assert run.load(5)["branch"] == "again"


def test_batches_are_left_out_forwards(tmp_path):
    with (
        ResumeManager(run_with(tmp_path / "run", 1)) as run,
        pytest.raises(ValueError, match=r"skip_batches must be 0 or more: -1\nhint: "),
    ):
        run.rollback(1, "x", skip_batches=-1)


# Metrics ------------------------------------------------------------------------------------


def test_the_best_step_is_kept_and_found_also_by_metrics_that_come_later(tmp_path):
    keep = Keep(last=1, best=1, metric="loss")
    root = tmp_path / "run"
    with ResumeManager(root, keep=keep) as run:
        assert run.best_step() is None
        for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan"))]:
            run.save(step, state_of(step), metrics={"loss": loss}, wait=True)
        assert (run.all_steps(), run.best_step()) == ([2, 4], 2)
        run.record(4, {"loss": 0.5})
        assert run.best_step() == 4
    with ResumeManager(root, keep=keep) as run:
        assert run.best_step() == 4
        run.save(5, state_of(5), wait=True)
        assert run.all_steps() == [4, 5]
        run.save(6, state_of(6))
        run.record(6, {"loss": 0.25, "accuracy": 0.9})  # while it is being saved
        assert run.best_step() == 6
    reader = jaxshard.open(root)
    assert reader.best_step("loss") == 6
    assert reader.best_step("loss", mode="max") == 4
    assert reader.best_step("accuracy", mode="max") == 6
    assert reader.best_step("perplexity") is None


def test_metrics_are_numbers_of_steps_that_are_there(tmp_path):
    with ResumeManager(run_with(tmp_path / "run", 1)) as run:
        with pytest.raises(NotFoundError, match="expected step 2, found: 1"):
            run.record(2, {"loss": 1.0})
        with pytest.raises(TypeError, match="expected 'loss' to be a number, found list"):
            run.record(1, {"loss": [1.0]})
        with pytest.raises(ValueError, match=r"expected a metric in Keep, found none\nhint: keep="):
            run.best_step()


# The ledger ---------------------------------------------------------------------------------


def test_the_ledger_tells_the_story_and_a_hook_hears_it(tmp_path):
    heard: list[dict[str, Any]] = []
    root = tmp_path / "run"
    with ResumeManager(
        root, when=Every(steps=2), when_busy="wait", keep=Keep(last=1), on_event=heard.append
    ) as run:
        train(run, 4, "")
    with ResumeManager(root) as run:
        run.resume(state_of(0))
    told = [(e["event"], e.get("step")) for e in events(root, *_EVENTS)]
    assert [one for one in told if one[0] != "prune"] == [  # that is written behind a save
        ("start", None), ("fresh", None), ("going", 1), ("save", 2), ("save", 4), ("end", 4),
        ("start", None), ("resume", 4), ("end", None),
    ]  # fmt: skip
    assert [e["names"] for e in events(root, "prune")] == [["step_00000002"]]
    again = events(root, "start")[1]
    assert (again["epoch"], again["last_step"]) == (2, 4)
    assert [e["event"] for e in heard] == [e["event"] for e in events(root, *_EVENTS)][: len(heard)]
    (resumed,) = events(root, "resume")
    assert resumed["nbytes"] > 0
    assert resumed["seconds"] > 0
    for saved in events(root, "save"):
        assert saved["seconds"] >= saved["blocked_s"] > 0
        assert saved["cost_s"] >= 0
    assert json.dumps(heard)


_EVENTS = ("start", "fresh", "resume", "going", "save", "prune", "end")


def test_failed_and_skipped_saves_are_in_the_ledger(tmp_path, monkeypatch, caplog):
    from jaxshard import _commit

    caplog.set_level(logging.WARNING)
    root = tmp_path / "run"
    with ResumeManager(root, when=Every(steps=1)) as run:
        run.resume(state_of(0))

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr(_commit, "commit", fail)
            run.maybe_save(1, state_of(1))
            run._saves.running._thread.join()  # type: ignore[union-attr]
            run.maybe_save(2, state_of(2))
            run._saves.running._thread.join()  # type: ignore[union-attr]
        run.maybe_save(3, state_of(3))
    assert [e["step"] for e in events(root, "save-failed")] == [1, 2]
    assert "Input/output error" in events(root, "save-failed")[0]["error"]
    assert [e["step"] for e in events(root, "save")] == [3]


def test_a_policy_is_shown_what_saves_cost(tmp_path):
    seen = []

    def when(step: int, clock_s: float, history: Any) -> bool:
        seen.append(history)
        return step % 2 == 1

    with ResumeManager(tmp_path / "run", when=when, when_busy="wait") as run:
        run.resume(state_of(0))
        for step in (1, 2, 3, 4):
            run.maybe_save(step, state_of(step))
            run.wait_until_finished()
    began, first, second = seen[-1]
    assert (began.step, began.took_s, began.cost_s) == (0, 0.0, None)
    assert (first.step, second.step) == (1, 3)
    for saved in (first, second):
        assert saved.took_s > 0
        assert 0 < saved.cost_s < 5
    assert began.clock_s <= first.clock_s < second.clock_s


def test_young_daly_in_a_real_loop_saves_at_once_and_then_seldom(tmp_path):
    with ResumeManager(tmp_path / "run", when=YoungDaly(mtbf_hours=24), keep=Keep()) as run:
        run.resume(state_of(0))
        for step in run.steps(200):
            run.maybe_save(step, state_of(step))
        assert run.all_steps() == [1, 200]


# Stale states -------------------------------------------------------------------------------


def test_a_loop_that_saves_an_old_state_is_told(tmp_path, caplog):
    root = tmp_path / "run"
    with ResumeManager(root, keep=Keep()) as run:
        old = {"w": np.zeros(1000), "step": 1}
        run.save(1, old, wait=True)
        run.save(2, {**old, "step": 2}, wait=True)
        assert (
            f"{root}: every array of step 2 equals that of step 1: is an old state" in caplog.text
        )
        caplog.clear()
        run.save(3, {"w": np.ones(1000), "step": 3}, wait=True)
        run.save(4, {"w": np.zeros(1000), "step": 4}, wait=True)
    assert caplog.text.count("every array") == 0


def test_a_state_without_arrays_is_never_stale(tmp_path, caplog):
    with ResumeManager(tmp_path / "run") as run:
        for step in (1, 2):
            run.save(step, {"n": 0}, wait=True)
    assert "every array" not in caplog.text


# What a reviewer thought of ------------------------------------------------------------------


def test_undo_of_a_rollback_whose_branch_is_gone_is_refused(tmp_path):
    root = tmp_path / "run"
    with ResumeManager(root, when=Every(steps=1), when_busy="wait", keep=Keep(last=2)) as run:
        train(run, 4, "first")
        run.rollback(3, "a spike")
        assert train(run, 6, "second") == [4, 5, 6]
        with pytest.raises(ConflictError, match="rollback to step 3, cannot be undone") as caught:
            run.undo()
        assert caught.value.kind is Kind.NOTHING_TO_UNDO
        assert run.latest_step() == 6


def test_a_name_that_a_decision_knows_is_never_used_again(tmp_path):
    root = tmp_path / "run"
    with ResumeManager(root, when=Every(steps=1), when_busy="wait", keep=Keep(last=2)) as run:
        train(run, 4, "first")
        run.protect(3)
        run.rollback(3, "a spike")
        train(run, 9, "second")  # by now step_00000004 is gone, and so is 4.2
        assert "00000004" not in names(root)
        run.rollback(3, "another one")
        train(run, 4, "third")
        assert run.all_steps() == [3, 4]
        assert run.load(4)["branch"] == "third"


def test_a_loop_goes_on_from_where_a_rollback_has_led(tmp_path):
    with ResumeManager(tmp_path / "run", when=Every(steps=1), when_busy="wait", keep=Keep()) as run:
        state, _ = run.resume(state_of(0))
        seen = []
        for step in run.steps(6):
            seen.append(step)
            if step == 5 and seen.count(5) == 1:
                run.rollback(2, "a spike")
                state, _ = run.resume(state_of(0))
                with pytest.raises(
                    ConflictError, match="step 5 began before the run came back to 2"
                ):
                    run.maybe_save(step, state)
                continue
            state = state_of(step)
            run.maybe_save(step, state)
        assert seen == [1, 2, 3, 4, 5, 3, 4, 5, 6]
        assert run.all_steps() == [1, 2, 3, 4, 5, 6]


def test_a_loop_that_was_left_does_not_stand_in_the_way(tmp_path):
    with ResumeManager(tmp_path / "run", when=Every(steps=1), when_busy="wait", keep=Keep()) as run:
        train(run, 4, "first")
        run.rollback(2, "a spike")
        run.resume(state_of(0))
        run.save(3, state_of(3), wait=True)
        assert run.all_steps() == [1, 2, 3]


def test_a_loop_that_goes_on_without_resume_is_stopped(tmp_path):
    with ResumeManager(run_with(tmp_path / "run", 1, 2), when=Every(steps=1)) as run:
        run.resume(state_of(0))
        steps = run.steps(9)
        next(steps)
        run.rollback(1, "a spike")
        with pytest.raises(ConflictError, match="expected resume"):
            run.maybe_save(3, state_of(3))
        with pytest.raises(ConflictError, match="expected resume"):
            next(steps)


def test_falling_back_works_where_it_cannot_be_written_down(tmp_path, caplog, monkeypatch):
    from jaxshard import _decisions

    root = run_with(tmp_path / "run", 1, 2)
    damage(root, 2)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_decisions, "add", fail)
    with ResumeManager(root) as run:
        assert run.resume(state_of(0))[1] == 1
    assert "this cannot be written down" in caplog.text


def test_a_manifest_that_cannot_be_read_does_not_stop_pruning(tmp_path, caplog):
    root = tmp_path / "run"
    with ResumeManager(root, keep=Keep(last=1, best=1, metric="loss")) as run:
        for step in (1, 2):
            run.save(step, state_of(step), metrics={"loss": step}, wait=True)
    (root / "step_00000001/manifest.json").write_bytes(b"{")
    with ResumeManager(root, keep=Keep(last=1, best=1, metric="loss")) as run:
        for step in (3, 4, 5):
            run.save(step, state_of(step), metrics={"loss": step}, wait=True)
    assert names(root) == ["00000001", "00000002", "00000005"]
    assert caplog.text.count("stays, since it cannot be read") == 1


def test_an_error_of_training_is_a_failure_in_the_report(tmp_path):
    root = tmp_path / "run"

    def fail() -> None:
        with ResumeManager(root) as run:
            run.resume(state_of(0))
            raise ZeroDivisionError("of its own")

    with pytest.raises(ZeroDivisionError):
        fail()
    (ended,) = events(root, "end")
    assert ended["error"] == "ZeroDivisionError: of its own"
    with ResumeManager(root) as run:
        run.resume(state_of(0))
    assert jaxshard.report(root).goodput.failures == 1


def test_a_damaged_decision_is_named_and_leaves_no_handler_behind(tmp_path):
    import signal

    root = run_with(tmp_path / "run", 1)
    with ResumeManager(root) as run:
        run.protect(1)
    before = signal.getsignal(signal.SIGTERM)
    (root / "decisions/00000001.json").write_text("{")
    with pytest.raises(CorruptionError, match=r"00000001\.json: expected a decision") as caught:
        ResumeManager(root)
    assert caught.value.kind is Kind.DECISION_DAMAGED
    assert signal.getsignal(signal.SIGTERM) == before
    (root / "decisions/00000001.json").unlink()
    with ResumeManager(root) as run:
        assert run.all_steps() == [1]


def test_what_is_bad_can_be_looked_at_by_its_number_and_not_gone_back_to(tmp_path):
    with ResumeManager(tmp_path, keep=Keep()) as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(3, step)}, wait=True)
        run.mark_bad(2, "a spike")
    for verb in ("ls", "show", "verify", "stats"):
        done = CliRunner().invoke(command, [verb, f"{tmp_path}@2"])
        assert done.exit_code == 0, done.output
    for path in (f"{tmp_path}@2", f"{tmp_path}/step_00000002"):
        rows = json.loads(CliRunner().invoke(command, ["ls", path, "--json"]).stdout)["steps"]
        assert [row["state"] for row in rows] == ["bad"]
    done = CliRunner().invoke(command, ["rollback", f"{tmp_path}@2", "--why", "x"])
    assert done.exit_code == 2
    assert "expected step 2 to count, found that it is out: a spike" in done.stderr
