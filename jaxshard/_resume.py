"""`ResumeManager`: a training loop that can be killed at any moment."""

import logging
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import jax
import numpy as np

from jaxshard import _arrays, _checkpoint, _loading, _run, _saving
from jaxshard._checkpoint import PendingSave
from jaxshard._errors import (
    ConflictError,
    CorruptionError,
    JaxshardError,
    Kind,
    NotCommittedError,
    NotFoundError,
    StorageError,
    bullet_list,
)
from jaxshard._options import LoadOptions, SaveOptions
from jaxshard._policy import Every, Keep, SavedStep, SavePolicy
from jaxshard._reader import (
    Checkpoint,
    StepDir,
    committed_versions,
    newest_versions,
    open_checkpoint,
)
from jaxshard._store import PathLike, open_store, storage_errors

logger = logging.getLogger("jaxshard")

_FAILURES_MAX = 3
# Flags under which the same program gives other bits; a difference is worth a warning.
_EXACTNESS = ("jax", "jaxlib", "platform", "device_kind", "enable_x64", "threefry_partitionable",
              "default_prng_impl", "default_matmul_precision")  # fmt: skip


class ResumeManager:
    """Saves a run as it goes, and brings it back exactly.

    `step` is the number of *completed* updates, everywhere: `step_00000100` holds the state after
    100 updates, and after a resume from it the next update to run is number 101.

    Args:
      root: directory of the run; made if it does not exist.
      when: `(step, clock_s, history) -> bool`, asked by `maybe_save`; see `Every`.
      keep: which steps to keep; see `Keep`.
      when_busy: what `maybe_save` does while the last save is still running: `"skip"` this one
        with a warning, or `"wait"`.
      on_save_error: `"warn"` logs a failed save and lets training go on (three in a row are
        raised); `"raise"` raises it at the next call.
      options: see `SaveOptions`.

    Raises:
      ConflictError: `root` is a checkpoint.
      DisagreementError: more than one process.

    Example:
      >>> import jax, jax.numpy as jnp, jaxshard
      >>> def train(total):
      ...     every_5 = jaxshard.Every(steps=5)
      ...     with jaxshard.ResumeManager("memory://doc/resume", when=every_5) as run:
      ...         state, begin = run.resume({"w": jnp.zeros(()), "rng": jax.random.key(0)})
      ...         for step in run.steps(total):
      ...             state = {**state, "w": state["w"] + 1}
      ...             run.maybe_save(step, state, metrics={"w": state["w"]})
      ...     return begin, float(state["w"])
      >>> train(7)
      (0, 7.0)
      >>> train(10)
      (7, 10.0)
    """

    def __init__(
        self,
        root: PathLike,
        *,
        when: SavePolicy = Every(steps=500),
        keep: Keep = Keep(last=3),
        when_busy: Literal["skip", "wait"] = "skip",
        on_save_error: Literal["warn", "raise"] = "warn",
        options: SaveOptions = SaveOptions(),
    ) -> None:
        _saving.require_one_process()
        if when_busy not in ("skip", "wait") or on_save_error not in ("warn", "raise"):
            raise ValueError(
                f"ResumeManager: when_busy={when_busy!r}, on_save_error={on_save_error!r}\n"
                'hint: when_busy is "skip" or "wait", on_save_error is "warn" or "raise"'
            )
        self._store = open_store(root)
        _run.start(self._store)
        self.path = self._store.url
        self._when = when
        self._keep = keep
        self._when_busy = when_busy
        self._on_save_error = on_save_error
        self._options = options
        self._bad: dict[str, str] = {}  # directories that were found damaged, and how
        self._pending: PendingSave | None = None
        self._failures = 0
        self._history: list[SavedStep] = []
        newest = self.latest_step()
        self._position = 0  # updates that the state has behind it; steps() goes on from here
        self._last = -1 if newest is None else newest  # newest step that was saved
        self._resumed = newest is None  # there is nothing to resume
        self._total: int | None = None
        self._closed = False

    # Coming back

    def resume(self, like: Any, *, init: Callable[[], Any] | None = None) -> tuple[Any, int]:
        """Bring back the newest sound step, or begin a fresh run.

        Every leaf goes to the sharding that it has in `like`, on whatever mesh that is. The memory
        of `like` is released leaf by leaf as its replacement arrives, so that two states never lie
        side by side: use the returned state. NNX objects are updated in place (after everything
        has been read and verified) and are returned themselves; other nodes come back new.

        A damaged step is skipped with a warning, and the next older one is taken.

        Args:
          like: the state itself; or an abstract one (`jax.ShapeDtypeStruct`s with shardings,
            `nnx.eval_shape`) together with `init`.
          init: makes the state of a fresh run; is not called when there is something to resume.

        Returns:
          The state, and the number of updates that it has behind it (0 on a fresh run).

        Raises:
          LeafMismatchError: `like` is not what was saved; lists every difference. Nothing was read.
          CorruptionError: steps are there and none is sound (kind `nothing-sound`).
          StorageError: the store failed; try again.
        """
        self._require_open()
        self.wait_until_finished()
        for step_dir in reversed(self._sound()):
            try:
                state = self._load_onto(step_dir, like)
            except (CorruptionError, NotFoundError, NotCommittedError) as e:
                url = self._store.child(step_dir.name).url
                self._bad[step_dir.name] = str(e).splitlines()[0].removeprefix(f"{url}: ")
                logger.warning("step %d is damaged and is skipped: %s", step_dir.step, e)
                continue
            self._position = self._last = step_dir.step
            self._resumed = True
            logger.info("resumed %s at step %d", self.path, step_dir.step)
            return state, step_dir.step
        if self._bad:
            lines = tuple(f"{name}: {why}" for name, why in self._bad.items())
            title = f"{self.path}: none of {len(lines)} committed steps is sound:"
            raise CorruptionError(
                bullet_list(title, lines),
                kind=Kind.NOTHING_SOUND,
                path=self.path,
                hint="restore the run from a copy, or begin a new one in another directory",
            )
        self._last = -1
        return self._fresh(like, init), 0

    def _load_onto(self, step_dir: StepDir, like: Any) -> Any:
        checkpoint = open_checkpoint(self._store.child(step_dir.name).url)
        _warn_of_other_environment(checkpoint)
        options = LoadOptions(donatable=True, release_like=True)
        request = _loading.LoadArguments(options=options)
        state, report = _loading.load_tree(checkpoint, like, request, in_place=True)
        _checkpoint.log_loaded(report)
        return state

    def _fresh(self, like: Any, init: Callable[[], Any] | None) -> Any:
        if init is not None:
            return init()
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(like)):
            raise ValueError(
                f"{self.path}: nothing to resume, and `like` is abstract\n"
                "hint: resume(like, init=make_state) makes the state of a fresh run"
            )
        return like

    def steps(self, total: int) -> Iterator[int]:
        """The updates that are still to run: `for step in run.steps(total)`.

        Args:
          total: the last one; `maybe_save` always saves after it, and waits.

        Returns:
          The number of the next update to run, from 1; after a resume at step n, from n + 1.

        Raises:
          ConflictError: the run has steps and was not resumed: the state would be a fresh one.
        """
        if not self._resumed:
            raise ConflictError(
                f"{self.path}: expected resume() before steps(): step {self._last} is there",
                kind=Kind.STEP_ORDER,
                path=self.path,
                step=self._last,
                hint="state, _ = run.resume(state)",
            )
        self._total = total
        return iter(range(self._position + 1, total + 1))

    # Saving

    def maybe_save(
        self, step: int, state: Any, *, metrics: Mapping[str, Any] | None = None
    ) -> PendingSave | None:
        """Save in the background if the policy says so; at the last step always, and wait.

        Args:
          step: updates that `state` has behind it; larger than at the last save.
          state: any pytree; may be donated right after the call.
          metrics: numbers to keep with the step; device scalars are fetched only if it is saved.

        Returns:
          The save, or None if none was begun.

        Raises:
          ConflictError: `step` is not larger than that of the last save or resume.
          TypeError: `step` is no integer.
          UnsupportedLeafError: the state holds what cannot be stored.
          StorageError: three saves in a row failed; or the last one, at `total`, did.
        """
        step = _step_number(step)
        self._require_open()
        self._collect()
        if self._total is not None and step >= self._total:
            return self.save(step, state, metrics=metrics, wait=True)
        if not self._when(step, time.monotonic(), tuple(self._history)):
            self._require_larger(step)
            return None
        if self._pending is not None and self._when_busy == "skip":
            logger.warning(
                "step %d is not saved: the save of step %s is still running",
                step,
                self._pending.step,
            )
            return None
        return self.save(step, state, metrics=metrics)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> PendingSave:
        """Save in the background, whatever the policy says; waits for an earlier save first.

        Args:
          step: as for `maybe_save`.
          state: as for `maybe_save`.
          metrics: as for `maybe_save`.
          wait: return when the step is committed; an error is raised here.

        Raises:
          ConflictError: as for `maybe_save`.
          UnsupportedLeafError: as for `maybe_save`.
          StorageError: three saves in a row failed; with `wait`, this one did.
        """
        step = _step_number(step)
        self._require_open()
        self._require_larger(step)
        if not self._resumed:
            self._resumed = True  # said once
            logger.warning(
                "%s has step %d, and step %d is saved without resume(): is its state a fresh one?",
                self.path,
                self._last,
                step,
            )
        self.wait_until_finished()
        with storage_errors("listing", self.path):
            step_dir = _run.next_dir(self._store, step)
        metadata = {} if metrics is None else {"metrics": _plain_metrics(metrics)}
        pending = _checkpoint.save_step_async(
            self._store.child(step_dir.name),
            state,
            step,
            metadata,
            self._options,
            then=lambda: self._tidy(step_dir),
            owned=True,
        )
        if not wait:
            self._pending = pending
            return pending
        error = self._note(pending)
        if error is not None:
            raise error
        return pending

    def _require_larger(self, step: int) -> None:
        running = -1 if self._pending is None else self._pending.step or 0
        last = max(self._last, running)
        if step <= last:
            raise ConflictError(
                f"{self.path}: expected a step larger than {last}, found {step}",
                kind=Kind.STEP_ORDER,
                path=self.path,
                step=step,
                hint="resume() first; step counts completed updates, as run.steps(total) does",
            )

    def _tidy(self, step_dir: StepDir) -> None:
        """Behind a save, in its thread: delete what is not kept; failing at it fails no save."""
        try:
            gone = _run.tidy(self._store, step_dir, self._keep, set(self._bad))
        except (OSError, JaxshardError) as e:
            logger.warning("deleting old steps of %s failed, will be tried again: %s", self.path, e)
            return
        if gone:
            logger.info("pruned %s: %s", self.path, ", ".join(gone))

    def _collect(self) -> None:
        """Take note of a save that has ended."""
        if self._pending is not None and self._pending.done():
            pending, self._pending = self._pending, None
            self._count(pending)

    def _note(self, pending: PendingSave) -> BaseException | None:
        """Wait for a save, remember how it ended, and return its error."""
        error = pending.outcome()
        if error is None:
            self._failures = 0
            self._last = max(self._last, pending.step or 0)
            self._history.append(SavedStep(pending.step or 0, time.monotonic()))
        else:
            self._failures += 1
        return error

    def _count(self, pending: PendingSave) -> None:
        error = self._note(pending)
        if error is None or pending.told:
            return
        if self._on_save_error == "raise" or not isinstance(error, JaxshardError):
            raise error
        if self._failures >= _FAILURES_MAX:
            raise StorageError(
                f"{self.path}: {self._failures} saves in a row failed, the last of step "
                f"{pending.step}: {error}",
                kind=Kind.SAVES_FAIL,
                path=self.path,
                step=pending.step,
                hint="look at the store; earlier steps are untouched",
            ) from error
        logger.warning("step %s was not saved, training goes on: %s", pending.step, error)

    def wait_until_finished(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
          StorageError: as for `maybe_save`.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._count(pending)

    # Looking

    def _sound(self) -> list[StepDir]:
        with storage_errors("listing", self.path):
            found = committed_versions(self._store)
        return newest_versions(d for d in found if d.name not in self._bad)

    def all_steps(self) -> list[int]:
        """Committed steps that were not found damaged, rising."""
        return [d.step for d in self._sound()]

    def latest_step(self) -> int | None:
        """The newest committed step that was not found damaged; never one whose save failed."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def load(self, step: int, like: Any = None, **options: Any) -> Any:
        """Load one committed step; see `jaxshard.load` for `like` and the other arguments.

        Raises:
          NotFoundError: no such step was committed.
        """
        step_dir = _run.find_step(self._sound(), step, self.path)
        return _checkpoint.load(self._store.child(step_dir.name).url, like, **options)

    # Ending

    def close(self) -> None:
        """Wait for the save in the background; nothing can be saved afterwards.

        Raises:
          StorageError: as for `maybe_save`.
        """
        self._closed = True
        self.wait_until_finished()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path}: this ResumeManager is closed\nhint: make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except JaxshardError as failed:
            if error is None:
                raise
            error.add_note(f"while this was raised, a save failed too: {failed}")

    def __repr__(self) -> str:
        return f"<ResumeManager {self.path!r}, steps {self.all_steps()}>"


def _step_number(step: Any) -> int:
    """A step as a Python int: any integer will do, also a 0-d array; a bool or float will not."""
    try:
        if isinstance(step, (bool, np.bool_)):
            raise TypeError  # noqa: TRY301
        return operator.index(step)
    except TypeError as e:
        raise TypeError(
            f"expected step to be an integer, the number of completed updates, found {step!r}\n"
            "hint: for step in run.steps(total) gives it"
        ) from e


def _plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
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
