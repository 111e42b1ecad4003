"""From the shape of an array and how it is sharded to pieces and tiles.

A tile is what can be read on its own (about 2 MiB, near-square, so that a split along any axis
reads little more than it needs); a piece is what one device writes (one file). TensorStore knows
regular grids only, so along a sharded axis the piece divides the shard, and along any axis the
tile divides the piece. Tiles are chosen from the shape of the array alone wherever the shards
allow it, so that the same array has the same tiles on most meshes. Pure.

Format: docs/format.md, "Grid".
"""

import math
from typing import NamedTuple

TILE_BYTES = 2 << 20
_SMALL_PRIMES = (2, 3, 5, 7)


class Grid(NamedTuple):
    """Shapes of pieces and tiles, in stored elements; cells at the far edge are clipped."""

    piece: tuple[int, ...]
    tile: tuple[int, ...]


def choose(
    shape: tuple[int, ...],
    partitions: tuple[int, ...],
    itemsize: int,
    *,
    piece_bytes_max: int,
    writers: int = 1,
) -> Grid:
    """Pieces and tiles of one array.

    Args:
      shape: of the array; `[*shape]` stored elements.
      partitions: into how many shards each axis is cut; divides the shape.
      itemsize: bytes of one stored element.
      piece_bytes_max: upper limit of a piece, as far as its shard has a divisor that fits.
      writers: processes that hold each shard; the shard is cut so that each can write a part.
    """
    if 0 in shape:
        return Grid(_at_least_one(shape), _at_least_one(shape))
    shard = tuple(n // p for n, p in zip(shape, partitions, strict=True))
    tile_bytes = min(TILE_BYTES, piece_bytes_max)
    tile = _tile(shape, shard, max(1, tile_bytes // itemsize))
    shard_bytes = math.prod(shard) * itemsize
    piece_bytes = min(piece_bytes_max, -(-shard_bytes // writers))
    piece = _piece(shape, shard, tile, max(1, piece_bytes // itemsize))
    return Grid(piece, tuple(map(min, tile, piece)))


def _at_least_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, n) for n in shape)


def _tile(shape: tuple[int, ...], shard: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """The tile that the shape alone suggests, then what the shards allow of it, axis by axis."""
    fixed: dict[int, int] = {}
    tile = shape
    while True:
        # Once an axis is fixed, the others may grow a little to make up for it, not without end:
        # a tile as wide as the array would make every split of that axis read everything.
        side = 2 * math.isqrt(elements)
        free = tuple(min(n, max(t, side)) if fixed else n for n, t in zip(shape, tile, strict=True))
        tile = _near_square(_shrunk_to(shape, free), fixed, elements)
        misfit = [d for d in range(len(shape)) if shard[d] < shape[d] and shard[d] % tile[d]]
        if not misfit:
            return tile
        for d in misfit:
            fixed[d] = _fitting(tile[d], shard[d])


def _shrunk_to(shape: tuple[int, ...], limits: tuple[int, ...]) -> tuple[int, ...]:
    """Sides reached by shrinking, not above the limits: so that they still divide the shape."""
    sides = list(shape)
    for d, limit in enumerate(limits):
        while sides[d] > limit:
            sides[d] = _shrink(sides[d])
    return tuple(sides)


def _near_square(shape: tuple[int, ...], fixed: dict[int, int], elements: int) -> tuple[int, ...]:
    """Shrink the longest free side until the tile has at most `elements`; earlier axes first."""
    tile = [fixed.get(d, n) for d, n in enumerate(shape)]
    while math.prod(tile) > elements:
        free = [d for d in range(len(tile)) if d not in fixed and tile[d] > 1]
        if not free:
            break
        longest = max(free, key=lambda d: tile[d])
        tile[longest] = _shrink(tile[longest])
    return tuple(tile)


def _shrink(n: int) -> int:
    """The next shorter side: by the smallest prime that divides it, else half, rounded up."""
    return next((n // p for p in _SMALL_PRIMES if n % p == 0), -(-n // 2))


def _fitting(wanted: int, shard: int) -> int:
    """A divisor of the shard's length near the wanted one; the whole shard if there is none.

    The common divisor keeps tile edges where other meshes have them; it is taken unless it is
    much smaller than another divisor would be.
    """
    common = math.gcd(wanted, shard)
    if common * 4 >= wanted:
        return common
    best = max((d for d in _divisors(shard) if d <= wanted), default=1)
    return best if best * 16 >= wanted or shard <= wanted else shard


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in low]


def _piece(
    shape: tuple[int, ...], shard: tuple[int, ...], tile: tuple[int, ...], elements: int
) -> tuple[int, ...]:
    """As many tiles as fit in `elements`; the shard is cut along its first axes first.

    Cutting first axes keeps a piece contiguous in memory as far as that is possible.
    """
    piece = [min(-(-s // t) * t, s if s < n else -(-s // t) * t)
             for n, s, t in zip(shape, shard, tile, strict=True)]  # fmt: skip
    for d in range(len(piece)):
        if math.prod(piece) <= elements:
            break
        tiles = piece[d] // tile[d]
        most = max(1, elements * piece[d] // (math.prod(piece) * tile[d]))  # tiles that fit
        if shard[d] < shape[d]:  # sharded: the piece must divide the shard
            piece[d] = max(n for n in _divisors(tiles) if n <= most) * tile[d]
        else:
            piece[d] = -(-tiles // -(-tiles // most)) * tile[d]  # as equal as they can be
    # A piece that is a whole axis need not be longer than it (one tile, clipped, is the array).
    return tuple(n if p >= n and t >= n else p for p, n, t in zip(piece, shape, tile, strict=True))
