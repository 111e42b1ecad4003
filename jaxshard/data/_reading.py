"""Rows of a batch, read and transformed: here, on threads, or in worker processes.

How many workers there are changes nothing about what is read.
"""

import math
import multiprocessing
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxshard._threads import Workers
from jaxshard.data import _batches
from jaxshard.data._keys import row_keys
from jaxshard.data._pack import Pack, Row, read_rows
from jaxshard.data._sources import RowSource

Array = np.ndarray[Any, Any]
Transform = Callable[[Any, Array], Any]


class Wanted(NamedTuple):
    """Rows to read.

    Attributes:
      positions: in the stream, int64 `[n]`.
      sources: which source each is of, int64 `[n]`.
      rows: their numbers in it, int64 `[n]`; or what packed rows are made of.
    """

    positions: Array
    sources: Array
    rows: "Array | Sequence[Row]"

    def part(self, start: int, stop: int) -> "Wanted":
        """Some of them."""
        return Wanted(self.positions[start:stop], self.sources[start:stop], self.rows[start:stop])


class Reader:
    """Reads rows; can be pickled if sources and functions can.

    Args:
      sources: of the rows.
      transform: `(row, key) -> row`, or None.
      batch_fn: rows to arrays; None stacks them.
      seed: of the keys.
      pack: how packed rows are read, or None.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        transform: Transform | None,
        batch_fn: Callable[[list[Any]], Any] | None,
        seed: int,
        pack: Pack | None,
    ) -> None:
        self.sources = sources
        self.transform = transform
        self.batch_fn = batch_fn
        self.seed = seed
        self.pack = pack

    def read(self, wanted: Wanted) -> Any:
        """A block: arrays with a leading axis; a list of rows if `batch_fn` is to stack them."""
        if self.pack is None and self.transform is None and self.batch_fn is None:
            source = int(wanted.sources[0])
            if (wanted.sources == source).all():
                columns = self.sources[source].columns(np.asarray(wanted.rows))
                if columns is not None:
                    return columns
        rows = self._rows(wanted)
        if self.transform is not None:
            rows = self._transformed(rows, wanted)
        return rows if self.batch_fn is not None else _batches.stack(rows)

    def _rows(self, wanted: Wanted) -> list[Any]:
        if self.pack is not None:
            return read_rows(self.pack, self.sources, list(wanted.rows))
        numbers = np.asarray(wanted.rows)
        rows: list[Any] = [None] * len(numbers)
        for source in np.unique(wanted.sources).tolist():
            mine = np.flatnonzero(wanted.sources == source)
            for place, row in zip(mine, self.sources[source].rows(numbers[mine]), strict=True):
                rows[place] = row
        return rows

    def _transformed(self, rows: list[Any], wanted: Wanted) -> list[Any]:
        assert self.transform is not None
        keys = row_keys(self.seed, wanted.positions)
        out = []
        for place, (row, key) in enumerate(zip(rows, keys, strict=True)):
            try:
                found = self.transform(row, key)
            except Exception as e:
                e.add_note(f"in transform= of {_which(wanted, place)}")
                raise
            if found is None:
                raise ValueError(
                    f"transform= gave None for {_which(wanted, place)}: rows cannot be left out "
                    "there\nhint: filter before, and give the rows that are left: "
                    "[source[i] for i in kept]"
                )
            out.append(found)
        return out


def _which(wanted: Wanted, place: int) -> str:
    row = wanted.rows[place]
    where = f"row {row}" if isinstance(row, (int, np.integer)) else f"the packed row {tuple(row)}"
    return f"{where} of source {wanted.sources[place]}, at position {wanted.positions[place]}"


class ReadingHere:
    """Reads where it is called."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, wanted: Wanted) -> Any:
        """The batch of these rows."""
        return _joined(self._reader, [self._reader.read(wanted)])

    def close(self) -> None:
        """Nothing is held."""


