"""`Pack`: documents of tokens -> rows of one length, and which parts of documents make a row.

A row is a list of spans, a span is a part of one document. Both modes cut the documents, laid end
to end, every `seq_len` tokens. `"concat"` does so with each source in its own order, once for all,
so that row n is known without reading and the rows can be permuted; `"stream"` with the documents
as the loader's order brings them, so that a row is known once the lengths before it are.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxshard.data._order import Order
from jaxshard.data._sources import RowSource

Array = np.ndarray[Any, Any]

logger = logging.getLogger("jaxshard")

_MANY = 1024  # documents that are read at once for their lengths


@dataclasses.dataclass(frozen=True, slots=True)
class Pack:
    """Cut documents of tokens into rows of one length, for `ElasticLoader`.

    A row is a dict of `"tokens"` `[seq_len]`, of the dtype of the documents; `"segment_ids"`, int32
    `[seq_len]`, 1, 2, … for the documents in it, 0 for padding (the convention of T5X and MaxText);
    and `"positions"`, int32 `[seq_len]`, that count from 0 in each segment.

    Args:
      seq_len: tokens in a row.
      mode: `"concat"` lays the documents of each source end to end in their own order, cuts rows,
        and lets the loader permute the *rows*: any batch is found at once, after the lengths of
        all documents are known. `"stream"` takes the *documents* as the loader permutes them and
        cuts as they come: nothing has to be known, and a position is a document and an offset in
        it, but `seek` has to read lengths forward, and `rows` is not known.
      field: the tokens in a document that is a dict, e.g. `"input_ids"`; None where documents are
        the tokens themselves.
      lengths: tokens of each document, int `[documents]` (for a `Mixture` one array for each
        source); None reads every document once at the start (`"concat"`), or as they come.

    Raises:
      ValueError: `seq_len` is not positive, or no such mode.

    Example:
      >>> from jaxshard.data import ElasticLoader, Pack
      >>> documents = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35]]
      >>> batch = next(ElasticLoader(documents, global_batch=2, shuffle=False, pack=Pack(4)))
      >>> batch["tokens"].tolist(), batch["segment_ids"].tolist()
      ([[11, 12, 13, 21], [22, 31, 32, 33]], [[1, 1, 1, 2], [1, 2, 2, 2]])
    """

    seq_len: int
    mode: Literal["concat", "stream"] = "concat"
    field: str | None = None
    lengths: Any = None

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.mode not in {"concat", "stream"}:
            raise ValueError(
                f"Pack: found seq_len={self.seq_len!r}, mode={self.mode!r}\n"
                'hint: Pack(2048, mode="concat" or "stream")'
            )

    def tokens(self, document: Any) -> Array:
        """The tokens of a document, `[length]`.

        Raises:
          ValueError: it is no list of integers.
        """
        if isinstance(document, Mapping) and self.field is None:
            raise ValueError(
                f"Pack: expected documents to be tokens, found dicts with {list(document)}\n"
                f"hint: Pack({self.seq_len}, field={next(iter(document), 'input_ids')!r})"
            )
        if self.field is not None:
            if not isinstance(document, Mapping) or self.field not in document:
                what = list(document) if isinstance(document, Mapping) else type(document).__name__
                raise ValueError(f"Pack: expected {self.field!r} in a document, found {what}")
            document = document[self.field]
        found: Array = np.asarray(document)
        if found.size == 0:
            found = found.astype(np.int64)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ValueError(
                f"Pack: expected a document of integers with one axis, found {found.dtype} with "
                f"the shape {found.shape}\nhint: tokenize first; "
                'Pack(seq_len, field="input_ids") for documents that are dicts'
            )
        return found

    def lengths_of(self, number: int, source: RowSource, sources: int) -> Array | None:
        """The lengths that were given for a source, int64; None if none were.

        Raises:
          ValueError: there are more or fewer than documents.
        """
        if self.lengths is None:
            return None
        given = self.lengths if sources == 1 and _is_flat(self.lengths) else self.lengths[number]
        lengths = np.asarray(given, np.int64)
        if lengths.shape != (source.length,) or (lengths < 0).any():
            raise ValueError(
                f"Pack: expected {source.length:,} lengths of 0 or more for source {number}, found "
                f"the shape {lengths.shape}\nhint: one for each document; leave lengths= out to "
                "have them read"
            )
        return lengths


def _is_flat(lengths: Any) -> bool:
    return np.ndim(lengths[0]) == 0


class Span(NamedTuple):
    """A part of a document: its source, its number, and the tokens `[start, stop)`."""

    source: int
    document: int
    start: int
    stop: int


Row = tuple[Span, ...]


def read_rows(pack: Pack, sources: Sequence[RowSource], rows: Sequence[Row]) -> list[Any]:
    """Rows as dicts of arrays; each document is read once.

    Raises:
      ValueError: a document is shorter than its length said.
    """
    wanted: dict[int, set[int]] = {}
    for span in itertools.chain(*rows):
        wanted.setdefault(span.source, set()).add(span.document)
    documents: dict[tuple[int, int], Array] = {}
    for source, numbers in wanted.items():
        ids = np.array(sorted(numbers), np.int64)
        read = sources[source].rows(ids)
        documents |= {(source, n): pack.tokens(d) for n, d in zip(ids.tolist(), read, strict=True)}
    dtype = np.result_type(*documents.values()) if documents else np.dtype(np.int32)
    return [_lay_out(pack, documents, row, dtype) for row in rows]


def _lay_out(
    pack: Pack, documents: Mapping[tuple[int, int], Array], row: Row, dtype: Any
) -> dict[str, Array]:
    tokens = np.zeros(pack.seq_len, dtype)
    segments = np.zeros(pack.seq_len, np.int32)
    positions = np.zeros(pack.seq_len, np.int32)
    at = 0
    for segment, span in enumerate(row, 1):
        document = documents[span.source, span.document]
        end = at + span.stop - span.start
        if len(document) < span.stop:
            raise ValueError(
                f"Pack: document {span.document} of source {span.source}: expected "
                f"{span.stop:,} tokens or more, found {len(document):,}\n"
                "hint: lengths= are of other documents, or the source has changed"
            )
        tokens[at:end] = document[span.start : span.stop]
        segments[at:end] = segment
        positions[at:end] = np.arange(end - at)
        at = end
    return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def read_lengths(pack: Pack, source: RowSource) -> Array:
    """The length of every document, by reading all of them."""
    logger.info("reading %d documents for their lengths; Pack(lengths=) gives them", source.length)
    lengths = np.zeros(source.length, np.int64)
    for start in range(0, source.length, _MANY):
        ids = np.arange(start, min(start + _MANY, source.length))
        lengths[ids] = [len(pack.tokens(document)) for document in source.rows(ids)]
    return lengths


class Concat:
    """The rows of one source whose documents lie end to end.

    Args:
      lengths: of the documents.
      seq_len: tokens in a row.
      source: number of the source.
      keep_last: whether the last row may be shorter; else its tokens are left out.
    """

    def __init__(self, lengths: Array, seq_len: int, source: int, *, keep_last: bool) -> None:
        self._ends = np.cumsum(lengths)
        self._seq_len = seq_len
        self._source = source
        self.tokens = int(self._ends[-1])
        self.length = -(-self.tokens // seq_len) if keep_last else self.tokens // seq_len

    def row(self, number: int) -> Row:
        """What is in a row."""
        at = number * self._seq_len
        end = min(at + self._seq_len, self.tokens)
        document = int(np.searchsorted(self._ends, at, "right"))
        spans = []
        while at < end:
            begin = int(self._ends[document - 1]) if document else 0
            until = min(int(self._ends[document]), end)
            if until > at:
                spans.append(Span(self._source, document, at - begin, until - begin))
            at = until
            document += 1
        return tuple(spans)


class Cursor(NamedTuple):
    """Where a stream is: documents that lie behind it, and the offset in the next one."""

    document: int = 0
    offset: int = 0


class Stream:
    """The rows of documents that come one after another.

    Args:
      order: of the documents.
      seq_len: tokens in a row.
      length_of: tokens of a document, by source and number.
      keep_last: whether the last row may be shorter; else its tokens are left out.
    """

    def __init__(
        self, order: Order, seq_len: int, length_of: Callable[[int, int], int], *, keep_last: bool
    ) -> None:
        self._order = order
        self._seq_len = seq_len
        self._length_of = length_of
        self._keep_last = keep_last
        self._block = functools.lru_cache(maxsize=2)(self._documents)

    def take(self, cursor: Cursor, rows: int) -> tuple[list[Row], Cursor]:
        """The next rows, fewer at the end of the stream, and where that leads to."""
        out: list[Row] = []
        while len(out) < rows:
            row, after = self._row(cursor)
            full = sum(span.stop - span.start for span in row) == self._seq_len
            if not row or not (full or self._keep_last):
                break
            out.append(row)
            cursor = after
        return out, cursor

    def _row(self, cursor: Cursor) -> tuple[Row, Cursor]:
        spans: list[Span] = []
        document, offset = cursor
        missing = self._seq_len
        empty = 0
        while missing and (self._order.total is None or document < self._order.total):
            source, number = self._at(document)
            length = self._length_of(source, number)
            part = min(missing, length - offset)
            if part:
                spans.append(Span(source, number, offset, offset + part))
                missing -= part
            empty = 0 if length else empty + 1
            if empty > sum(self._order.lengths):
                raise ValueError("Pack: all documents are empty\nhint: is the field the right one?")
            offset += part
            if offset == length:
                document, offset = document + 1, 0
        return tuple(spans), Cursor(document, offset)

    def _at(self, document: int) -> tuple[int, int]:
        sources, numbers = self._block(document // _MANY)
        return sources[document % _MANY], numbers[document % _MANY]

    def _documents(self, block: int) -> tuple[list[int], list[int]]:
        end = (block + 1) * _MANY
        if self._order.total is not None:
            end = min(end, self._order.total)
        sources, numbers = self._order.at(np.arange(block * _MANY, end))
        return sources.tolist(), numbers.tolist()
