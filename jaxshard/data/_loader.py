"""`ElasticLoader`: the same batches, row by row, on any mesh and any number of processes."""

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np

from jaxshard._threads import Workers
from jaxshard.data._check import what_differs
from jaxshard.data._mixture import Mixture
from jaxshard.data._order import Order
from jaxshard.data._pack import Concat, Cursor, Pack, Stream, read_lengths
from jaxshard.data._reading import Reader, Transform, Wanted, reading
from jaxshard.data._schedule import Schedule
from jaxshard.data._share import Share
from jaxshard.data._sources import fingerprint, open_source

Array = np.ndarray[Any, Any]

_WHERE = "jaxshard.data.ElasticLoader"
_CURSORS_MAX = 64


class ElasticLoader:
    """Batches of rows in an order that depends on nothing but the seed and the position.

    Batch k holds the rows `[k B, (k + 1) B)` of one stream that goes on over all epochs. Which row
    of the source stands where is a pure function of (seed, epoch, position): not of the mesh, the
    number of processes, workers or prefetching. So a run that comes back on another mesh sees the
    same rows in the same order. Each process reads only the rows that its devices own under
    `sharding`.

    It is its own iterator, and a leaf of the state that jaxshard saves and restores, in place; its
    state is a few numbers, that count what was *consumed*. It has `get_state` and `set_state` for
    others, too.

    Args:
      source: rows by number: a list, an array (NumPy, memory-mapped, Zarr, h5py), a dict of arrays
        of one length, or anything with `__len__` and `__getitem__` (and `__getitems__`, if it can
        give many at once): a Grain `MapDataset` or data source, a Hugging Face `Dataset`, a torch
        map-style dataset. Or a `Mixture`. A row is an array, a number, or a dict, list or tuple of
        such. A source that gives None for a row (a filter) is refused when that row is read; one
        that is shuffled or repeated already is taken as it is, row by row, if it has an end.
      global_batch: rows in a batch, over all processes; or a schedule `[(from_step, rows), ...]`.
      sharding: of the batch, e.g. `NamedSharding(mesh, PartitionSpec("data"))`: batches are global
        `jax.Array`s. Its first axis cuts the rows, over any mesh axes, others the sequence; axes
        that a leaf does not have are left out. A dict of shardings, one for each leaf, or a
        `PartitionSpec` on the mesh of `jax.set_mesh`, too. None gives NumPy arrays of the whole
        batch on every process.
      seed: of the order and of the keys.
      shuffle: whether rows are permuted, anew in each epoch, by a keyed permutation that needs no
        memory.
      epochs: passes over the source; None for no end. For a `Mixture` see there.
      drop_remainder: whether the rows that fill no batch at the end are left out. If not, every
        batch has a mask, bool `[rows]`, which is false where the last batch repeats its first row
        to be full: as the leaf `"mask"` of batches that are dicts, else as `(batch, mask)`.
      pack: cuts documents of tokens into rows of one length; see `Pack`.
      transform: `(row, key) -> row`. `key` is uint32 `[2]`: the words of
        `jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position >> 32), position)`,
        another one at each position of the stream. `np.random.default_rng(key)` and
        `jax.random.wrap_key_data(key)` take it.
      batch_fn: `list of rows -> arrays` with a first axis of as many; None stacks them. It gets
        the rows of this process.
      workers: how many threads or processes read and transform the rows of a batch; 0 for none.
      worker_kind: `"thread"`, or `"process"` for transforms that hold the interpreter's lock: each
        begins anew (`spawn`), so the source and `transform` must pickle.
      prefetch: how many batches are made ahead, in a thread behind the training; 0 for none.

    Raises:
      TypeError: the source has no random access (an iterator, a generator, an `IterableDataset`);
        or an argument is of another type than said.
      ValueError: a size, schedule or sharding that does not fit; a source without rows, or
        repeated without end.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> from jaxshard.data import ElasticLoader
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> images, labels = np.zeros((100, 8, 8), np.float32), np.arange(100)
      >>> loader = ElasticLoader({"image": images, "label": labels}, global_batch=4, epochs=2,
      ...                        sharding=NamedSharding(mesh, PartitionSpec("data")))
      >>> batch = next(loader)
      >>> batch["image"].shape, batch["label"].tolist() == loader.rows(0).tolist(), len(loader)
      ((4, 8, 8), True, 50)
      >>> loader.state
      {'batches': 1, 'rows': 4, 'epoch': 0}
    """

    elastic = True

    def __init__(
        self,
        source: Any,
        *,
        global_batch: int | Sequence[tuple[int, int]],
        sharding: Any = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        drop_remainder: bool = True,
        pack: Pack | None = None,
        transform: Transform | None = None,
        batch_fn: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        worker_kind: Literal["thread", "process"] = "thread",
        prefetch: int = 2,
    ) -> None:
        _require_arguments(seed, epochs, pack, workers, worker_kind, prefetch)
        mixture = source if isinstance(source, Mixture) else Mixture([(source, 1)])
        self._schedule = Schedule(global_batch)
        self._share = Share(sharding)
        for _, size in self._schedule.pairs:
            self._share.require_divides(size)
        self._sources = [open_source(part) for part in mixture.sources]
        self._mixture, self._pack = mixture, pack
        self._seed, self._shuffle, self._epochs = operator.index(seed), bool(shuffle), epochs
        self._keep_last = not drop_remainder
        self._rows = _Rows(self._sources, pack, self._order, keep_last=self._keep_last)
        reader = Reader(self._sources, transform, batch_fn, self._seed, pack)
        self._reading = reading(reader, workers, worker_kind)
        self._ahead = _Ahead(self, prefetch)
        self._step = 0

    def _order(self, lengths: Sequence[int]) -> Order:
        """The order of rows, or of documents, of sources of these lengths."""
        return Order(
            lengths,
            self._mixture.weights,
            seed=self._seed,
            shuffle=self._shuffle,
            epochs=self._epochs,
            until=self._mixture.stopping_strategy,
        )

    # Where it is

    @property
    def step(self) -> int:
        """Batches that were consumed: the next one is for update `step + 1`."""
        return self._step

    @property
    def state(self) -> dict[str, int | list[int]]:
        """The position: `batches` and `rows` consumed, and `epoch`, passes that lie behind it.

        Of a `Mixture` `epoch` is a list, one for each source. `Pack("stream")` adds `document` and
        `offset`, the tokens of that document that were consumed.
        """
        rows = self._rows_before(self._step)
        found: dict[str, int | list[int]] = {"batches": self._step, "rows": rows}
        cursor = self._rows.cursor(self._step, self._schedule)
        at = rows if cursor is None else cursor.document
        epochs = self._rows.order.epochs_at(at)
        found["epoch"] = epochs[0] if len(epochs) == 1 else epochs
        return found | ({} if cursor is None else cursor._asdict())

    def _rows_before(self, step: int) -> int:
        rows = self._schedule.offset(step)
        total = self._rows.order.total
        return rows if total is None or self.is_stream else min(rows, total)

    def __len__(self) -> int:
        """Batches in all; TypeError if there is no end, or it is not known."""
        batches = self.batches
        if batches is None:
            raise TypeError(
                f"{_WHERE}: it has no end that is known\nhint: epochs=1; "
                'Pack(mode="stream") does not know how many rows there will be'
            )
        return batches

    @property
    def is_stream(self) -> bool:
        """Whether rows are known only when they are read: `Pack("stream")`."""
        return self._rows.is_stream

    @property
    def batches(self) -> int | None:
        """Batches in all; None if there is no end, or it is not known (`Pack("stream")`)."""
        total = self._rows.order.total
        if total is None or self.is_stream:
            return None
        return self._schedule.batches(total, keep_last=self._keep_last)

    def seek(self, step: int) -> None:
        """Go to where `step` batches are consumed: the next one is for update `step + 1`.

        At once, except with `Pack("stream")`, which reads the lengths of documents up to there.

        Raises:
          ValueError: there are not so many batches.
        """
        step = operator.index(step)
        if step < 0 or (self.batches is not None and step > self.batches):
            raise ValueError(
                f"{_WHERE}: expected a step between 0 and {self.batches}, found {step}\n"
                f"hint: epochs={self._epochs} ends there"
            )
        self._rows.cursor(step, self._schedule)
        self._step = step
        self._ahead.forget()

    def rows(self, step: int) -> Array:
        """The rows of the batch after `step` batches, without reading them.

        Returns:
          Numbers of rows in the source, int64 `[rows]`; of a `Mixture` `[rows, 2]`, source and row.
          With `Pack("concat")` of packed rows. Fewer in a last batch that is not full.

        Raises:
          IndexError: there is no such batch.
          ValueError: `Pack("stream")`, whose rows are known when they are read.
        """
        step = operator.index(step)
        if self.is_stream:
            raise ValueError(
                f'{_WHERE}: the rows of Pack(mode="stream") are not known before they are read\n'
                'hint: mode="concat"'
            )
        if step < 0 or (self.batches is not None and step >= self.batches):
            raise IndexError(
                f"{_WHERE}: expected a batch between 0 and {self.batches}, not included, found "
                f"{step}\nhint: epochs={self._epochs} ends there"
            )
        sources, rows = self._rows.order.at(self._positions(step))
        return rows if len(self._sources) == 1 else np.stack([sources, rows], axis=-1)

    def _positions(self, step: int) -> Array:
        return np.arange(self._rows_before(step), self._rows_before(step + 1))

    # Batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = self._ahead.get(self._step)
        if batch is None:
            raise StopIteration
        self._step += 1
        return batch

    def make(self, step: int) -> Any:
        """The batch after `step` batches, wherever the loader is; None at the end."""
        wanted, count, size = self._wanted(step)
        if wanted is None:
            return None
        try:
            local = self._reading.read(wanted)
        except Exception as e:
            e.add_note(f"in batch {step} of {_WHERE}")
            raise
        if not self._keep_last:
            return self._share.to_global(local, size)
        mask = self._share.rows(size) < count
        if not isinstance(local, Mapping):
            return tuple(self._share.to_global(part, size) for part in (local, mask))
        if "mask" in local:
            raise ValueError(
                f"{_WHERE}: drop_remainder=False adds the leaf 'mask', and the rows have one\n"
                "hint: another name, in transform="
            )
        return self._share.to_global({**local, "mask": mask}, size)

    def _wanted(self, step: int) -> tuple[Wanted | None, int, int]:
        """What this process reads of a batch; rows that there are, and rows in a full one."""
        size = self._schedule.size(step)
        if self.batches is not None and step >= self.batches:
            return None, 0, size
        mine = self._share.rows(size)
        if self.is_stream:
            packed = self._rows.packed(step, self._schedule)
            if len(packed) < size and not (self._keep_last and packed):
                return None, 0, size
            places = np.where(mine < len(packed), mine, 0)
            positions = self._schedule.offset(step) + places
            sources = np.zeros_like(places)
            return Wanted(positions, sources, [packed[p] for p in places]), len(packed), size
        positions = self._positions(step)
        # A row that is not there is the first one of the batch, and the mask says so.
        there = np.where(mine < len(positions), mine, 0)
        sources, rows = self._rows.order.at(positions[there])
        wanted = Wanted(positions[there], sources, self._rows.as_read(sources, rows))
        return wanted, len(positions), size

    def close(self) -> None:
        """End threads and worker processes; also done when the loader is no longer used."""
        self._ahead.close()
        self._reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The state, as it is saved

    @functools.cached_property
    def _fingerprints(self) -> list[dict[str, Any]]:
        return [fingerprint(source) for source in self._sources]

    def get_state(self) -> dict[str, Any]:
        """The position, and what the order depends on."""
        pack = self._pack
        return {
            **self.state,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "global_batch": [list(pair) for pair in self._schedule.pairs],
            "sources": self._fingerprints,
            "weights": list(self._mixture.weights),
            "pack": None if pack is None else {"seq_len": pack.seq_len, "mode": pack.mode},
        }

    def check_state(self, state: Any) -> list[str]:
        """What speaks against a state, in sentences that say what can be done; changes nothing."""
        return what_differs(self.get_state(), state, self._schedule, self.batches)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `get_state` gave.

        What lies ahead may change: sizes of later batches, `epochs`, `sharding`, `transform`,
        workers. What lies behind may not.

        Raises:
          ValueError: the source, the seed, the mixture, the packing or the sizes of earlier
            batches are others; says which, and what can be done.
        """
        problems = self.check_state(state)
        if problems:
            raise ValueError("\n".join([f"{_WHERE}: it cannot go on from this state:", *problems]))
        if self.is_stream:
            self._rows.remember(state["batches"], Cursor(state["document"], state["offset"]))
        self.seek(state["batches"])

    def __repr__(self) -> str:
        batches = self.batches
        of = "" if batches is None else f" of {batches:,}"
        rows = " + ".join(f"{source.length:,}" for source in self._sources)
        size = self._schedule.size(self._step)
        return f"<ElasticLoader at batch {self._step:,}{of}, {size:,} of {rows} rows each>"


def _require_arguments(
    seed: Any, epochs: Any, pack: Any, workers: Any, worker_kind: Any, prefetch: Any
) -> None:
    if pack is not None and not isinstance(pack, Pack):
        raise TypeError(
            f"{_WHERE}: expected pack to be a Pack, found {pack!r:.60}\nhint: pack=Pack(2048)"
        )
    numbers = {"seed": seed, "workers": workers, "prefetch": prefetch}
    numbers |= {} if epochs is None else {"epochs": epochs}
    for name, value in numbers.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{_WHERE}: expected {name} to be an integer, found {value!r:.60}")
        if value < (1 if name == "epochs" else 0) and name != "seed":
            raise ValueError(f"{_WHERE}: found {name}={value}\nhint: {name}=1")
    if worker_kind not in {"thread", "process"}:
        raise ValueError(
            f'{_WHERE}: found worker_kind={worker_kind!r}\nhint: "thread" or "process"'
        )


class _Rows:
    """The rows of the stream: those of the sources, or packed ones.

    Args:
      sources: rows, or documents.
      pack: how documents become rows, or None.
      order_of: the order of sources of these lengths.
      keep_last: whether packed rows may be shorter at the end.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        pack: Pack | None,
        order_of: Callable[[Sequence[int]], Order],
        *,
        keep_last: bool,
    ) -> None:
        self._concats: list[Concat] | None = None
        self._stream: Stream | None = None
        self._cursors = {0: Cursor()}
        self._moving = threading.RLock()  # the thread that makes batches ahead moves it too
        given = [
            None if pack is None else pack.lengths_of(i, source, len(sources))
            for i, source in enumerate(sources)
        ]
        if pack is not None and pack.mode == "concat":
            lengths = [
                read_lengths(pack, source) if known is None else known
                for source, known in zip(sources, given, strict=True)
            ]
            self._concats = [
                Concat(x, pack.seq_len, i, keep_last=keep_last) for i, x in enumerate(lengths)
            ]
            for number, concat in enumerate(self._concats):
                _require_a_row(number, concat, pack)
            self.order = order_of([concat.length for concat in self._concats])
            return
        self.order = order_of([source.length for source in sources])
        if pack is not None:

            @functools.lru_cache(maxsize=1 << 16)
            def length_of(source: int, document: int) -> int:
                known = given[source]
                if known is not None:
                    return int(known[document])
                return len(pack.tokens(sources[source].rows(np.array([document]))[0]))

            self._stream = Stream(self.order, pack.seq_len, length_of, keep_last=keep_last)

    @property
    def is_stream(self) -> bool:
        """Whether a row is known only once those before it are."""
        return self._stream is not None

    def as_read(self, sources: Array, rows: Array) -> Any:
        """What is read for these rows: their numbers, or the spans of packed ones."""
        if self._concats is None:
            return rows
        pairs = zip(sources.tolist(), rows.tolist(), strict=True)
        return [self._concats[source].row(row) for source, row in pairs]

    def cursor(self, step: int, schedule: Schedule) -> Cursor | None:
        """Where a stream is after so many batches; None if it is not one."""
        if self._stream is None:
            return None
        with self._moving:
            if step not in self._cursors:
                begin = max(known for known in self._cursors if known < step)
                for before in range(begin, step):
                    rows, after = self._stream.take(self._cursors[before], schedule.size(before))
                    if not rows:
                        raise ValueError(
                            f"{_WHERE}: expected a step between 0 and {before}, found {step}\n"
                            "hint: the documents end there"
                        )
                    self.remember(before + 1, after)
            return self._cursors[step]

    def remember(self, step: int, cursor: Cursor) -> None:
        """Keep where the stream is after so many batches."""
        with self._moving:
            self._cursors[step] = cursor
            if len(self._cursors) > _CURSORS_MAX:
                del self._cursors[min(known for known in self._cursors if known)]

    def packed(self, step: int, schedule: Schedule) -> list[Any]:
        """The rows of a batch of a stream."""
        assert self._stream is not None
        cursor = self.cursor(step, schedule)
        assert cursor is not None
        rows, after = self._stream.take(cursor, schedule.size(step))
        if rows:
            self.remember(step + 1, after)
        return rows


