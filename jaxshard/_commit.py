"""What is at a path, and the moment when an attempt becomes a checkpoint.

Owns the promise «all or nothing»: `manifest.json` is created last and only if nothing is there;
an attempt never writes into another one's directory; deletion takes the manifest first.

Format: docs/format.md, "Write order" and "Delete order".
"""

import contextlib
import enum
import logging
import re
import secrets

from jaxshard._errors import ConflictError, CorruptionError, FormatError, Kind
from jaxshard._manifest import FILE, Manifest
from jaxshard._store import Store

logger = logging.getLogger("jaxshard")

RUN_FILE = "run.json"
_ATTEMPT = re.compile(r"a-[0-9a-f]{8,32}")
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]+")


class Found(enum.Enum):
    """What is at a path."""

    NOTHING = enum.auto()
    CHECKPOINT = enum.auto()
    ATTEMPTS = enum.auto()  # begun, never committed
    RUN = enum.auto()
    OTHER = enum.auto()


def look(store: Store) -> Found:
    """What is at a path; one existence check where a checkpoint is."""
    if store.size(FILE) is not None:
        return Found.CHECKPOINT
    if store.is_file():
        return Found.OTHER
    entries = store.entries()
    if RUN_FILE in entries:
        return Found.RUN
    if unexpected(entries):
        return Found.OTHER
    return Found.ATTEMPTS if entries else Found.NOTHING


def unexpected(entries: list[str]) -> list[str]:
    """Entries of a directory that no checkpoint has."""
    return [name for name in entries if name != FILE and not is_leftover(name)]


def is_leftover(name: str) -> bool:
    """Whether an entry is an attempt or a temporary file: a leftover unless a manifest names it."""
    return bool(_ATTEMPT.fullmatch(name) or _TEMPORARY.fullmatch(name))


def require_writable(store: Store, *, overwrite: bool) -> None:
    """Refuse to save over anything but nothing, leftovers or (if asked) a checkpoint.

    Raises:
      ConflictError: a checkpoint, a run, or files of somebody else are there.
    """
    found = look(store)
    if found is Found.CHECKPOINT and not overwrite:
        raise ConflictError(
            f"{store.url}: expected nothing, found a committed checkpoint",
            path=store.url,
            hint="save to another path, or pass overwrite=True",
        )
    if found is Found.RUN:
        raise ConflictError(
            f"{store.url}: expected nothing, found a run directory",
            path=store.url,
            hint="save steps of a run with ResumeManager, or save to another path",
        )
    if found is Found.OTHER:
        names = ", ".join(map(repr, unexpected(store.entries())[:3])) or "a file"
        raise ConflictError(
            f"{store.url}: expected nothing or a jaxshard checkpoint, found {names}",
            kind=Kind.NOT_A_CHECKPOINT,
            path=store.url,
            hint="save to a path of its own",
        )


def new_attempt() -> str:
    """Name for the directory of an attempt."""
    return f"a-{secrets.token_hex(8)}"


def commit(store: Store, manifest: Manifest, *, overwrite: bool) -> None:
    """Let the manifest appear; everything that it names is durable already.

    Raises:
      ConflictError: somebody else committed at this path first; their checkpoint is untouched.
    """
    data = manifest.to_bytes()
    if overwrite:
        before = _committed_attempt(store)
        store.replace(FILE, data)
        if before is not None and before != manifest.attempt:
            _remove_leftover(store, before)
        return
    if store.create(FILE, data) or store.read(FILE) == data:  # a lost reply may have been retried
        return
    raise ConflictError(
        f"{store.url}: another save committed here first; its checkpoint is untouched",
        kind=Kind.COMMIT_RACE,
        path=store.url,
        hint="save to a path of its own",
    )


def _committed_attempt(store: Store) -> str | None:
    with contextlib.suppress(FileNotFoundError, CorruptionError, FormatError):
        return Manifest.from_bytes(store.read(FILE), FILE).attempt
    return None


def abandon(store: Store, attempt: str) -> None:
    """Remove an attempt of this process that failed, unless it failed after its commit."""
    with contextlib.suppress(OSError):
        if _committed_attempt(store) != attempt:
            _remove_leftover(store, attempt)


def _remove_leftover(store: Store, attempt: str) -> None:
    """Remove what no manifest names any more; if that fails, it is only a waste of space."""
    try:
        store.remove_tree(attempt)
    except OSError as e:
        logger.warning("%s: the leftover %s could not be removed: %s", store.url, attempt, e)


def delete(store: Store) -> None:
    """Delete a checkpoint: the manifest first, so that a crash leaves no half one."""
    store.remove(FILE)
    store.remove_tree("")


def remove_other_attempts(store: Store, keep: str) -> None:
    """Remove the attempts beside a committed one; none of them can be committed any more."""
    for name in store.entries():
        if name != keep and is_leftover(name):
            store.remove_tree(name)
