"""The notebooks run, and the outputs that are kept in them are those of today."""

import json
import re
import subprocess
import sys

import nbformat
import pytest
from support import REPOSITORY

FOLDER = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# In a process of its own: a kernel needs threads, sockets and an event loop.
RUN = f"""
import json, sys
sys.path.insert(0, {str(FOLDER)!r})
from pathlib import Path
import nbformat, run
fresh = run.execute(Path(sys.argv[1]))
kept = nbformat.read(sys.argv[1], as_version=4)
print(json.dumps({{"fresh": run.compared(fresh), "kept": run.compared(kept), "whole": fresh}}))
"""


def test_there_are_notebooks():
    assert [p.name for p in NOTEBOOKS] == [
        "01_first_checkpoint.ipynb",
        "02_crash_and_resume.ipynb",
    ]


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda p: p.stem)
def ran(request):
    """What a run gives: texts of today, texts that are kept, the whole notebook."""
    command = [sys.executable, "-c", RUN, str(request.param)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kept_outputs_are_those_of_today(ran):
    assert ran["fresh"] == ran["kept"]
    assert sum(bool(texts) for texts in ran["fresh"]) >= 5


def test_every_display_of_the_notebook_is_one_of_ours(ran):
    """The text alone would also be there if a display had failed."""
    outputs = [o for cell in ran["whole"]["cells"] for o in cell.get("outputs", ())]
    shown = [o["data"] for o in outputs if "data" in o and "<" in o["data"]["text/plain"]]
    assert len(shown) >= 2
    assert all('<div class="jaxshard-' in data["text/html"] for data in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_kept_notebook_tells_nothing_of_the_machine(path):
    text = path.read_text()
    assert re.findall(r"/(?:tmp|home|root|Users|work|usr|var)/[^\s\"]*", text) == []
    assert "language_info" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_kept_notebook_is_valid_was_run_in_order_and_has_no_errors(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "execute_result",
        "display_data",
    }
    assert [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"] == []


def test_displays_are_kept_as_they_are_made_today():
    """A new style sheet has a new class: run `python notebooks/run.py` after changing it."""
    from jaxshard.display import _style

    for path in NOTEBOOKS:
        assert set(re.findall(r"jaxshard-[0-9a-f]{8}", path.read_text())) == {_style.ROOT}
