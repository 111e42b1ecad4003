"""`ResumeManager`: a training loop that can be killed at any moment."""

import contextlib
import dataclasses
import logging
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from jaxshard import _branching, _checkpoint, _epochs, _saving
from jaxshard._branching import find_step
from jaxshard._comeback import Comeback
from jaxshard._errors import (
    ConflictError,
    JaxshardError,
    Kind,
)
from jaxshard._keep import Keep
from jaxshard._keeping import plain_metrics
from jaxshard._ledger import Hook
from jaxshard._options import SaveOptions
from jaxshard._patterns import check_patterns
from jaxshard._pending import PendingSave
from jaxshard._policy import Every, SavePolicy
from jaxshard._saves import Saves
from jaxshard._steps import StepDir
from jaxshard._stopping import EXIT_CODE, StopRequest
from jaxshard._store import PathLike, open_store
from jaxshard._writer import RunWriter

logger = logging.getLogger("jaxshard")


class ResumeManager:
    """Saves a run as it goes, and brings it back exactly.

    `step` is the number of *completed* updates, everywhere: `step_00000100` holds the state after
    100 updates, and after a resume from it the next update to run is number 101.

    One job at a time writes to a run. A second one is refused with the host and process of the
    first; one that was killed on this machine is known to be dead at once, one on another machine
    when it gave no sign of life for `lease_s`. A job that was taken over commits nothing any more.

    Args:
      root: directory of the run; made if it does not exist.
      when: `(step, clock_s, history) -> bool`, asked by `maybe_save`; see `Every`, `YoungDaly`.
      keep: which steps to keep; see `Keep`.
      when_busy: what `maybe_save` does while the last save is still running: `"skip"` this one
        with a warning, or `"wait"`.
      on_save_error: `"warn"` logs a failed save and lets training go on (three in a row are
        raised); `"raise"` raises it at the next call.
      signals: that ask the job to stop: the next `maybe_save` saves, waits, and ends `steps`.
        Handlers that were there before are called too. Only on the main thread.
      deadline_s: seconds from now until the job will be killed: it stops as by a signal while
        there is time for one more step and a save. None asks Slurm, if that runs the job.
      grace_s: how long the save of a job that stops may take, in seconds; None for as long as it
        needs.
      lease_s: how long another job may give no sign of life until it is taken for dead, in seconds.
      takeover: begin at once, even beside a job that is alive.
      frozen: patterns of leaves that training never changes, as in `select`. Files of a leaf that
        equals that of the step before are shared with it in any case; these are not even copied
        from their device for a look at them.
      reuse_max: after how many steps that have shared a file it is written anew, so that one bad
        sector cannot spoil all; 0 shares none. With `Keep(last=3)` most of the time all that are
        kept share one file; `reuse_max=1` keeps two of it.
      init_from: where a fresh run begins: a run (its newest step) or a checkpoint; of several the
        first one that is there. Not looked at when there is something to resume. See `resume` for
        taking a part.
      on_event: called with a mapping for each event of the ledger, on the thread where it happens;
        or several of them. See `jaxshard.monitoring`.
      options: see `SaveOptions`.

    Raises:
      ConflictError: `root` is a checkpoint; or another job is writing to it (kind
        `second-writer`).
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
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGUSR2"),
        deadline_s: float | None = None,
        grace_s: float | None = None,
        lease_s: float = 60.0,
        takeover: bool = False,
        frozen: str | Iterable[str] = (),
        reuse_max: int = 20,
        init_from: PathLike | Sequence[PathLike] | None = None,
        on_event: Hook | Sequence[Hook] | None = None,
        options: SaveOptions = SaveOptions(),
    ) -> None:
        _saving.require_one_process()
        if when_busy not in ("skip", "wait") or on_save_error not in ("warn", "raise"):
            raise ValueError(
                f"ResumeManager: when_busy={when_busy!r}, on_save_error={on_save_error!r}\n"
                'hint: when_busy is "skip" or "wait", on_save_error is "warn" or "raise"'
            )
        if not lease_s > 0 or not (grace_s is None or grace_s > 0):
            raise ValueError(
                f"ResumeManager: lease_s={lease_s}, grace_s={grace_s}: expected more than 0\n"
                "hint: lease_s=60"
            )
        if reuse_max < 0:
            raise ValueError(
                f"ResumeManager: reuse_max must be 0 or more: {reuse_max}\nhint: reuse_max=20"
            )
        frozen = check_patterns(frozen)
        in_drill = os.environ.get(_epochs.DRILL_ROOT)
        if in_drill:  # see `jaxshard drill`
            root, lease_s = in_drill, min(lease_s, _epochs.DRILL_LEASE_S)
        self._store = open_store(root)
        self.path = self._store.url
        _close_earlier(self.path)
        self._stop = StopRequest(signals, deadline_s)
        self._when = when
        self._when_busy = when_busy
        self._grace_s = grace_s
        self._options = options
        self._position = 0  # updates that the state has behind it; steps() goes on from here
        self._resumes = 0  # how often the state came from resume(), so that steps() notices
        self._at_resume: int | None = None  # `_resumes` when steps() gave the step that goes on
        self._total: int | None = None
        self._stopped: str | None = None
        self._going = False  # a step was made since the state came from resume()
        self._closed = False
        self._pid = os.getpid()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stop.close)
            self._writer = RunWriter(
                self._store,
                keep,
                frozen=frozen,
                reuse_max=reuse_max,
                lease_s=lease_s,
                takeover=takeover,
                hooks=_hooks(on_event),
            )
            undo.callback(self._writer.epoch.end)
            self._comeback = Comeback(self._store, self._writer, _paths(init_from))
            self._saves = Saves(self._store, self._writer, on_save_error)
            there = _branching.look(self._store)
            undo.pop_all()
        self._saves.last = there.branch[-1].step if there.branch else -1
        # "no": the run has steps; "must": so that it even refuses to save.
        fresh = not (there.committed or there.late)
        self._resumed: Literal["yes", "no", "must"] = "yes" if fresh else "no"
        # Also where nobody calls close().
        self._release = weakref.finalize(
            self, _release, self._saves, self._writer, self._stop, os.getpid()
        )
        _managers[self.path] = self

    # Coming back

    def resume(
        self,
        like: Any,
        *,
        init: Callable[[], Any] | None = None,
        mapping: Mapping[str, str] | None = None,
    ) -> tuple[Any, int]:
        """Bring back the newest sound step, or begin a fresh run.

        Every leaf goes to the sharding that it has in `like`, on whatever mesh that is. The memory
        of `like` is released leaf by leaf as its replacement arrives, so that two states never lie
        side by side: use the returned state. NNX objects are updated in place (after everything
        has been read and verified) and are returned themselves; other nodes come back new.

        A damaged step is skipped with a warning, and the next older one is taken; that is written
        down, so that the next start does not try it again (`undo` takes it back).

        Args:
          like: the state itself; or an abstract one (`jax.ShapeDtypeStruct`s with shardings,
            `nnx.eval_shape`) together with `init`.
          init: makes the state of a fresh run; is not called when there is something to resume.
          mapping: `{saved: wanted}` patterns: what to take from `init_from`; all other leaves are
            those of `like`, or of `init()`. None takes the whole state, which must be the same.

        Returns:
          The state, and the number of updates that it has behind it (0 on a fresh run).

        Raises:
          LeafMismatchError: `like` is not what was saved; lists every difference. Nothing was read.
          CorruptionError: steps are there and none is sound (kind `nothing-sound`); or what
            `init_from` names is damaged.
          NotFoundError: a fresh run, and nothing of `init_from` is there.
          StorageError: the store failed; try again.
        """
        self._require_open()
        if mapping is not None and not isinstance(mapping, Mapping):
            raise TypeError(
                f"resume: expected mapping to be a dict, found {type(mapping).__name__}\n"
                "hint: mapping={'params/**': 'params/**'}"
            )
        self.wait_until_finished()
        found = self._comeback.newest_sound(like)
        if found is not None:
            state, step = found
            self._begin_at(step)
            return state, step
        state = self._comeback.fresh(like, init, mapping)
        self._begin_at(0)
        self._saves.last = -1
        return state, 0

    def _branch(self) -> list[StepDir]:
        return _branching.look(self._store).branch

    def _begin_at(self, step: int) -> None:
        self._position = step
        self._resumed = "yes"
        self._resumes += 1
        self._going = False
        self._saves.begin_at(step)

    def steps(self, total: int) -> Iterator[int]:
        """The updates that are still to run: `for step in run.steps(total)`.

        Ends after `total`, or earlier once `should_stop` is true. After a `rollback` and a `resume`
        it goes on from there: `continue` the loop then, the step that goes on is of the past.

        Args:
          total: the last one; `maybe_save` always saves after it, and waits.

        Returns:
          The number of the next update to run, from 1; after a resume at step n, from n + 1.

        Raises:
          ConflictError: the run has steps and was not resumed: the state would be a fresh one.
        """
        self._require_resumed("steps()")
        self._total = total
        return self._until_stopped(total)

    def _until_stopped(self, total: int) -> Iterator[int]:
        try:
            while self._position < total and not self.should_stop:
                self._require_resumed("the next step")
                self._position += 1
                self._at_resume = self._resumes
                self._saves.step_begins()
                yield self._position
        finally:
            self._at_resume = None

    def _require_resumed(self, what: str) -> None:
        if self._resumed != "yes":
            raise ConflictError(
                f"{self.path}: expected resume() before {what}: step {self._saves.last} is there",
                kind=Kind.STEP_ORDER,
                path=self.path,
                step=self._saves.last,
                hint="state, _ = run.resume(state)",
            )

    # Saving

    def maybe_save(
        self, step: int, state: Any, *, metrics: Mapping[str, Any] | None = None
    ) -> PendingSave | None:
        """Save in the background if the policy says so.

        At the last step, and when the job was asked to stop, it always saves, and waits.

        Args:
          step: updates that `state` has behind it; larger than at the last save.
          state: any pytree; may be donated right after the call.
          metrics: numbers to keep with the step; device scalars are fetched only if it is saved.

        Returns:
          The save, or None if none was begun.

        Raises:
          ConflictError: `step` is not larger than that of the last save or resume; or another job
            has taken over (kind `second-writer`).
          TypeError: `step` is no integer.
          UnsupportedLeafError: the state holds what cannot be stored.
          StorageError: three saves in a row failed; or the last one, at `total`, did.
        """
        step = _step_number(step)
        self._require_open()
        now = self._saves.step_ended()
        self._writer.epoch.note(step)
        if not self._going:
            self._going = True
            self._writer.ledger.add("going", step=step)
        self._saves.collect()
        try:
            return self._decide(step, state, metrics, now)
        finally:
            self._saves.step_begins()

    def _decide(
        self, step: int, state: Any, metrics: Mapping[str, Any] | None, now: float
    ) -> PendingSave | None:
        is_last = self._total is not None and step >= self._total
        reason = None if self._stopped else self._stop.check(self._saves.needed_s)
        if reason is not None and not is_last:
            return self._save_and_stop(step, state, metrics, reason)
        if is_last:
            pending = self.save(step, state, metrics=metrics, wait=True)
            self._writer.is_done = True
            return pending
        self._require_larger(step)
        if not self._when(step, now, tuple(self._saves.history)):
            return None
        why = self._saves.busy
        if why is not None and self._when_busy == "skip":
            self._saves.skipped(step, why)
            return None
        return self.save(step, state, metrics=metrics)

    def _save_and_stop(
        self, step: int, state: Any, metrics: Mapping[str, Any] | None, reason: str
    ) -> PendingSave | None:
        self._stopped = reason
        self._writer.ledger.add("stop", step=step, reason=reason)
        logger.warning("asked to stop by %s: saving step %d and ending", reason, step)
        self._writer.tidier.hurry()
        until = None if self._grace_s is None else time.monotonic() + self._grace_s
        try:
            self._saves.end(self._grace_s)  # that an earlier one has failed is no reason not to try
            options = self._options
            if until is not None:
                left_s = max(0.001, until - time.monotonic())
                limit_s = min(left_s, options.timeout_s or left_s)
                options = dataclasses.replace(options, timeout_s=limit_s)
            return self._save(step, state, metrics, options, wait=True)
        except JaxshardError as e:  # of time-outs too; earlier steps are there
            if e.kind is Kind.SECOND_WRITER:
                raise
            logger.error("step %d could not be saved before the end: %s", step, e)  # noqa: TRY400
            return None

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
        return self._save(step, state, metrics, self._options, wait=wait)

    def _save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        options: SaveOptions,
        *,
        wait: bool,
    ) -> PendingSave:
        step = _step_number(step)
        self._require_open()
        self._require_larger(step)
        if self._resumed == "must":
            self._require_resumed("another save")
        if self._resumed == "no":
            self._resumed = "yes"  # said once
            logger.warning(
                "%s has step %d, and step %d is saved without resume(): is its state a fresh one?",
                self.path,
                self._saves.last,
                step,
            )
        metadata = {} if metrics is None else {"metrics": plain_metrics(metrics)}
        return self._saves.begin(step, state, metadata, options, wait=wait)

    def _require_larger(self, step: int) -> None:
        if self._total is not None and self._at_resume not in (None, self._resumes):
            raise ConflictError(
                f"{self.path}: step {step} began before the run came back to {self._position}",
                kind=Kind.STEP_ORDER,
                path=self.path,
                step=step,
                hint="`continue` after rollback() and resume(): steps() goes on from there",
            )
        last = self._saves.newest
        if step <= last:
            raise ConflictError(
                f"{self.path}: expected a step larger than {last}, found {step}",
                kind=Kind.STEP_ORDER,
                path=self.path,
                step=step,
                hint="resume() first; step counts completed updates, as run.steps(total) does",
            )

    def wait_until_finished(self) -> None:
        """Wait for the save in the background, if there is one, and for deletions behind it.

        Raises:
          StorageError: as for `maybe_save`.
        """
        self._saves.wait()
        self._writer.tidier.settle()

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a step that was saved: those of an evaluation that came later.

        Args:
          step: a committed step, or the one that is being saved.
          metrics: numbers; one that is there already is replaced.

        Raises:
          NotFoundError: no such step was saved.
          TypeError: one of them is no number.
        """
        self._writer.record(self._saved_dir(step), plain_metrics(metrics))

    def _saved_dir(self, step: int) -> StepDir:
        if self._saves.running is not None and self._saves.running.step == step:
            self.wait_until_finished()
        return find_step(self._branch(), step, self.path)

    # Stopping

    @property
    def should_stop(self) -> bool:
        """Whether the job was asked to stop, and has saved since then, or could not."""
        return self._stopped is not None

    @property
    def exit_code(self) -> int:
        """What the script should end with: `sys.exit(run.exit_code)`.

        75 (EX_TEMPFAIL: to be started again) if it was asked to stop before `total`, else 0.
        """
        asked = self._stopped is not None or self._stop.reason is not None
        done = self._total is not None and self._saves.last >= self._total
        return EXIT_CODE if asked and not done else 0

    def poll(self) -> bool:
        """Whether somebody asks the job to stop: for loops that save nothing, like an evaluation.

        Leave such a loop when it is true; the next `maybe_save` saves and ends the run.
        """
        return self._stopped is not None or self._stop.check(self._saves.needed_s) is not None

    # Looking

    def all_steps(self) -> list[int]:
        """Committed steps that count, rising: not bad, and on the branch that goes on."""
        return [d.step for d in self._branch()]

    def latest_step(self) -> int | None:
        """The newest step that counts; never one whose save failed."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """The best step that counts, by `metric` and `mode` of `Keep`; None if none has it.

        Raises:
          ValueError: `keep` has no metric.
        """
        return self._writer.keeper.best_step(_branching.look(self._store))

    def load(self, step: int, like: Any = None, **options: Any) -> Any:
        """Load one committed step; see `jaxshard.load` for `like` and the other arguments.

        Raises:
          NotFoundError: no such step was committed.
        """
        step_dir = find_step(self._branch(), step, self.path)
        return _checkpoint.load(self._store.child(step_dir.name).url, like, **options)

    # Deciding

    def protect(self, step: int) -> None:
        """Never delete a step, whatever `keep` says.

        Raises:
          NotFoundError: no such step was committed.
        """
        self._writer.decide(lambda: _branching.protect(self._store, step))

    def unprotect(self, step: int) -> None:
        """Let `keep` decide about a step again.

        Raises:
          NotFoundError: no such step was committed.
        """
        self._writer.decide(lambda: _branching.unprotect(self._store, step))

    def mark_bad(self, step: int, why: str) -> None:
        """Never resume from a step. It stays as long as `keep` would have kept it.

        Raises:
          NotFoundError: no such step was committed.
        """
        self._writer.decide(lambda: _branching.mark_bad(self._store, step, why))

    def rollback(self, step: int, why: str, *, skip_batches: int = 0) -> None:
        """Go on from an earlier step: `resume` comes back to it, also at the next start.

        Later steps are set aside: they do not count any more, and are deleted when training has
        gone on beyond all of them. Call `resume` next; a loop over `steps` goes on from there.

        Args:
          step: a committed step.
          why: in words, for those who look at the run.
          skip_batches: how many batches of data to leave out from there on; see `skip_batches`.

        Raises:
          NotFoundError: no such step was committed, or only a part of it was kept (`thin_to`).
        """
        self._require_open()
        self.wait_until_finished()
        self._writer.decide(lambda: _branching.rollback(self._store, step, why, skip_batches))
        self._resumed = "must"
        self._saves.last = step

    def undo(self) -> None:
        """Take back the last decision: a rollback, a mark, a protection, a step found damaged.

        After a rollback was taken back, the steps saved since it are set aside; `resume` next.

        Raises:
          ConflictError: nothing is left to undo.
        """
        self._require_open()
        self.wait_until_finished()
        self._writer.decide(lambda: _branching.undo(self._store))
        newest = self.latest_step()
        if newest != self._saves.last:
            self._resumed = "must"
            self._saves.last = -1 if newest is None else newest

    @property
    def skip_batches(self) -> int:
        """How many batches to leave out now: right after a resume that a rollback has led to."""
        held = _branching.look(self._store).standing.skip_batches
        is_there = (
            self._resumed and held is not None and held[0] == self._saves.last == self._position
        )
        return held[1] if held is not None and is_there else 0

    # Ending

    def close(self) -> None:
        """Wait for the save in the background; nothing can be saved afterwards.

        Raises:
          StorageError: as for `maybe_save`.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        self._closed = True
        if os.getpid() != self._pid:  # a child that was forked has none of it
            return
        try:
            self.wait_until_finished()
        finally:
            if self._release.detach() is not None:
                _release(self._saves, self._writer, self._stop, os.getpid(), error)

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
            self._close(None if isinstance(error, (KeyboardInterrupt, SystemExit)) else error)
        except JaxshardError as failed:
            if error is None:
                raise
            error.add_note(f"while this was raised, a save failed too: {failed}")

    def __repr__(self) -> str:
        return f"<ResumeManager {self.path!r}, steps {self.all_steps()}>"


