"""One writer at a time: every start of a job is an epoch of its run, a number that only grows.

`epochs/00000003.json` says who began it, and is written again every quarter of `lease_s` with a
higher `beat`. Another start waits until that stands still, unless the first is known to be dead.
Who has a later epoch beside it commits nothing any more; and since between that look and its
commit a process may sleep for hours, the later epoch lists what it has found: what appears from
earlier ones afterwards is no checkpoint.

Nothing here relies on locks or on clocks of two machines.
"""

import contextlib
import datetime
import json
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxshard._errors import ConflictError, Kind
from jaxshard._identity import Identity, Life
from jaxshard._manifest import canonical
from jaxshard._store import Store

logger = logging.getLogger("jaxshard")

DIR = "epochs"
_BEATS = 4  # in a lease
_LOOKS = 20  # at the beat of another one, in a lease


class EpochFile(NamedTuple):
    """What is known of an epoch.

    Attributes:
      number: it counts from 1.
      raw: the bytes of its file: they change as it beats.
      identity: of the process that began it; None if the file does not say.
      began: UTC, ISO 8601.
      ended: whether that process said that it has ended.
      step: the newest update that it has told of.
      seen: when it told that, UTC, ISO 8601.
      steps: names of the committed steps that it found.
    """

    number: int
    raw: bytes
    identity: Identity | None
    began: str | None
    ended: bool
    step: int | None
    seen: str | None
    steps: frozenset[str]

    @property
    def who(self) -> str:
        """For messages: host, process and start."""
        return f"{self.identity or 'an unknown process'}, since {self.began or 'an unknown time'}"


def newest(store: Store) -> EpochFile | None:
    """The epoch that counts, None if the run never had one."""
    number = _newest_number(store)
    while number is not None:
        with contextlib.suppress(FileNotFoundError):
            return _read(store, number)
        number = _newest_number(store)
    return None


def _newest_number(store: Store) -> int | None:
    stems = (name.removesuffix(".json") for name in store.child(DIR).entries())
    return max((int(stem) for stem in stems if stem.isdecimal()), default=None)


def _file(number: int) -> str:
    return f"{DIR}/{number:08d}.json"


def _read(store: Store, number: int) -> EpochFile:
    raw = store.read(_file(number))
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {}
    steps = body.get("steps")
    return EpochFile(
        number=number,
        raw=raw,
        identity=Identity.from_json(body.get("identity")),
        began=body.get("began"),
        ended=body.get("ended") is True,
        step=body.get("step"),
        seen=body.get("seen"),
        steps=frozenset(steps if isinstance(steps, list) else ()),
    )


def begin(store: Store, steps: Iterable[str], *, lease_s: float, takeover: bool) -> "Epoch":
    """Begin the next epoch of a run, once the one before is over.

    Args:
      store: the directory of the run.
      steps: names of the committed steps that are there.
      lease_s: an epoch whose file does not change for so long is over.
      takeover: take over at once, whoever is alive.

    Raises:
      ConflictError: another process is writing to the run.
    """
    store.make_dirs([DIR])
    while True:
        before = newest(store)
        if before is not None and not takeover:
            _wait_until_over(store, before, lease_s)
        number = 1 if before is None else before.number + 1
        epoch = Epoch(store, number, sorted(steps), lease_s)
        if epoch.create():
            return epoch


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

    def __init__(self, store: Store, number: int, steps: list[str], lease_s: float) -> None:
        self.number = number
        self._store = store
        self._body: dict[str, Any] = {
            "epoch": number,
            "identity": Identity.of_this_process()._asdict(),
            "processes": 1,
            "lease_s": lease_s,
            "began": _now(),
            "steps": steps,
            "beat": 0,
            "step": None,
            "seen": None,
            "ended": False,
        }
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._beat_on, args=(lease_s / _BEATS,), name="jaxshard-beat", daemon=True
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

    def require_newest(self) -> None:
        """Make sure that nobody else has taken over.

        Raises:
          ConflictError: somebody has.
        """
        found = newest(self._store)
        if found is not None and found.number > self.number:
            raise ConflictError(
                f"{self._store.url}: another job has taken over this run: {found.who}",
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
        self._write()

    def _beat_on(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            number = None
            with contextlib.suppress(OSError):
                number = _newest_number(self._store)
            if number != self.number and number is not None:
                return  # the next save says it
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
