"""One writer at a time: every start of a job is an epoch of its run, a number that only grows.

`epochs/00000003.json` says who began it, and is written again every few seconds with a higher
`beat`. Another start waits until that stands still, unless the first is known to be dead.
Who has a later epoch beside it commits nothing any more; and since between that look and its
commit a process may sleep for hours, the later epoch lists what it has found: what appears from
earlier ones afterwards does not count.

Nothing here relies on locks or on clocks of two machines.
"""

import contextlib
import datetime
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxshard._errors import ConflictError, CorruptionError, JaxshardError, Kind
from jaxshard._identity import Identity, Life
from jaxshard._manifest import FILE, canonical
from jaxshard._store import Store

logger = logging.getLogger("jaxshard")

DIR = "epochs"
DRILL_ROOT = "JAXSHARD_DRILL_ROOT"  # where `jaxshard drill` lets runs be written
DRILL_LEASE_S = 0.4
_NAME = re.compile(r"\d{8,}\.json")
_HEAD_BYTES = 4096  # of a manifest, in which its epoch is found
_IN_HEAD = re.compile(rb',"epoch":(\d{1,15}|null),"leaves":\[')
_BEATS = 4  # in a lease, and
_BEAT_S_MAX = 5.0  # so that it is known how far a run that was killed had come
_LOOKS = 20  # at the beat of another one, in a lease


class EpochFile(NamedTuple):
    """What is known of an epoch.

    Attributes:
      number: it counts from 1.
      raw: the bytes of its file: they change as it beats.
      nonce: random; tells it from one of the same number after a run was deleted.
      identity: of the process that began it; None if the file does not say.
      began: UTC, ISO 8601.
      lease_s: it beats at least that often.
      ended: whether that process said that it has ended.
      step: the newest update that it has told of.
      seen: when it told that, UTC, ISO 8601.
      steps: names of the committed steps that it found.
    """

    number: int
    raw: bytes
    nonce: str
    identity: Identity | None
    began: str
    lease_s: float
    ended: bool
    step: int | None
    seen: str | None
    steps: frozenset[str]

    @property
    def who(self) -> str:
        """For messages: host, process and start."""
        return f"{self.identity or 'an unknown process'}, since {self.began}"


def newest(store: Store) -> EpochFile | None:
    """The epoch that counts, None if the run never had one.

    Raises:
      CorruptionError: its file is not one of ours.
    """
    while (number := _newest_number(store)) is not None:
        with contextlib.suppress(FileNotFoundError):
            return _read(store, number)
    return None


def _newest_number(store: Store) -> int | None:
    names = filter(_NAME.fullmatch, store.child(DIR).entries())
    return max((int(name.removesuffix(".json")) for name in names), default=None)


def _file(number: int) -> str:
    return f"{DIR}/{number:08d}.json"


def _read(store: Store, number: int) -> EpochFile:
    raw = store.read(_file(number))
    try:
        body = json.loads(raw)
        return EpochFile(
            number=number,
            raw=raw,
            nonce=str(body["nonce"]),
            identity=Identity.from_json(body["identity"]),
            began=body["began"],
            lease_s=float(body["lease_s"]),
            ended=body["ended"] is True,
            step=body["step"],
            seen=body["seen"],
            steps=frozenset(map(str, body["steps"])),
        )
    except (ValueError, KeyError, TypeError) as e:
        # Which steps count hangs on it: no guess.
        file = f"{store.url}/{_file(number)}"
        raise CorruptionError(
            f"{file}: expected an epoch of the run: {e!r}",
            kind=Kind.EPOCH_DAMAGED,
            path=file,
            hint=f"if no job is running: without {store.url}/{DIR} all committed steps count",
        ) from e


def begin(
    store: Store, found: Callable[[], Iterable[str]], *, lease_s: float, takeover: bool
) -> "Epoch":
    """Begin the next epoch of a run, once the one before is over.

    Args:
      store: the directory of the run.
      found: gives the names of the committed steps that count; asked when nobody else writes.
      lease_s: beat at least that often; wait at least so long for another one's sign of life.
      takeover: take over at once, whoever is alive.

    Raises:
      ConflictError: another process is writing to the run.
      CorruptionError: the epoch before cannot be read.
    """
    store.make_dirs([DIR])
    while True:
        before = newest(store)
        if before is not None and not takeover:
            _wait_until_over(store, before, max(lease_s, before.lease_s))
        steps = set(found())
        number = 1 if before is None else before.number + 1
        epoch = Epoch(store, number, steps, lease_s)
        if not epoch.create():
            continue
        if before is not None:
            # What the one before has committed until it could see this one.
            others = (name for name in store.entries() if name not in steps)
            epoch.add(name for name in others if epoch_of(store, name) == before.number)
        return epoch


