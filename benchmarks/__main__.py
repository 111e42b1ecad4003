"""All questions, one after the other; `make bench` runs this.

What was found goes to `benchmarks/results/`: `latest.json` (every number), `latest.md` (tables,
targets), and a picture for each question, if matplotlib is installed. It is written after each
question, and what earlier runs found about other questions and states stays there: what was
interrupted is not lost, and a run can be made in parts.
"""

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import _docs, _results, _rounds, _states
from benchmarks._results import Result
from benchmarks._rounds import Ask

RESULTS = Path(__file__).with_name("results")


class Item(NamedTuple):
    """One question about one state.

    Attributes:
      questions: modules that answer it; save and load share their processes.
      state: name of the state.
      rounds: that count.
      names: contenders, where not all of them have the time.
    """

    questions: tuple[str, ...]
    state: str
    rounds: int
    names: tuple[str, ...] | None = None

    def run(self, where: str | None, names: tuple[str, ...] | None) -> list[Result]:
        """Ask it."""
        if names is not None and self.names is not None:
            names = tuple(n for n in names if n in self.names)
        ask = Ask(self.state, self.rounds, where, self.names if names is None else names)
        module = importlib.import_module(f"benchmarks.{self.questions[-1]}")
        run: Callable[[Ask], list[Result]] = module.run
        return module.run_behind_save(ask) if self.questions == _BOTH else run(ask)


_BOTH = ("save", "load")
FULL = (
    Item(_BOTH, "big", 7),
    Item(_BOTH, "small", 7),
    Item(_BOTH, "mixed", 3, ("orbax", "orbax-tuned", "torch-dcp", "raw-16")),  # all: 24 GiB
    Item(_BOTH, "huge", 3, ("orbax-tuned", "raw-16")),  # more of them do not fit into 24 GiB
    Item(_BOTH, "many", 1, ("orbax", "torch-dcp", "safetensors", "raw-2")),
    Item(("blocking",), "big", 7),
    Item(("blocking",), "leaves", 3, ("orbax", "orbax-v1", "bare-loop")),
    Item(("blocking",), "leaves8", 3, ("orbax", "orbax-v1", "bare-loop")),
    Item(("reuse",), "big", 7),
    Item(("behind",), "mini", 3),
    Item(("subset",), "big", 7),
    Item(("subset",), "mixed", 3, ("orbax-tuned",)),
    Item(("memory",), "big", 1),
    Item(("memory",), "huge", 1),
    Item(("verify",), "big", 7),
    Item(("scale",), "100000", 1),
    Item(("startup",), "tiny", 7),
    Item(("resume",), "mixed", 2),
    Item(("object_store",), "big", 1, ("orbax", "orbax-tuned")),
    Item(("object_store",), "small", 1, ("orbax",)),
    Item(("large",), "big8", 3),
)
QUICK = (
    Item(_BOTH, "mini", 3),
    Item(("blocking",), "mini", 3),
    Item(("reuse",), "tiny", 1),
    Item(("behind",), "tiny-gpt2", 1),
    Item(("subset",), "mini", 3),
    Item(("memory",), "mini", 1),
    Item(("verify",), "mini", 3),
    Item(("scale",), "10000", 1),
    Item(("startup",), "tiny", 3),
    Item(("resume",), "tiny-gpt2", 1),
    Item(("object_store",), "tiny", 1),
    Item(("large",), "mini", 1),
)
QUESTIONS = tuple(dict.fromkeys(q for item in FULL for q in item.questions))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small states and few rounds, minutes")
    parser.add_argument(
        "--only", type=_questions, default=QUESTIONS, metavar="NAME,NAME",
        help=f"some of: {', '.join(QUESTIONS)}",
    )  # fmt: skip
    parser.add_argument(
        "--states", type=lambda text: text.split(","), metavar="NAME,NAME",
        help="about some of these states only",
    )  # fmt: skip
    parser.add_argument(
        "--docs", action="store_true",
        help="run nothing: put the latest results into docs/performance.md",
    )  # fmt: skip
    _rounds.add_shared_options(parser)
    options = parser.parse_args(arguments)
    if options.docs:
        _docs.update(RESULTS / "latest.md")
        return
    items = [
        item
        for item in (QUICK if options.quick else FULL)
        if set(item.questions) & set(options.only)
        and (options.states is None or item.state in options.states)
    ]
    results = _all(items, options.dir, options.contenders)
    print(_text(results))
    _draw(results)


def _questions(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = sorted(set(names) - set(QUESTIONS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {unknown}; known: {', '.join(QUESTIONS)}")
    return names


def _all(items: Sequence[Item], where: str | None, names: tuple[str, ...] | None) -> list[Result]:
    results = _others(items)
    for item in items:
        began = time.monotonic()
        title = f"{' and '.join(item.questions)}, {item.state}"
        print(title, end=" ", file=sys.stderr, flush=True)
        results += item.run(where, names)
        print(f"{title}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        _write(results)
    return results


def _others(items: Sequence[Item]) -> list[Result]:
    """What earlier runs found about other questions and states."""
    latest = RESULTS / "latest.json"
    if not latest.exists():
        return []
    asked = {(question, item.state) for item in items for question in item.questions}
    questions = {question for question, _ in asked}

    def is_asked(result: Result) -> bool:
        state = result.case.partition(", ")[0]
        if state in _states.NAMES:
            return (result.question, state) in asked
        return result.question in questions  # of no state

    return [r for r in _results.from_json(latest.read_text()) if not is_asked(r)]


def _write(results: list[Result]) -> None:
    results.sort(key=lambda r: QUESTIONS.index(r.question))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "latest.json").write_text(_results.as_json(results) + "\n")
    (RESULTS / "latest.md").write_text(_text(results))


def _text(results: list[Result]) -> str:
    machine = _results.machine_text(_results.machine())
    return "\n".join([machine, "", _results.summary(results), "", _results.markdown(results)])


def _draw(results: list[Result]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no pictures", file=sys.stderr)
        return
    from benchmarks import _plots

    for path in _plots.draw(results, RESULTS):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
