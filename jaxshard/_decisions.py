"""Decisions about the steps of a run: numbered files, never edited; their fold is what holds.

`decisions/00000017.json` is created once, whoever is faster gets the number; nothing is ever taken
back but by another decision. Steps are named by their directories, so that a step that is written
again is not meant.
"""

import datetime
import enum
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxshard._errors import CorruptionError, FormatError, Kind
from jaxshard._identity import Identity
from jaxshard._manifest import canonical
from jaxshard._store import Store

DIR = "decisions"


class Verdict(enum.StrEnum):
    """Ways to decide."""

    PROTECT = "protect"  # never deleted
    UNPROTECT = "unprotect"
    MARK_BAD = "mark-bad"  # not resumed from
    FALLBACK = "fallback"  # the same, since it was found damaged
    ROLLBACK = "rollback"  # go on from an earlier step; `names` are set aside
    UNDO = "undo"  # decision number `of` never was; `names` are set aside


class Decision(NamedTuple):
    """One of them.

    Attributes:
      number: they are counted from 1.
      verdict: what it does.
      step: the step meant.
      names: directories of the steps meant.
      why: in words.
      skip_batches: how many batches of data are left out, of a rollback.
      of: number of the decision that is undone.
      at: UTC, ISO 8601.
      by: host and process.
    """

    number: int
    verdict: Verdict
    step: int | None = None
    names: tuple[str, ...] = ()
    why: str = ""
    skip_batches: int = 0
    of: int | None = None
    at: str = ""
    by: str = ""


class Standing(NamedTuple):
    """What holds after all decisions.

    Attributes:
      protected: directories of steps that are never deleted.
      bad: those that are not resumed from, and why.
      marked: those of them that somebody has marked; the others were found damaged.
      aside: those that lie on a branch that was left.
      skip_batches: what the last rollback that holds said, and the step that it went back to.
    """

    protected: frozenset[str] = frozenset()
    bad: Mapping[str, str] = MappingProxyType({})
    marked: frozenset[str] = frozenset()
    aside: frozenset[str] = frozenset()
    skip_batches: tuple[int, int] | None = None

    def counts(self, name: str) -> bool:
        """Whether a directory of a step is on the branch that goes on, and not bad."""
        return name not in self.bad and name not in self.aside


def read(store: Store) -> list[Decision]:
    """All decisions of a run, in their order.

    Raises:
      CorruptionError: a file is cut or changed.
      FormatError: a file is not one of ours, or of a newer version.
    """
    names = sorted(n for n in store.child(DIR).entries() if n.removesuffix(".json").isdecimal())
    return [_parse(f"{store.url}/{DIR}/{name}", store.read(f"{DIR}/{name}")) for name in names]


def _parse(file: str, raw: bytes) -> Decision:
    try:
        body = json.loads(raw)
        return Decision(
            number=int(body["number"]),
            verdict=Verdict(body["verdict"]),
            step=body["step"],
            names=tuple(map(str, body["names"])),
            why=str(body["why"]),
            skip_batches=int(body["skip_batches"]),
            of=body["of"],
            at=str(body["at"]),
            by=str(body["by"]),
        )
    except json.JSONDecodeError as e:
        raise CorruptionError(
            f"{file}: expected a decision about a run: {e}",
            kind=Kind.DECISION_DAMAGED,
            path=file,
            hint="restore it from a copy; without it, what it decided does not hold",
        ) from e
    except (ValueError, KeyError, TypeError) as e:
        raise FormatError(
            f"{file}: expected a decision about a run: {e!r}",
            path=file,
            hint="written by a newer version? pip install --upgrade jaxshard",
        ) from e


def add(store: Store, verdict: Verdict, **fields: Any) -> Decision:
    """Decide; the number is the next free one."""
    store.make_dirs([DIR])
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    by = str(Identity.of_this_process())
    while True:
        number = max((d.number for d in read(store)), default=0) + 1
        decision = Decision(number, verdict, **fields, at=at, by=by)
        data = canonical(decision._asdict()) + b"\n"
        if store.create(f"{DIR}/{number:08d}.json", data):
            return decision


def fold(decisions: Iterable[Decision]) -> Standing:
    """What holds after these decisions."""
    made = list(decisions)
    undone = {d.of for d in made if d.verdict is Verdict.UNDO}
    protected: set[str] = set()
    bad: dict[str, str] = {}
    marked: set[str] = set()
    aside: set[str] = set()
    skip_batches = None
    for decision in made:
        if decision.number in undone:
            continue
        match decision.verdict:
            case Verdict.PROTECT:
                protected |= set(decision.names)
            case Verdict.UNPROTECT:
                protected -= set(decision.names)
            case Verdict.MARK_BAD | Verdict.FALLBACK:
                bad |= dict.fromkeys(decision.names, decision.why)
                marked |= set(decision.names if decision.verdict is Verdict.MARK_BAD else ())
            case Verdict.ROLLBACK:
                aside |= set(decision.names)
                skip_batches = (decision.step or 0, decision.skip_batches)
            case Verdict.UNDO:
                aside |= set(decision.names)
    return Standing(frozenset(protected), bad, frozenset(marked), frozenset(aside), skip_batches)


def last_to_undo(decisions: Iterable[Decision]) -> Decision | None:
    """The newest decision that still holds and is no undo itself."""
    made = list(decisions)
    undone = {d.of for d in made if d.verdict is Verdict.UNDO}
    holding = [d for d in made if d.number not in undone and d.verdict is not Verdict.UNDO]
    return holding[-1] if holding else None
