"""A run as a reader sees it."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from jaxshard import _branching, _reader
from jaxshard._branching import find_step
from jaxshard._errors import (
    CheckpointReplacedError,
    Kind,
    NotCommittedError,
    NotFoundError,
    StorageError,
)
from jaxshard._keep import Keep
from jaxshard._keeping import Keeper
from jaxshard._reader import Checkpoint
from jaxshard._registry import Shown
from jaxshard._steps import StepDir
from jaxshard._store import PathLike, Store, open_store

_Read = TypeVar("_Read")


class Run(Shown):
    """A run, read-only: for evaluation jobs and notebooks; never disturbs the writer.

    Attributes:
      path: directory of the run.

    Example:
      >>> import jax.numpy as jnp, jaxshard
      >>> with jaxshard.ResumeManager("memory://doc/run", when=jaxshard.Every(steps=2)) as run:
      ...     state, _ = run.resume({"w": jnp.zeros(2)})
      ...     for step in run.steps(4):
      ...         state = {"w": state["w"] + 1}
      ...         _ = run.maybe_save(step, state)
      >>> run = jaxshard.open("memory://doc/run")
      >>> run.all_steps(), run.load()["w"]
      ([2, 4], array([4., 4.], dtype=float32))
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.path = store.url

    def all_steps(self) -> list[int]:
        """Committed steps, rising."""
        return [d.step for d in self._committed()]

    def latest_step(self) -> int | None:
        """The newest committed step, None if there is none."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self, metric: str, *, mode: Literal["min", "max"] = "min") -> int | None:
        """The best step by a metric that came with a save or by `record`; None if none has it.

        Args:
          metric: its name.
          mode: whether the smallest or the largest is best. NaN never is.
        """
        keep = Keep(best=1, metric=metric, mode=mode)
        return Keeper(self._store, keep).best_step(_branching.look(self._store))

    def open(self, step: int | None = None) -> Checkpoint:
        """Open one step; the newest one if None.

        Raises:
          NotFoundError: no such step was committed.
          CheckpointReplacedError: the writer deleted this step just now.
        """
        return self._while_there(step, _reader.open_checkpoint)

    def load(self, like: Any = None, *, step: int | None = None, **options: Any) -> Any:
        """Load one step, the newest one if None; see `jaxshard.load` for the other arguments.

        A newest step that is deleted meanwhile, since a newer one is there, is followed by that.

        Raises:
          NotFoundError: no such step was committed.
          CheckpointReplacedError: the writer deleted this step meanwhile.
        """
        from jaxshard import _checkpoint  # noqa: PLC0415  (a look at a run needs no jax)

        return self._while_there(step, lambda path: _checkpoint.load(path, like, **options))

    def follow(self, timeout_s: float, *, poll_s: float = 1.0) -> Iterator[int]:
        """The newest step, and then each newer one as it is committed: for evaluation jobs.

        Steps that come and go between two looks are left out. After a rollback the newest step is
        an earlier one.

        Args:
          timeout_s: ends when nothing new has come for so long, in seconds.
          poll_s: how often to look.

        Example:
          >>> import jaxshard, numpy as np
          >>> with jaxshard.ResumeManager("memory://doc/follow") as run:
          ...     _ = run.save(3, {"w": np.ones(2)}, wait=True)
          >>> for step in jaxshard.open("memory://doc/follow").follow(timeout_s=0.1):
          ...     print(step)
          3
        """
        seen: StepDir | None = None
        deadline = time.monotonic() + timeout_s
        while True:
            steps = self._committed()
            if steps and steps[-1] != seen:
                seen = steps[-1]
                yield seen.step
                deadline = time.monotonic() + timeout_s
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, poll_s))

    def _while_there(self, step: int | None, read: Callable[[str], _Read]) -> _Read:
        """Read a step, or the newest one that there is then; once more if it was thinned."""
        replaced: StepDir | None = None
        while True:
            step_dir = find_step(self._committed(), step, self.path)
            try:
                return read(f"{self.path}/{step_dir.name}")
            except (NotFoundError, NotCommittedError, CheckpointReplacedError) as e:
                if step_dir in self._committed():
                    if not isinstance(e, CheckpointReplacedError) or step_dir == replaced:
                        raise
                    replaced = step_dir
                    continue
                if step is not None:
                    raise CheckpointReplacedError(
                        f"{self.path}: step {step} was deleted while it was read",
                        path=self.path,
                        step=step,
                        hint="its writer keeps newer ones: load() reads the newest; protect(step) "
                        "of the writer, or `jaxshard protect`, keeps one",
                    ) from e

    def _committed(self) -> list[StepDir]:
        return _branching.look(self._store).branch

    def __repr__(self) -> str:
        try:
            return f"<Run {self.path!r}, steps {self.all_steps()}>"
        except StorageError:  # a repr is for looking, also at what has gone
            return f"<Run {self.path!r}, which cannot be listed>"


def open(path: PathLike) -> Checkpoint | Run:  # noqa: A001  (jaxshard.open)
    """Open a checkpoint or a run, without reading any values.

    Of a checkpoint only the manifest is read; it works without the devices that saved it.

    Args:
      path: a committed checkpoint, or the directory of a `ResumeManager`.

    Returns:
      A `Checkpoint`, a mapping from names to lazy leaves; or a `Run`.

    Raises:
      NotFoundError: nothing is there.
      NotCommittedError: a save was begun there and never committed.
      CorruptionError: the manifest is cut or changed.
      FormatError: written by a newer version, or hostile.

    Example:
      >>> import jax.numpy as jnp, jaxshard
      >>> _ = jaxshard.save("memory://doc/look", {"w": jnp.ones((4, 2))})
      >>> jaxshard.open("memory://doc/look")["w"].read(slice(0, 1))
      array([[1., 1.]], dtype=float32)
    """
    try:
        return _reader.open_checkpoint(path)
    except NotFoundError as e:
        if e.kind is Kind.IS_A_RUN:
            return Run(open_store(path))
        raise
