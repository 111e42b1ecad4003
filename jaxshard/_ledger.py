"""What happened to a run: a line of JSON for each start, save, failure, stop and end.

Each process start writes a file of its own below `events/`, so that nobody ever writes into
another one's; what a crash cuts off is the last line, which readers leave out.
"""

import datetime
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxshard._store import Store

logger = logging.getLogger("jaxshard")

DIR = "events"
Event = Mapping[str, Any]
Hook = Callable[[Event], None]


class Ledger:
    """The lines of one process start.

    Args:
      store: the directory of the run.
      hooks: called with each event as it happens, on the thread where it does.
    """

    def __init__(self, store: Store, hooks: Sequence[Hook]) -> None:
        self._store = store
        self._hooks = hooks
        began = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
        self._file = f"{DIR}/{began}-00000-{secrets.token_hex(4)}.jsonl"
        self._writing = threading.RLock()  # a finalizer may run anywhere
        self._failed = False
        store.make_dirs([DIR])

    def add(self, event: str, **fields: Any) -> None:
        """Write an event down; a store that fails at it, or a hook, stops nobody."""
        line = {"at": _now(), "event": event, **fields}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            with self._writing:
                # Behind a line that may have been cut off.
                self._store.append(self._file, b"\n" * self._failed + data)
            self._failed = False
        except OSError as e:
            if not self._failed:
                logger.warning("%s: the ledger cannot be written: %s", self._store.url, e)
            self._failed = True
        for hook in self._hooks:
            try:
                hook(line)
            except Exception:
                logger.exception("on_event failed at %r", event)


def read(store: Store) -> list[Event]:
    """All events of a run, in their order."""
    below = store.child(DIR)
    found: list[Event] = []
    for name in below.entries():
        if name.endswith(".jsonl"):
            found += _lines(below.read(name))
    return sorted(found, key=lambda event: str(event["at"]))


def _lines(data: bytes) -> Iterable[Event]:
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # cut off by a crash
            continue
        if isinstance(event, dict) and {"at", "event"} <= set(event):
            yield event


def metrics(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Numbers that were recorded after a save, by the directory of the step."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event["event"] == "record":
            numbers = {name: float(value) for name, value in event["metrics"].items()}
            found.setdefault(event["name"], {}).update(numbers)
    return found


def thinned(events: Iterable[Event]) -> set[str]:
    """Directories of steps that were thinned."""
    return {name for event in events if event["event"] == "thin" for name in event["names"]}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
