"""Where bytes live: a local directory, or memory (`memory://`).

A `Store` is one directory of keys, seen from inside: small files, conditional creation, deletion,
and the TensorStore `kvstore` spec that arrays below it are opened with. Object stores come with
the runs that need them; until then their URLs are refused by name.
"""

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from jaxshard import _durable
from jaxshard._errors import JaxshardError, Kind, StorageError

PathLike = str | os.PathLike[str]


class Syncer(Protocol):
    """New files that become durable together; see `_syncing.Syncing`."""

    def write(self, key: str, data: Any) -> None:
        """Write a new file."""

    def write_parts(
        self, key: str, parts: Iterable[Iterable[Any]], instead: Callable[[], bool] | None = None
    ) -> Future[bool]:
        """Begin to write a new file from buffers that are made as it goes on."""

    def link(self, key: str, url: str) -> bool:
        """Let a new file be another name of one that is durable; False if that cannot be."""

    def written(self, key: str) -> None:
        """Begin to make a file durable that TensorStore has written."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until all of them are durable."""

    def abandon(self) -> None:
        """Stop: they are about to be removed."""


class Store(Protocol):
    """One directory of keys; keys are relative, with `/`."""

    @property
    def url(self) -> str:
        """The directory, for messages."""

    def child(self, key: str) -> "Store":
        """A directory below."""

    def read(self, key: str) -> bytes:
        """All bytes of a file; FileNotFoundError if there is none."""

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`, as far as there are bytes; the length of the file."""

    def size(self, key: str) -> int | None:
        """Length of a file, None if there is none."""

    def walk(self) -> Iterator[str]:
        """Keys of all files below, sorted."""

    def entries(self) -> list[str]:
        """Names of the files and directories directly here, sorted; empty if there is nothing."""

    def is_file(self) -> bool:
        """Whether a file is where the directory should be."""

    def make_dirs(self, keys: Iterable[str]) -> None:
        """Make directories durable before files are written into them."""

    def write(self, key: str, data: Any) -> None:
        """Write a new file durably."""

    def syncing(self) -> Syncer:
        """Begin to write many new files that need not be durable one by one."""

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a file, durably; it need not exist."""

    def create(self, key: str, data: bytes) -> bool:
        """Let a file appear whole, durably, unless it exists; whether it was created."""

    def replace(self, key: str, data: bytes) -> None:
        """Put a file in the place of another one, at once and durably."""

    def remove(self, key: str) -> None:
        """Remove a file durably."""

    def remove_tree(self, key: str) -> None:
        """Remove everything below a key."""

    def remove_empty(self, key: str) -> None:
        """Remove a directory if nothing is in it."""

    def changed_at(self, key: str) -> float | None:
        """When anything at or below a key last changed, in seconds since 1970; None if unknown."""

    def files_below(self, key: str) -> Iterator[tuple[int, int, int]]:
        """Of files at or below a key: which file it is, how many names it has, its length."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be written, None if there is no such limit."""

    def kvstore(self, key: str) -> dict[str, Any]:
        """TensorStore kvstore spec of the directory `key`."""


def open_store(path: PathLike) -> Store:
    """The store at a path or URL.

    Raises:
      StorageError: a URL of a kind that this version does not serve.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"expected a path, found {type(path).__name__}\n"
            "hint: the path comes first: save(path, tree), load(path, like)"
        )
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(Path(text).expanduser().absolute())
    if scheme == "file":
        return LocalStore(Path("/" + rest.lstrip("/")))
    if scheme == "memory":
        return MemoryStore(rest.strip("/"))
    raise StorageError(
        f"{text}: expected a local path or memory://, found {scheme}://",
        path=text,
        hint="this version writes to local and mounted file systems; copy a finished checkpoint "
        "with any tool, it stays valid",
    )


@contextlib.contextmanager
def storage_errors(doing: str, path: str) -> Iterator[None]:
    """Turn an OSError of the environment into a StorageError that says what was being done."""
    try:
        yield
    except JaxshardError:  # some are OSErrors too
        raise
    except OSError as e:
        full = e.errno in {errno.ENOSPC, errno.EDQUOT}
        raise StorageError(
            f"{doing} {path}: {e.strerror or e}",
            kind=Kind.NO_SPACE if full else Kind.STORAGE,
            path=path,
            hint="free some space, or save elsewhere; earlier checkpoints are untouched"
            if full
            else None,
        ) from e


class LocalStore:
    """A directory of a local or mounted file system; every write is durable when it returns."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """The directory."""
        return str(self._root)

    def child(self, key: str) -> "LocalStore":
        """A directory below."""
        return LocalStore(self._root / key)

    def read(self, key: str) -> bytes:
        """All bytes of a file."""
        return (self._root / key).read_bytes()

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; the length of the file, by the same request."""
        # Not blocking, for what is no file: a pipe would wait for a writer.
        fd = os.open(self._root / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "no file", f"{self._root / key}")
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], offset + done)
                if count == 0:
                    break
                done += count
        finally:
            os.close(fd)
        return found.st_size

    def size(self, key: str) -> int | None:
        """Length of a file."""
        try:
            found = (self._root / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def walk(self) -> Iterator[str]:
        """Keys of all files below."""
        files = (
            str(Path(directory).relative_to(self._root) / name)
            for directory, _, names in os.walk(self._root)
            for name in names
        )
        yield from sorted(files)

    def entries(self) -> list[str]:
        """Names of what is directly here."""
        try:
            return sorted(p.name for p in self._root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_file(self) -> bool:
        """Whether a file is in the place of the directory."""
        return self._root.is_file()

    def make_dirs(self, keys: Iterable[str]) -> None:
        """Create and sync directories."""
        _durable.make_dirs(self._root / key for key in keys)

    def write(self, key: str, data: Any) -> None:
        """Write a new file."""
        _durable.write_new(self._root / key, data)

    def syncing(self) -> Syncer:
        """Begin to write many new files."""
        from jaxshard._syncing import Syncing  # noqa: PLC0415  (NumPy, which `ls` does without)

        return Syncing(self._root)

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a file."""
        _durable.append(self._root / key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Let a file appear unless it exists."""
        return _durable.create_if_absent(self._root / key, data)

    def replace(self, key: str, data: bytes) -> None:
        """Replace a file."""
        _durable.replace(self._root / key, data)

    def remove(self, key: str) -> None:
        """Remove a file."""
        _durable.remove(self._root / key)

    def remove_tree(self, key: str) -> None:
        """Remove a directory."""
        _durable.remove_tree(self._root / key if key else self._root)

    def remove_empty(self, key: str) -> None:
        """Remove a directory if nothing is in it."""
        _durable.remove_empty(self._root / key)

    def changed_at(self, key: str) -> float | None:
        """When anything at or below a key last changed."""
        return _durable.changed_at(self._root / key)

    def files_below(self, key: str) -> Iterator[tuple[int, int, int]]:
        """Inode, names and length of files at or below a key."""
        return _durable.files_below(self._root / key)

    def free_bytes(self) -> int | None:
        """Space that this user may still take on the disk of the directory."""
        here = self._root
        while not here.exists():
            here = here.parent
        disk = os.statvfs(here)
        return disk.f_bavail * disk.f_frsize

    def kvstore(self, key: str) -> dict[str, Any]:
        """TensorStore spec."""
        return {"driver": "file", "path": f"{self._root / key}/"}


@functools.cache
def memory_context() -> Any:
    """The TensorStore context that keeps `memory://` alive as long as the process."""
    import tensorstore as ts  # noqa: PLC0415

    return ts.Context()


