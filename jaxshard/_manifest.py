"""`manifest.json`: the one description of a checkpoint, whose presence is the commit.

Canonical JSON (sorted keys, no spaces, ASCII, no NaN) that ends with the xxh3-128 of its own
bytes. Reading validates every field that anything later relies on (`_treejson`). Pure.

Format: docs/format.md, "Manifest".
"""

import contextlib
import dataclasses
import gc
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import xxhash

from jaxshard._errors import CorruptionError, FormatError, Kind
from jaxshard._spec import TreeSpec
from jaxshard._treejson import UnfitError, require, tree_from_json, tree_to_json

FORMAT_VERSION = 1
FILE = "manifest.json"
_ATTEMPT = re.compile(r"a-[0-9a-f]{8,32}")
_END = re.compile(rb',"xxh3_128":"([0-9a-f]{32})"\}\n\Z')
_HEAD = re.compile(rb'\A\{"a_format":"jaxshard","a_version":(\d{1,9}),')
# What reading a field that is missing or of another type can raise.
_MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What the manifest says of the files of one process."""

    table_bytes: int
    table_digest: str


class ReusedLeaf(NamedTuple):
    """Of a leaf: what it shares with the step before.

    Attributes:
      pieces: how many of its files are those of that step.
      nbytes: bytes of their elements.
      saves: how many steps in a row have shared a file of it.
    """

    pieces: int = 0
    nbytes: int = 0
    saves: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its data."""

    attempt: str
    nonce: str
    step: int | None
    created: str
    metadata: Mapping[str, Any]
    environment: Mapping[str, Any]
    compression: Literal["zstd"] | None
    tree: TreeSpec
    processes: tuple[ProcessRecord, ...]
    epoch: int | None = None
    reused: Mapping[str, ReusedLeaf] = dataclasses.field(default_factory=dict)
    thinned_to: tuple[str, ...] = ()
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file."""
        body = {
            # `a_` sorts first: a reader finds format and version before anything else.
            "a_format": "jaxshard",
            "a_version": self.version,
            "attempt": self.attempt,
            "compression": self.compression,
            "created": self.created,
            "environment": dict(self.environment),
            "epoch": self.epoch,
            "metadata": dict(self.metadata),
            "nonce": self.nonce,
            "processes": [
                {"iterators": None, "table_bytes": p.table_bytes, "table_xxh3_128": p.table_digest}
                for p in self.processes
            ],
            "step": self.step,
            **tree_to_json(self.tree),
        }
        if self.reused:
            body["reused"] = {name: leaf._asdict() for name, leaf in self.reused.items()}
        if self.thinned_to:
            body["thinned_to"] = self.thinned_to
        text = canonical(body)
        digest = xxhash.xxh3_128_hexdigest(text)
        return text[:-1] + f',"xxh3_128":"{digest}"}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Read and validate a manifest.

        Raises:
          CorruptionError: cut or changed: it does not end with the digest of its bytes.
          FormatError: another program's file, a newer version, or fields that do not fit together.
        """
        head = _HEAD.match(data)
        if head is not None and int(head[1]) > FORMAT_VERSION:
            raise FormatError(
                f"{path}: expected format version {FORMAT_VERSION} or older, "
                f"found version {int(head[1])}",
                kind=Kind.FORMAT_VERSION,
                path=path,
                hint="pip install --upgrade jaxshard",
            )
        end = _END.search(data[-64:])
        if head is None or end is None:
            raise _damaged(path, "cut, or not written by jaxshard")
        body = data[: len(data) - len(end[0])] + b"}"
        if xxhash.xxh3_128_hexdigest(body).encode() != end[1]:
            raise _damaged(path, "its bytes do not have the digest that it ends with")
        try:
            with _collector_paused():
                return _from_json(json.loads(body))
        except UnfitError as e:
            raise FormatError(f"{path}: the manifest does not fit together: {e}", path=path) from e
        except FormatError as e:
            raise FormatError(f"{path}: {e}", path=path) from e
        except _MALFORMED as e:
            raise FormatError(
                f"{path}: a field is missing or of the wrong type: {e!r:.200}", path=path
            ) from e

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, each shared one once."""
        return sum(leaf.nbytes for leaf in self.tree.leaves if leaf.same_as is None)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection while a million objects are made that all stay.

    It would look at all of them again and again: 2.7 s instead of 0.9 s for 100,000 leaves.
    (benchmarks/scale.py)
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def canonical(value: Any) -> bytes:
    """Canonical JSON: one text for one value.

    Raises:
      ValueError: a NaN or an infinity, which JSON does not have.
      TypeError: a value that JSON does not have.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _damaged(path: str, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path}: the manifest is damaged: {why}",
        kind=Kind.MANIFEST_DAMAGED,
        path=path,
        hint="load another step, or restore this file from a copy",
    )


def _from_json(body: dict[str, Any]) -> Manifest:
    require(_ATTEMPT.fullmatch(body["attempt"]) is not None, "attempt", body["attempt"])
    require(body["epoch"] is None or type(body["epoch"]) is int, "epoch", body["epoch"])
    step = body["step"]
    require(step is None or (type(step) is int and step >= 0), "step", step)
    require(body["compression"] in (None, "zstd"), "compression", body["compression"])
    tree = tree_from_json(body)
    reused = {name: _reused_leaf(fields) for name, fields in body.get("reused", {}).items()}
    processes = tuple(
        ProcessRecord(int(p["table_bytes"]), str(p["table_xxh3_128"])) for p in body["processes"]
    )
    require(bool(processes), "processes", "none")
    require(isinstance(body["metadata"], dict), "metadata", body["metadata"])
    return Manifest(
        attempt=body["attempt"],
        nonce=str(body["nonce"]),
        step=step,
        created=str(body["created"]),
        metadata=body["metadata"],
        environment=dict(body["environment"]),
        compression=body["compression"],
        tree=tree,
        processes=processes,
        epoch=body["epoch"],
        reused=reused,
        thinned_to=tuple(map(str, body.get("thinned_to", ()))),
        version=body["a_version"],
    )


def _reused_leaf(fields: dict[str, Any]) -> ReusedLeaf:
    found = ReusedLeaf(*(fields[name] for name in ReusedLeaf._fields))
    require(all(type(n) is int and n >= 0 for n in found), "reused", fields)
    return found