_managers: weakref.WeakValueDictionary[str, ResumeManager] = weakref.WeakValueDictionary()


def _close_earlier(path: str) -> None:
    """A cell of a notebook that is run again makes a second manager of the same run."""
    earlier = _managers.pop(path, None)
    if earlier is None or earlier._closed:  # noqa: SLF001  (another one of the same class)
        return
    logger.warning("%s: the ResumeManager that was open in this process is closed", path)
    try:
        earlier.close()
    except JaxshardError as e:
        logger.warning("%s: its last save failed: %s", path, e)


def _release(
    saves: Saves,
    writer: RunWriter,
    stop: StopRequest,
    pid: int,
    error: BaseException | None = None,
) -> None:
    if os.getpid() != pid:  # a child that was forked has none of it
        return
    stop.close()
    try:
        saves.end()
    finally:
        writer.close(error)


def _hooks(on_event: Hook | Sequence[Hook] | None) -> list[Hook]:
    hooks = [] if on_event is None else [on_event] if callable(on_event) else list(on_event)
    for hook in hooks:
        if not callable(hook):
            raise TypeError(
                f"ResumeManager: expected on_event to be a function, found {hook!r:.80}\n"
                "hint: on_event=jaxshard.monitoring.TensorBoard('logs')"
            )
    return hooks


def _paths(init_from: PathLike | Sequence[PathLike] | None) -> list[PathLike]:
    if init_from is None:
        return []
    return [init_from] if isinstance(init_from, (str, os.PathLike)) else list(init_from)


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
