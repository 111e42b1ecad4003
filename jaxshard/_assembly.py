"""The host buffers of one wanted leaf, from the first bytes that arrive until it is whole."""

from collections.abc import Callable
from typing import NamedTuple

from jaxshard import _buffers, _dtypes, _plan
from jaxshard._boxes import Box
from jaxshard._buffers import Array
from jaxshard._places import Place
from jaxshard._spec import LeafSpec, layout_of


class Want(NamedTuple):
    """Boxes (in elements of the leaf) that are wanted, and who gets them when they are there."""

    leaf: int
    boxes: list[Box]
    done: Callable[[dict[Box, Array]], None]


class Assembly:
    """The buffers of one want, each allocated when its first bytes are about to arrive.

    Attributes:
      number: of the leaf that holds the data.
      leaf: that leaf.
      layout: its layout.
      stored_boxes: the wanted boxes in stored elements.
      pending: requests that have not come back.
      sealed: whether all requests have been made.
    """

    def __init__(self, number: int, leaf: LeafSpec, want: Want) -> None:
        self.number = number
        self.leaf = leaf
        self.layout = layout_of(leaf)
        self.stored_boxes = tuple(_plan.stored_box(box, self.layout) for box in want.boxes)
        self.pending = 0
        self.sealed = False
        self._want = want
        self._buffers: list[Array | None] = [None] * len(self.stored_boxes)

    def _buffer(self, target: int) -> Array:
        buffer = self._buffers[target]
        if buffer is None:
            dtype = _dtypes.numpy_dtype(self.layout.dtype)
            buffer = _buffers.empty(self.stored_boxes[target].shape, dtype)
            self._buffers[target] = buffer
        return buffer

    def give(self, target: int, values: Array) -> None:
        """Take memory that holds all of one box as its buffer."""
        self._buffers[target] = values

    def targets(self, place: Place) -> list[Array]:
        """For each part of a tile the view of a buffer where it belongs."""
        return [self._buffer(part.target)[part.where] for part in place.parts]

    def arrived(self) -> None:
        """One request has come back."""
        self.pending -= 1
        self.finish_if_whole()

    def seal(self) -> None:
        """All requests have been made."""
        self.sealed = True
        self.finish_if_whole()

    def finish_if_whole(self) -> None:
        """Hand the buffers over once everything is there."""
        if self.pending or not self.sealed:
            return
        buffers = [self._buffer(target) for target in range(len(self._buffers))]
        self._buffers = []
        boxes = self._want.boxes
        if self.layout.per_byte > 1 or self.layout.dtype != self.leaf.dtype:
            buffers = list(map(self._elements, boxes, self.stored_boxes, buffers))
        self._want.done(dict(zip(boxes, buffers, strict=True)))

    def _elements(self, box: Box, stored: Box, buffer: Array) -> Array:
        """Stored elements as elements of the leaf."""
        per_byte, last = self.layout.per_byte, slice(None)
        if per_byte > 1:
            start = box.offset[-1] - stored.offset[-1] * per_byte
            last = slice(start, start + box.shape[-1])
        return _dtypes.from_stored(buffer, str(self.leaf.dtype), per_byte, last)
