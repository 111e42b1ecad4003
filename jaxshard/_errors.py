"""The error tree, and one stable code for every way to fail.

    JaxshardError
    ├── NotFoundError          (also FileNotFoundError)  nothing is there, or a run
    ├── NotCommittedError      an attempt is there, its manifest is not
    ├── ConflictError          (also FileExistsError)    something is there already
    ├── CheckpointReplacedError  what was opened is gone
    ├── LeafMismatchError      (also ValueError)         the checkpoint is not what `like` asks for
    ├── UnsupportedLeafError   (also TypeError)          the tree holds what cannot be stored
    ├── CorruptionError        bytes are missing, cut, changed or in the wrong place
    ├── FormatError            a newer, foreign or hostile file
    ├── StorageError           (also OSError)            disk full, permission, I/O error
    │   └── StorageTimeoutError  (also TimeoutError)
    └── DisagreementError      processes do not agree, or are more than this version serves

Errors are grouped by what a caller would do about them. Every message has the form «object and
place: expected, found», then a `hint:` line with the next command or argument. This room imports
nothing.
"""

from enum import StrEnum
from typing import ClassVar


class Kind(StrEnum):
    """Stable code of one way to fail; the list only ever grows."""

    NOT_FOUND = "not-found"
    IS_A_RUN = "is-a-run"
    NOT_COMMITTED = "not-committed"
    ALREADY_EXISTS = "already-exists"
    NOT_A_CHECKPOINT = "not-a-checkpoint"
    COMMIT_RACE = "commit-race"
    REPLACED = "replaced"
    LEAF_MISMATCH = "leaf-mismatch"
    UNSUPPORTED_LEAF = "unsupported-leaf"
    MANIFEST_DAMAGED = "manifest-damaged"
    TABLE_DAMAGED = "table-damaged"
    DATA_DAMAGED = "data-damaged"
    DATA_MISSING = "data-missing"
    NOTHING_SOUND = "nothing-sound"
    FORMAT_VERSION = "format-version"
    FORMAT_INVALID = "format-invalid"
    NO_SPACE = "no-space"
    STORAGE = "storage"
    TIMEOUT = "timeout"
    STEP_ORDER = "step-order"
    SECOND_WRITER = "second-writer"
    NOTHING_TO_UNDO = "nothing-to-undo"
    EPOCH_DAMAGED = "epoch-damaged"
    DECISION_DAMAGED = "decision-damaged"
    DRILL = "drill"
    SAVES_FAIL = "saves-fail"
    PROCESSES = "processes"


class JaxshardError(Exception):
    """Root of every error that jaxshard raises on purpose.

    Attributes:
      kind: stable code, for programs; see `Kind`.
      path: the checkpoint, run or file concerned, if any.
      step: the training step concerned, if any.
      hint: the next command or argument to try, if there is one.
      exit_code: what a command-line program should exit with.
    """

    exit_code: ClassVar[int] = 2
    default_kind: ClassVar[Kind]

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        kind: Kind | None = None,
        path: str | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.kind = self.default_kind if kind is None else kind
        self.path = path
        self.step = step
        self.hint = hint


class NotFoundError(JaxshardError, FileNotFoundError):
    """Nothing is at the path, or it is a run directory where one checkpoint was wanted."""

    default_kind = Kind.NOT_FOUND


class NotCommittedError(JaxshardError):
    """A save was begun at the path and never committed: there is no checkpoint."""

    default_kind = Kind.NOT_COMMITTED


class ConflictError(JaxshardError, FileExistsError):
    """Something is at the path that the call must not touch; nothing was changed."""

    default_kind = Kind.ALREADY_EXISTS


class CheckpointReplacedError(JaxshardError):
    """The checkpoint that was opened has been replaced or deleted since; open it again."""

    default_kind = Kind.REPLACED


class LeafMismatchError(JaxshardError, ValueError):
    """The checkpoint is not what `like` (or the placement) asks for; no data was returned.

    Attributes:
      mismatches: one sentence per leaf that differs, all of them.
    """

    default_kind = Kind.LEAF_MISMATCH

    def __init__(
        self,
        message: str,
        *,
        mismatches: tuple[str, ...] = (),
        hint: str | None = None,
        path: str | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint, path=path, step=step)
        self.mismatches = mismatches


class UnsupportedLeafError(JaxshardError, TypeError):
    """The tree holds something that cannot be stored; nothing was written.

    Attributes:
      offenders: one sentence per leaf that cannot be stored, all of them.
    """

    default_kind = Kind.UNSUPPORTED_LEAF

    def __init__(
        self, message: str, *, offenders: tuple[str, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.offenders = offenders


class CorruptionError(JaxshardError):
    """Stored bytes are missing, cut, changed or in the wrong place; no value was returned."""

    default_kind = Kind.DATA_DAMAGED


class FormatError(JaxshardError):
    """A file of a newer format version, of another program, or made to do harm."""

    default_kind = Kind.FORMAT_INVALID


class StorageError(JaxshardError, OSError):
    """The environment failed: disk full, permission denied, an I/O error; it may be retried."""

    default_kind = Kind.STORAGE

    # OSError would read the message as an errno and drop the rest.
    def __str__(self) -> str:
        return str(self.args[0])


class StorageTimeoutError(StorageError, TimeoutError):
    """An operation of the store did not end within `timeout_s`."""

    default_kind = Kind.TIMEOUT


class DisagreementError(JaxshardError):
    """Processes disagree, or there are more of them than this version serves."""

    default_kind = Kind.PROCESSES


def counted(number: int, noun: str) -> str:
    """`1 leaf`, `2 leaves`, `3 problems`."""
    plural = f"{noun[:-1]}ves" if noun.endswith("f") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def bullet_list(title: str, lines: tuple[str, ...]) -> str:
    """Join a title and one line per finding, all of them, into one message."""
    return "\n".join([title, *(f"  - {line}" for line in lines)])


def size_text(nbytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    if nbytes < 1024:
        return f"{int(nbytes)} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def rate_text(nbytes: float, seconds: float) -> str:
    """Bytes by second of wall time: `1.25 GB/s`."""
    return f"{nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