class ReadingOnThreads:
    """Reads parts of a batch on several threads."""

    def __init__(self, reader: Reader, workers: int) -> None:
        self._reader = reader
        self._number = workers
        self._workers = Workers("jaxshard-data", workers, workers)
        self._end = weakref.finalize(self, self._workers.end, 0)

    def read(self, wanted: Wanted) -> Any:
        """The batch of these rows."""
        reader = self._reader
        futures = [
            self._workers.start(lambda part=part: reader.read(part))  # type: ignore[misc]
            for part in _parts(wanted, self._number)
        ]
        return _joined(reader, [future.result() for future in futures])

    def close(self) -> None:
        """Let the threads end."""
        self._end()


class ReadingInProcesses:
    """Reads parts of a batch in several processes, which begin anew (`spawn`).

    Raises:
      TypeError: the source or a function cannot be pickled.
    """

    def __init__(self, reader: Reader, workers: int) -> None:
        self._reader = reader
        self._number = workers
        # `batch_fn` is called here, on all rows at once.
        parts = {"the source": reader.sources, "transform=": reader.transform}
        for what, part in parts.items():
            try:
                ForkingPickler.dumps(part)
            except Exception as e:  # whatever a class of somebody says of it
                raise TypeError(
                    f"jaxshard.data.ElasticLoader: {what} cannot be sent to worker processes: {e}\n"
                    'hint: a function at the top of a module; or worker_kind="thread"'
                ) from e
        self._pool = ProcessPoolExecutor(
            workers,
            multiprocessing.get_context("spawn"),
            _become_worker,
            (
                Reader(
                    reader.sources, reader.transform, _are_rows(reader), reader.seed, reader.pack
                ),
            ),
        )
        self._end = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def read(self, wanted: Wanted) -> Any:
        """The batch of these rows."""
        try:
            futures: list[Future[Any]] = [
                self._pool.submit(_read, part) for part in _parts(wanted, self._number)
            ]
            return _joined(self._reader, [future.result() for future in futures])
        except BrokenProcessPool as e:
            raise RuntimeError(
                "jaxshard.data.ElasticLoader: a worker process ended (killed for memory?)\n"
                "hint: the script must be importable: `if __name__ == '__main__':` around what "
                'runs; fewer workers=, or worker_kind="thread"'
            ) from e

    def close(self) -> None:
        """End the processes."""
        self._end()


def _are_rows(reader: Reader) -> Callable[[list[Any]], Any] | None:
    """What makes a worker give rows, where `batch_fn` is called here."""
    return None if reader.batch_fn is None else list


_reader: Reader | None = None


def _become_worker(reader: Reader) -> None:
    global _reader  # noqa: PLW0603  (a process of its own)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the device is the trainer's
    _reader = reader


def _read(wanted: Wanted) -> Any:
    assert _reader is not None
    return _reader.read(wanted)


def _parts(wanted: Wanted, workers: int) -> list[Wanted]:
    n = len(wanted.positions)
    each = math.ceil(n / workers)
    return [wanted.part(start, start + each) for start in range(0, n, each)]


def _joined(reader: Reader, blocks: list[Any]) -> Any:
    if reader.batch_fn is None:
        return _batches.concatenate(blocks)
    rows = [row for block in blocks for row in block]
    batch = reader.batch_fn(rows)
    _batches.map_leaves(lambda array: _require_rows(array, len(rows)), batch)
    return batch


def _require_rows(array: Any, rows: int) -> None:
    shape = np.shape(array)
    if not shape or shape[0] != rows:
        raise ValueError(
            f"batch_fn= gave an array with the shape {shape}: expected a first axis of the {rows} "
            "rows that it got\nhint: np.stack"
        )


def reading(
    reader: Reader, workers: int, kind: Literal["thread", "process"]
) -> ReadingHere | ReadingOnThreads | ReadingInProcesses:
    """What reads batches."""
    if workers == 0:
        return ReadingHere(reader)
    return (
        ReadingOnThreads(reader, workers)
        if kind == "thread"
        else ReadingInProcesses(reader, workers)
    )
