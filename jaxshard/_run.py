"""The directory of a run: its steps, as a reader sees them, and what a writer may delete."""

import json
import secrets
from typing import Any

from jaxshard import _commit, _reader
from jaxshard._errors import ConflictError, FormatError, Kind, NotFoundError, StorageError
from jaxshard._manifest import FILE, canonical
from jaxshard._policy import Keep
from jaxshard._reader import Checkpoint, StepDir
from jaxshard._registry import Shown
from jaxshard._store import PathLike, Store, open_store, storage_errors

_VERSION = 1


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

    def open(self, step: int | None = None) -> Checkpoint:
        """Open one step; the newest one if None.

        Raises:
          NotFoundError: no such step was committed.
        """
        return _reader.open_checkpoint(f"{self.path}/{self._dir(step).name}")

    def load(self, like: Any = None, *, step: int | None = None, **options: Any) -> Any:
        """Load one step, the newest one if None; see `jaxshard.load` for the other arguments.

        Raises:
          NotFoundError: no such step was committed.
        """
        from jaxshard import _checkpoint  # noqa: PLC0415  (a look at a run needs no jax)

        return _checkpoint.load(f"{self.path}/{self._dir(step).name}", like, **options)

    def _dir(self, step: int | None) -> StepDir:
        return find_step(self._committed(), step, self.path)

    def _committed(self) -> list[StepDir]:
        with storage_errors("listing", self.path):
            return _reader.committed_steps(self._store)

    def __repr__(self) -> str:
        try:
            return f"<Run {self.path!r}, steps {self.all_steps()}>"
        except StorageError:  # a repr is for looking, also at what has gone
            return f"<Run {self.path!r}, which cannot be listed>"


def find_step(committed: list[StepDir], step: int | None, path: str) -> StepDir:
    """A committed step by its number, the newest one if None.

    Raises:
      NotFoundError: there is none; the error names those that there are.
    """
    found = [d for d in committed if step is None or d.step == step]
    if not found:
        have = ", ".join(str(d.step) for d in committed) or "none"
        wanted = "a committed step" if step is None else f"step {step}"
        raise NotFoundError(
            f"{path}: expected {wanted}, found: {have}", path=path, step=step,
            hint="all_steps() lists the committed ones",
        )  # fmt: skip
    return found[-1]


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


# Writing ------------------------------------------------------------------------------------


def start(store: Store) -> None:
    """Make the directory of a run, or find that it is one.

    Raises:
      ConflictError: a checkpoint is there.
      FormatError: a run of a newer version.
    """
    with storage_errors("opening", store.url):
        if store.size(FILE) is not None or store.is_file():
            raise ConflictError(
                f"{store.url}: expected a run directory or nothing, found a checkpoint or a file",
                path=store.url,
                hint="give ResumeManager a directory of its own",
            )
        store.make_dirs([""])
        identity = {"format": "jaxshard-run", "version": _VERSION, "run_id": secrets.token_hex(16)}
        if store.create(_commit.RUN_FILE, canonical(identity) + b"\n"):
            return
        _require_version(store)


def _require_version(store: Store) -> None:
    file = f"{store.url}/{_commit.RUN_FILE}"
    try:
        found = json.loads(store.read(_commit.RUN_FILE))
        known = found["format"] == "jaxshard-run" and int(found["version"]) <= _VERSION
    except (ValueError, KeyError, TypeError) as e:
        raise FormatError(f"{file}: expected the description of a run: {e}", path=file) from e
    if not known:
        raise FormatError(
            f"{file}: expected version {_VERSION} or older, found {found}",
            kind=Kind.FORMAT_VERSION,
            path=file,
            hint="pip install --upgrade jaxshard",
        )


def next_dir(store: Store, step: int) -> StepDir:
    """Where to write a step: beside what was committed for it, over what was not."""
    versions = [d for d in _reader.step_dirs(store) if d.step == step]
    if not versions:
        return StepDir(step, 1)
    newest = versions[-1]
    committed = store.size(f"{newest.name}/{FILE}") is not None
    return StepDir(step, newest.version + 1) if committed else newest


def tidy(store: Store, just_saved: StepDir, keep: Keep, bad: set[str]) -> list[str]:
    """Delete what `keep` releases, and what can no longer become or be a checkpoint.

    Returns:
      Names of the steps that were deleted.
    """
    sound = (d for d in _reader.committed_versions(store) if d.name not in bad)
    committed = _reader.newest_versions(sound)
    kept_steps = keep.kept(d.step for d in committed) | {just_saved.step}
    kept = {d.name for d in committed if d.step in kept_steps} | {just_saved.name}
    gone = [
        d.name for d in _reader.step_dirs(store) if d.name not in kept and d.step <= just_saved.step
    ]
    for name in gone:
        _commit.delete(store.child(name))
    child = store.child(just_saved.name)
    manifest = _reader.open_checkpoint(child.url).source.manifest
    _commit.remove_other_attempts(child, manifest.attempt)
    return gone
