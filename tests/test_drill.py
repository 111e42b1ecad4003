"""`jaxshard drill` on a real training: what it measures, what it holds against targets."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY

import jaxshard

TRAIN = """
import sys, time
import numpy as np
import jaxshard

every, total, chance = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["chance"]
with jaxshard.ResumeManager("never", when=jaxshard.Every(steps=every), when_busy="wait") as run:
    state, _ = run.resume({"w": np.zeros(1000)})
    for step in run.steps(total):
        time.sleep(0.02)
        state = {"w": state["w"] + (time.time() if chance else step)}
        run.maybe_save(step, state)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def drill(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxshard", "drill", *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


def train(*arguments: Any) -> tuple[Any, ...]:
    return ("--", sys.executable, "train.py", *arguments)


def test_a_training_that_saves_often_passes(folder):
    targets = ["--max-lost", "3s", "--max-resume", "20s", "--min-goodput", 0.1,
               "--max-storage", "1MB", "--max-slowdown", 3]  # fmt: skip
    done = drill(folder, "--kills", 2, "--root", "drills", *targets, *train(10, 100))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^KILLED AT STEP +STEPS LOST +TIME LOST", done.stdout, re.MULTILINE)
    for name in ("max-lost", "max-resume", "min-goodput", "max-storage", "max-slowdown"):
        assert re.search(rf"^{name} .* reached$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^differences +0 +0 +reached$", done.stdout, re.MULTILINE)
    assert re.search(r"kill 1: after step \d+\n.*kill 2: after step \d+\n", done.stderr)
    assert not (folder / "never").exists()  # its own root was not touched
    killed = jaxshard.report(folder / "drills/killed").goodput
    assert (killed.starts, killed.failures) == (3, 2)
    whole = jaxshard.open(folder / "drills/whole").load()["w"]
    assert (whole == jaxshard.open(folder / "drills/killed").load()["w"]).all()


def test_saving_too_rarely_is_told_by_a_table(folder):
    done = drill(folder, "--kills", 1, "--max-lost", "0.05s", "--json", *train(1000, 100))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    (check,) = [c for c in found["checks"] if c["name"] == "max_lost_s"]
    assert check["target"] == 0.05
    assert check["found"] > 0.05
    (kill,) = found["kills"]
    assert kill["lost_steps"] == kill["step"] > 0
    assert "1 of 2 targets missed" in done.stderr


def test_a_trajectory_that_changes_is_noticed_unless_it_may(folder):
    done = drill(folder, "--kills", 1, *train(10, 60, "chance"))
    assert done.returncode == 1
    assert re.search(r"^differences +0 +1 +missed$", done.stdout, re.MULTILINE), done.stdout
    assert "  w: other bits" in done.stdout
    done = drill(folder, "--kills", 1, "--allow-drift", *train(10, 60, "chance"))
    assert done.returncode == 0, done.stdout


def test_targets_may_stand_in_pyproject(folder):
    project = folder / "pyproject.toml"
    project.write_text('[tool.jaxshard.drill]\nmax_lost = "1h"\nmin_goodput = 0.999\n')
    done = drill(folder, "--kills", 1, "--min-goodput", 0.01, *train(10, 60))
    assert done.returncode == 0, done.stdout  # the option goes before
    assert re.search(r"^max-lost +60 min 0 s|^max-lost +1 h 0 min", done.stdout, re.MULTILINE)
    assert done.stderr.count("kill ") == 1
    project.write_text("[tool.jaxshard.drill]\nkills = 2\n")
    done = drill(folder, *train(10, 60))
    assert done.stderr.count("kill ") == 2
    project.write_text("[tool.jaxshard.drill]\nmax_loss = 1\n")
    done = drill(folder, *train(10, 60))
    assert done.returncode == 2
    assert "[tool.jaxshard.drill] has max_loss\nhint: known are kills, max_lost, " in done.stderr
    project.write_text('[tool.jaxshard.drill]\nmax_lost = "soon"\n')
    done = drill(folder, *train(10, 60))
    assert done.returncode == 2
    assert "expected a duration such as 500ms" in done.stderr


def test_a_command_that_fails_by_itself_is_quoted(folder):
    done = drill(folder, "--", sys.executable, "-c", "1/0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the training ended with 1 by itself; the end of" in done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "Traceback" in done.stderr  # its own, not ours
    assert done.stderr.count("Traceback") == 1


def test_a_command_that_saves_nothing_is_told(folder):
    done = drill(folder, "--", sys.executable, "-c", "print(3)")
    assert done.returncode == 2
    assert "expected the training to write a run to JAXSHARD_DRILL_ROOT=" in done.stderr
    assert "hint: the command has to save with jaxshard.ResumeManager" in done.stderr


def test_a_training_that_is_too_short_for_so_many_kills_is_told(folder):
    done = drill(folder, "--kills", 30, *train(1, 6))
    assert done.returncode == 2
    assert (
        "the training ended before it could be killed so often\nhint: fewer --kills" in done.stderr
    )


def test_a_root_that_is_there_is_not_touched(folder):
    (folder / "drills").mkdir()
    done = drill(folder, "--root", "drills", *train(1, 6))
    assert done.returncode == 2
    assert "drills: expected nothing, found something\nhint: --root another" in done.stderr
    shutil.rmtree(folder / "drills")


def test_html_is_a_page_with_the_way_it_went(folder):
    done = drill(folder, "--kills", 1, "--html", *train(10, 60))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<!doctype html>")
    assert "Fire drill" in done.stdout
    assert done.stdout.count('class="j-kept"') == 2


@pytest.mark.soak
def test_the_example_passes_and_fails_when_it_saves_too_rarely(tmp_path):
    example = (
        "--",
        sys.executable,
        REPOSITORY / "examples/train_lm.py",
        "--steps",
        60,
        "--run",
        "x",
    )
    targets = ("--kills", 2, "--max-lost", "60s", "--max-resume", "60s", "--min-goodput", 0.1)
    done = drill(tmp_path, *targets, *example, "--save-every", 5)
    assert done.returncode == 0, done.stdout + done.stderr
    done = drill(tmp_path, *targets, "--max-lost", "1s", *example, "--save-every", 60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^max-lost +1.0 s +\d.*missed$", done.stdout, re.MULTILINE)
    assert "1 of 4 targets missed" in done.stderr