def epoch_of(store: Store, name: str) -> int | None:
    """The epoch that a step was committed in; None if it says none (a reader finds out why).

    It stands before the leaves: of a run with a thousand large manifests only their beginnings are
    read.
    """
    file, head = f"{name}/{FILE}", bytearray(_HEAD_BYTES)
    try:
        store.read_range(file, 0, memoryview(head))
        if found := _IN_HEAD.search(head):
            return None if found[1] == b"null" else int(found[1])
        epoch = json.loads(store.read(file))["epoch"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return epoch if isinstance(epoch, int) else None


def _wait_until_over(store: Store, other: EpochFile, lease_s: float) -> None:
    """Return when an epoch is over; raise if it is not.

    Raises:
      ConflictError: the process that began it is alive.
    """
    if other.ended:
        return
    life = Life.UNKNOWN if other.identity is None else other.identity.life()
    if life is Life.ALIVE:
        raise _is_running(store, other)
    if life in {Life.DEAD, Life.OWN}:
        logger.info("%s: the job before (%s) has ended; taking over", store.url, other.who)
        return
    logger.warning(
        "%s: waiting up to %.0f s for a sign of life of the job before (%s)",
        store.url,
        lease_s,
        other.who,
    )
    deadline = time.monotonic() + lease_s
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, lease_s / _LOOKS))
        now = newest(store)
        if now is None or now.number != other.number or now.ended:
            return
        if now.raw != other.raw:
            raise _is_running(store, other)


def _is_running(store: Store, other: EpochFile) -> ConflictError:
    return ConflictError(
        f"{store.url}: expected no other writer, found a job that is running: {other.who}",
        kind=Kind.SECOND_WRITER,
        path=store.url,
        hint="stop it first, give this job a run of its own, or pass takeover=True if it is gone",
    )


class Epoch:
    """The epoch that this process writes in; beats until `end`.

    Attributes:
      number: it counts from 1.
    """

    def __init__(self, store: Store, number: int, steps: Iterable[str], lease_s: float) -> None:
        self.number = number
        self._store = store
        self._nonce = secrets.token_hex(8)
        self._body: dict[str, Any] = {
            "epoch": number,
            "nonce": self._nonce,
            "identity": Identity.of_this_process()._asdict(),
            "processes": 1,
            "lease_s": lease_s,
            "began": _now(),
            "steps": sorted(steps),
            "beat": 0,
            "step": None,
            "seen": None,
            "ended": False,
        }
        self._writing = threading.RLock()  # a finalizer may run anywhere
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._beat_on,
            args=(min(lease_s / _BEATS, _BEAT_S_MAX),),
            name="jaxshard-beat",
            daemon=True,
        )

    def create(self) -> bool:
        """Begin, unless another one has; whether it did."""
        if not self._store.create(_file(self.number), self._bytes()):
            return False
        self._thread.start()
        return True

    @property
    def step(self) -> int | None:
        """The newest update that was noted."""
        step: int | None = self._body["step"]
        return step

    def note(self, step: int) -> None:
        """Remember that an update was completed; told with the next beat."""
        self._body.update(step=step, seen=_now())

    def carry_on(self, before: EpochFile | None) -> None:
        """Tell how far training had come, where this process does not train itself."""
        if before is not None:
            self._body.update(step=before.step, seen=before.seen)

    def add(self, names: Iterable[str]) -> None:
        """Add to the steps that were found."""
        more = sorted(names)
        if more:
            self._body["steps"] = sorted([*self._body["steps"], *more])
            self._write()

    def require_newest(self) -> None:
        """Make sure that nobody else has taken over.

        Raises:
          ConflictError: somebody has; or the run was deleted.
        """
        found = newest(self._store)
        if found is not None and (found.number, found.nonce) == (self.number, self._nonce):
            return
        what = f"another job has taken over this run: {found.who}" if found else "it was deleted"
        raise ConflictError(
            f"{self._store.url}: {what}",
            kind=Kind.SECOND_WRITER,
            path=self._store.url,
            hint="this one can save nothing more; stop it",
        )

    def end(self) -> None:
        """Say that this process writes no more."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._body["ended"] = True
        with contextlib.suppress(OSError, JaxshardError):  # another one's file stays as it is
            self.require_newest()
            self._write()

    def _beat_on(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                self.require_newest()
            except ConflictError:
                return  # the next save says it
            except (OSError, JaxshardError) as e:
                logger.debug("%s: %s", self._store.url, e)
            self._body["beat"] += 1
            self._write()

    def _write(self) -> None:
        with self._writing:
            try:
                self._store.replace(_file(self.number), self._bytes())
            except OSError as e:  # the next beat may come through; who is taken for dead is told so
                logger.warning("%s: no beat: %s", self._store.url, e)

    def _bytes(self) -> bytes:
        return canonical(self._body) + b"\n"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