def _require_a_row(number: int, concat: Concat, pack: Pack) -> None:
    if concat.length == 0:
        raise ValueError(
            f"{_WHERE}: source {number} has {concat.tokens:,} tokens in all, too few for a row of "
            f"{pack.seq_len:,}\nhint: Pack({max(1, concat.tokens)}), or drop_remainder=False"
        )


class _Ahead:
    """Makes batches ahead of the one that is asked for.

    Args:
      loader: makes them.
      depth: how many.
    """

    def __init__(self, loader: ElasticLoader, depth: int) -> None:
        self._loader = weakref.ref(loader)  # a thread must not keep it
        self._depth = depth
        self._workers = Workers("jaxshard-prefetch", 1, 1)
        self._end = weakref.finalize(loader, self._workers.end, 0)
        self._futures: dict[int, Any] = {}

    def get(self, step: int) -> Any:
        """The batch after `step` batches; an error of making it is raised here."""
        loader = self._loader()
        assert loader is not None
        if not self._depth or not self._end.alive:
            return loader.make(step)
        for ahead in range(step, step + self._depth + 1):
            if ahead not in self._futures:
                self._futures[ahead] = self._workers.start(
                    functools.partial(_make, self._loader, ahead)
                )
        future = self._futures.pop(step)
        return future.result()

    def forget(self) -> None:
        """Another step will be asked for next."""
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()

    def close(self) -> None:
        """Let the thread end."""
        self.forget()
        self._end()


def _make(loader: "weakref.ref[ElasticLoader]", step: int) -> Any:
    alive = loader()
    return None if alive is None else alive.make(step)