class MemoryStore:
    """Keys in the memory of this process, for tests and notebooks; gone when it ends."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    @functools.cached_property
    def _kv(self) -> Any:
        import tensorstore as ts  # noqa: PLC0415

        return ts.KvStore.open(self.kvstore(""), context=memory_context()).result()

    @property
    def url(self) -> str:
        """The directory."""
        return f"memory://{self._prefix}"

    def child(self, key: str) -> "MemoryStore":
        """A directory below."""
        return MemoryStore(f"{self._prefix}/{key}" if self._prefix else key)

    def read(self, key: str) -> bytes:
        """All bytes of a file."""
        found = self._kv.read(key).result()
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, "no such key", f"{self.url}/{key}")
        return bytes(found.value)

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`."""
        data = memoryview(self.read(key))
        part = data[offset : offset + len(into)]
        into[: len(part)] = part
        return len(data)

    def size(self, key: str) -> int | None:
        """Length of a file."""
        try:
            return len(self.read(key))
        except FileNotFoundError:
            return None

    def walk(self) -> Iterator[str]:
        """Keys of all files below."""
        yield from sorted(key.decode() for key in self._kv.list().result())

    def entries(self) -> list[str]:
        """Names of what is directly here."""
        return sorted({key.split("/")[0] for key in self.walk()})

    def is_file(self) -> bool:
        """Whether a file is in the place of the directory."""
        return False

    def make_dirs(self, keys: Iterable[str]) -> None:
        """Nothing: keys need no directories."""

    def write(self, key: str, data: Any) -> None:
        """Write a new file."""
        if not self.create(key, bytes(data)):
            raise FileExistsError(errno.EEXIST, "the key exists", f"{self.url}/{key}")

    def syncing(self) -> Syncer:
        """Nothing has to be synced in memory."""
        return _Unsynced(self)

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a file; one writer at a time."""
        before = b"" if self.size(key) is None else self.read(key)
        self._kv.write(key, before + data).result()

    def create(self, key: str, data: bytes) -> bool:
        """Let a file appear unless it exists."""
        found = self._kv.read(key).result()
        if found.state == "value":
            return False
        # The generation of "missing" as a condition; the answer's is empty when it did not hold.
        stamp = self._kv.write(key, data, if_equal=found.stamp.generation).result()
        return bool(stamp.generation)

    def replace(self, key: str, data: bytes) -> None:
        """Replace a file."""
        self._kv.write(key, data).result()

    def remove(self, key: str) -> None:
        """Remove a file."""
        self._kv.write(key, None).result()

    def remove_tree(self, key: str) -> None:
        """Remove everything below a key."""
        import tensorstore as ts  # noqa: PLC0415

        start = f"{key}/" if key else ""
        self._kv.delete_range(ts.KvStore.KeyRange(start, f"{key}0" if key else "")).result()

    def remove_empty(self, key: str) -> None:
        """Nothing: keys need no directories."""

    def changed_at(self, key: str) -> float | None:
        """Unknown: memory keeps no times."""
        del key
        return None

    def files_below(self, key: str) -> Iterator[tuple[int, int, int]]:
        """Files at or below a key; each has one name."""
        names = [key, *(f"{key}/{file}" for file in self.child(key).walk())]
        sizes = (self.size(name) for name in names)
        return ((number, 1, size) for number, size in enumerate(sizes) if size is not None)

    def free_bytes(self) -> int | None:
        """No limit is known."""
        return None

    def kvstore(self, key: str) -> dict[str, Any]:
        """TensorStore spec."""
        path = "/".join(part for part in (self._prefix, key) if part)
        return {"driver": "memory", "path": f"{path}/" if path else ""}


class _Unsynced:
    """`Syncer` where a file is as durable as it can be once it is written."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, key: str, data: Any) -> None:
        self._store.write(key, data)

    def write_parts(
        self, key: str, parts: Iterable[Iterable[Any]], instead: Callable[[], bool] | None = None
    ) -> Future[bool]:
        there = instead is not None and instead()
        if not there:
            # Copied one by one: each is valid until the next is asked for.
            copies = (bytes(memoryview(b).cast("B")) for buffers in parts for b in buffers)
            self._store.write(key, b"".join(copies))
        written: Future[bool] = Future()
        written.set_result(there)
        return written

    def link(self, key: str, url: str) -> bool:
        del key, url
        return False

    def written(self, key: str) -> None:
        pass

    def finish(self, timeout_s: float | None = None) -> None:
        pass

    def abandon(self) -> None:
        pass
