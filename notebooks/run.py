"""Run the notebooks and keep their outputs.

    python notebooks/run.py            # runs all of them, each in a directory of its own
    python notebooks/run.py --check    # runs them, changes nothing

Outputs are kept without the directory in which they arose; ids that are drawn at random are
replaced. `compared` says what of them has to be the same at every run.
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))
_ATTEMPT = re.compile(r"\ba-[0-9a-f]{16}\b")
_VARYING = re.compile(r"\d+\.\d+ s \(\d+\.\d+ GB/s\)")


def execute(path: Path) -> Any:
    """A notebook with fresh outputs; raises the error of the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    # The notebook itself says how many devices it simulates.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with tempfile.TemporaryDirectory() as made:
        home = str(Path(made).resolve())
        client = NotebookClient(
            notebook,
            timeout=300,
            record_timing=False,
            resources={"metadata": {"path": home}},
        )
        client.execute(env=env)
    notebook.metadata.pop("language_info", None)  # it has the version of Python
    for bundle in _bundles(notebook):
        for kind, text in bundle.items():
            bundle[kind] = _ATTEMPT.sub("a-0123456789abcdef", text.replace(f"{home}/", ""))
    return notebook


def _bundles(notebook: Any) -> Iterator[Any]:
    """The texts of all outputs, by kind; those of a stream are called `text`."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.get("data", output)


def compared(notebook: Any) -> list[list[str]]:
    """By cell the plain texts of its outputs, without what differs from run to run."""
    return [
        [
            _VARYING.sub("#", output.get("text") or output["data"]["text/plain"])
            for output in cell.get("outputs", ())
        ]
        for cell in notebook.cells
    ]


def main() -> None:
    """Run all notebooks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    for path in NOTEBOOKS:
        notebook = execute(path)
        if not check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {sum('outputs' in cell for cell in notebook.cells)} cells ran")


if __name__ == "__main__":
    main()
