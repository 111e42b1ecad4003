"""What `Keep` says of the steps of a run: with their times, metrics, and what was decided."""

import dataclasses
import datetime
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxshard import _ledger, _steps
from jaxshard._branching import Look
from jaxshard._errors import CorruptionError, FormatError, NotCommittedError, NotFoundError
from jaxshard._keep import Keep, KeptStep
from jaxshard._match import as_patterns
from jaxshard._reader import Checkpoint, open_checkpoint
from jaxshard._steps import StepDir
from jaxshard._store import Store

logger = logging.getLogger("jaxshard")


class _Facts(NamedTuple):
    """What a manifest says that matters for what is kept."""

    saved_s: float
    metrics: Mapping[str, float]


class Keeper:
    """Asks a `Keep` about the steps of a run.

    Manifests are read once, and only where a rule needs what they hold.
    """

    def __init__(self, store: Store, keep: Keep) -> None:
        self._store = store
        self._keep = keep
        self._facts: dict[str, _Facts] = {}
        self._unreadable: set[str] = set()
        events = _ledger.read(store)
        self._recorded = _ledger.metrics(events)
        self._thinned = _ledger.thinned(events)  # or not to be tried again

    def record(self, step_dir: StepDir, metrics: Mapping[str, Any]) -> None:
        """Metrics of a step that came after it was saved."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._recorded.setdefault(step_dir.name, {}).update(numbers)

    def kept(self, now: Look) -> set[str]:
        """Names of the steps that stay.

        So that decisions can be undone, those that are bad stay as long as if they were not, and
        those set aside until training has gone on beyond all of them. What cannot be looked into
        stays.
        """
        branch = now.branch
        kept = {d.name for d in now.committed if d.name in now.standing.protected}
        aside = [d for d in now.committed if d.name in now.standing.aside]
        if not branch or self._keep.keeps_all or any(d.step >= branch[-1].step for d in aside):
            kept |= {d.name for d in aside}
        bad = [d for d in now.committed if d.name in now.standing.bad and d not in aside]
        for steps in (branch, _steps.newest_versions([*branch, *bad])):
            known = {d: self._kept_step(d, now) for d in steps}
            numbers = self._keep.kept(one for one in known.values() if one is not None)
            kept |= {d.name for d, one in known.items() if one is None or d.step in numbers}
        return kept

    def thinned(self, now: Look) -> list[StepDir]:
        """The steps of which only a part is to stay, and more may be there."""
        known = {d: self._kept_step(d, now) for d in now.branch}
        numbers = self._keep.thinned(one for one in known.values() if one is not None)
        wanted = [d for d, one in known.items() if one is not None and d.step in numbers]
        return [d for d in wanted if d.name not in self._thinned]

    def was_thinned(self, step_dir: StepDir) -> None:
        """It was, or cannot be."""
        self._thinned.add(step_dir.name)

    def thin_none(self) -> None:
        """There is nothing that `thin_to` would leave of any step."""
        self._keep = dataclasses.replace(self._keep, thin_to=None, full_last=None)

    @property
    def thin_to(self) -> list[str]:
        """Patterns of what stays of them."""
        return as_patterns(self._keep.thin_to) or []

    def _kept_step(self, step_dir: StepDir, now: Look) -> KeptStep | None:
        """What a rule has to know of a step; None if it is not to be read."""
        protected = step_dir.name in now.standing.protected
        if not self._keep.looks_inside:
            return KeptStep(step_dir.step, protected=protected)
        facts = self._facts.get(step_dir.name)
        if facts is None:
            if step_dir.name in self._unreadable:
                return None
            try:
                checkpoint = open_checkpoint(self._store.child(step_dir.name).url)
            except (NotFoundError, NotCommittedError):  # deleted just now
                return None
            except (CorruptionError, FormatError) as e:
                self._unreadable.add(step_dir.name)
                logger.warning("step %d stays, since it cannot be read: %s", step_dir.step, e)
                return None
            facts = self._facts[step_dir.name] = _facts(checkpoint)
        recorded = self._recorded.get(step_dir.name, {})
        return KeptStep(step_dir.step, facts.saved_s, {**facts.metrics, **recorded}, protected)

    def best_step(self, now: Look) -> int | None:
        """The best step that counts; None if none has the metric."""
        if self._keep.metric is None:
            raise ValueError(
                f"{self._store.url}: expected a metric in Keep, found none\n"
                'hint: keep=Keep(last=3, best=1, metric="loss")'
            )
        known = (self._kept_step(d, now) for d in now.branch)
        ranked = self._keep.ranked(one for one in known if one is not None)
        return ranked[0].step if ranked else None


def _facts(checkpoint: Checkpoint) -> _Facts:
    saved = datetime.datetime.fromisoformat(checkpoint.created).timestamp()
    return _Facts(saved, metrics_of(checkpoint))


def metrics_of(checkpoint: Checkpoint) -> dict[str, float]:
    """The metrics that a step was saved with; what JSON lacks is kept as a string."""
    found = checkpoint.metadata.get("metrics", {})
    return {name: float(value) for name, value in found.items()}


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON: floats; those that JSON lacks as strings."""
    plain = {}
    for name, value in metrics.items():
        try:
            plain[str(name)] = float(value)
        except (TypeError, ValueError) as e:
            raise TypeError(
                f"metrics: expected {name!r} to be a number, found {type(value).__name__}\n"
                "hint: reduce it first, for example with jnp.mean"
            ) from e
    return {n: v if math.isfinite(v) else str(v) for n, v in plain.items()}
