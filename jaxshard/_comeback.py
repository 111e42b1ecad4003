"""The state that a training goes on with: of the newest sound step, or of a fresh run."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxshard import _arrays, _branching, _checkpoint, _iterators, _loading, _run, _trees
from jaxshard._errors import (
    CorruptionError,
    Kind,
    LeafMismatchError,
    NotCommittedError,
    NotFoundError,
    bullet_list,
)
from jaxshard._loading import LoadArguments
from jaxshard._match import dead_patterns
from jaxshard._options import LoadOptions
from jaxshard._reader import Checkpoint, open_checkpoint
from jaxshard._store import PathLike, Store
from jaxshard._writer import RunWriter

logger = logging.getLogger("jaxshard")

# Flags under which the same program gives other bits; a difference is worth a warning.
_EXACTNESS = ("jax", "jaxlib", "platform", "device_kind", "enable_x64", "threefry_partitionable",
              "default_prng_impl", "default_matmul_precision")  # fmt: skip


class Comeback:
    """Brings the state of a run back.

    Args:
      store: the directory of the run.
      writer: its writing side.
      init_from: where a fresh run begins; the first one that is there.
    """

    def __init__(self, store: Store, writer: RunWriter, init_from: Sequence[PathLike]) -> None:
        self._store = store
        self._writer = writer
        self._init_from = init_from

    def newest_sound(self, like: Any) -> tuple[Any, int] | None:
        """The state of the newest sound step, and its number; None if no step is there.

        Raises:
          CorruptionError: steps are there and none is sound.
        """
        began = time.monotonic()
        skipped: dict[str, str] = {}  # also where that cannot be written down
        parts = False  # whether some of them are thinned
        while steps := [d for d in self._look().branch if d.name not in skipped]:
            step_dir = steps[-1]
            try:
                checkpoint = open_checkpoint(self._store.child(step_dir.name).url)
                if checkpoint.thinned_to:
                    what = ", ".join(checkpoint.thinned_to)
                    skipped[step_dir.name] = f"only {what} is left of it"
                    parts = True
                    continue
                _warn_of_other_environment(checkpoint)
                state, nbytes = _load_onto(
                    checkpoint, like, LoadArguments(options=_OPTIONS), _CHANGED
                )
            except (CorruptionError, NotFoundError, NotCommittedError) as e:
                url = self._store.child(step_dir.name).url
                why = str(e).splitlines()[0].removeprefix(f"{url}: ")
                logger.warning("step %d is damaged and is skipped: %s", step_dir.step, e)
                skipped[step_dir.name] = why
                self._writer.fall_back(step_dir, why)
                continue
            if parts:
                self._writer.leave_behind(step_dir)
            self._writer.resumed_from(checkpoint)
            seconds = time.monotonic() - began
            self._writer.ledger.add("resume", step=step_dir.step, seconds=seconds, nbytes=nbytes)
            logger.info("resumed %s at step %d", self._store.url, step_dir.step)
            return state, step_dir.step
        self._require_nothing_there(skipped)
        return None

    def _look(self) -> _branching.Look:
        return _branching.look(self._store)

    def _require_nothing_there(self, skipped: Mapping[str, str]) -> None:
        """A run whose steps all do not count is never begun anew."""
        others = {**skipped, **self._look().others}
        if others:
            lines = tuple(f"{name}: {why}" for name, why in sorted(others.items()))
            title = f"{self._store.url}: none of {len(lines)} committed steps is sound:"
            raise CorruptionError(
                bullet_list(title, lines),
                kind=Kind.NOTHING_SOUND,
                path=self._store.url,
                hint="restore the run from a copy, or begin a new one in another directory; "
                f"`jaxshard undo {self._store.url}` takes back the last mark or rollback",
            )

    # A fresh run

    def fresh(
        self, like: Any, init: Callable[[], Any] | None, mapping: Mapping[str, str] | None
    ) -> Any:
        """The state of a fresh run; see `ResumeManager.resume`."""
        if not self._init_from:
            if mapping is not None:
                raise ValueError(
                    f"{self._store.url}: mapping= says what to take from init_from=, which is not "
                    "given\nhint: ResumeManager(root, init_from=[another_run])"
                )
            state = self._made(like, init)
            self._writer.ledger.add("fresh")
            return state
        checkpoint = self._where_to_begin()
        arguments = LoadArguments(options=_OPTIONS)
        if mapping is not None:
            like = self._made(like, init)
            _require_alive(mapping, checkpoint, like)
            arguments = LoadArguments(
                options=_OPTIONS, rename=mapping, select=list(mapping.values()), only_renamed=True
            )
        state, nbytes = _load_onto(checkpoint, like, arguments, _MAPPED)
        self._writer.ledger.add(
            "fresh",
            init_from=checkpoint.path,
            init_step=checkpoint.step,
            mapping=None if mapping is None else dict(mapping),
            nbytes=nbytes,
        )
        logger.info("%s begins with the state of %s", self._store.url, checkpoint.path)
        return state

    def _made(self, like: Any, init: Callable[[], Any] | None) -> Any:
        if init is not None:
            return init()
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(like)):
            raise ValueError(
                f"{self._store.url}: nothing to resume, and `like` is abstract\n"
                "hint: resume(like, init=make_state) makes the state of a fresh run"
            )
        return like

    def _where_to_begin(self) -> Checkpoint:
        lines = []
        for path in self._init_from:
            try:
                found = _run.open(path)
                return found.open() if isinstance(found, _run.Run) else found
            except (NotFoundError, NotCommittedError) as e:
                lines.append(f"{str(e).splitlines()[0]} ({e.hint})")
        raise NotFoundError(
            bullet_list(f"{self._store.url}: nothing of init_from is there:", tuple(lines)),
            path=self._store.url,
            hint="init_from= names runs or checkpoints; without it a fresh run begins with `like`",
        )


_OPTIONS = LoadOptions(donatable=True, release_like=True)
_CHANGED = (
    "for a changed model or optimizer begin another run, with init_from={run} and "
    "resume(state, mapping={{'params/**': 'params/**'}}), or whatever still fits; "
    "or use jaxshard.load({path}, state, …) with {ways}"
)
_MAPPED = (
    "resume(state, mapping={{saved: wanted}}) says what to take; `jaxshard show` has the names"
)


def _require_alive(mapping: Mapping[str, str], checkpoint: Checkpoint, like: Any) -> None:
    """Every pattern of a mapping matches something, on its side.

    Raises:
      LeafMismatchError: names those that do not.
    """
    wanted = [leaf.name for leaf in _trees.flatten(like, abstract=True).spec.leaves]
    problems = [
        line.replace("select ", "mapping ", 1)
        for patterns, names, of in (
            (list(mapping), list(checkpoint), "of what was saved"),
            (list(mapping.values()), wanted, "of the state"),
        )
        for line in dead_patterns(patterns, names, of=of)
    ]
    if problems:
        raise LeafMismatchError(
            bullet_list(f"{checkpoint.path}: what is to be taken from it:", tuple(problems)),
            mismatches=tuple(problems),
            hint="mapping={'saved/names/**': 'names/in/state/**'}; `jaxshard show` has the names",
            path=checkpoint.path,
            step=checkpoint.step,
        )


def _load_onto(
    checkpoint: Checkpoint, like: Any, arguments: LoadArguments, hint: str
) -> tuple[Any, int]:
    """The state, and how many bytes were read; NNX objects are updated in place.

    Args:
      checkpoint: open.
      like: what to load onto.
      arguments: of the load.
      hint: for a mismatch; `{ways}` are the arguments of `jaxshard.load` that would help.
    """
    try:
        state, report = _loading.load_tree(checkpoint, like, arguments, in_place=True)
    except LeafMismatchError as e:
        if e.hint == _iterators.HINT:  # all else fits
            raise
        raise LeafMismatchError(
            str(e).removesuffix(f"\nhint: {e.hint}").replace("rename gives", "mapping gives"),
            mismatches=e.mismatches,
            hint=hint.format(
                path=repr(checkpoint.path),
                run=repr(checkpoint.path.rpartition("/")[0]),
                ways=str(e.hint).rpartition(": ")[2],
            ),
            path=e.path,
            step=e.step,
        ) from None
    _checkpoint.log_loaded(report)
    return state, report.bytes_read


def _warn_of_other_environment(checkpoint: Checkpoint) -> None:
    now = _arrays.environment()
    then = checkpoint.environment
    differ = [
        f"{k} was {then[k]}, is {now[k]}" for k in _EXACTNESS if k in then and then[k] != now[k]
    ]
    if differ:
        logger.warning(
            "%s: restored bits are exact, further steps may not be: %s",
            checkpoint.path,
            "; ".join(differ),
        )
