"""Pieces and tiles fit each other, the shards and the limits; equal arrays have equal tiles."""

import math

import hypothesis.strategies as st
import pytest
from covering import covers_exactly_once
from hypothesis import given, settings

from jaxshard._boxes import Box, Lattice
from jaxshard._grid import TILE_BYTES, choose

MIB = 1 << 20
PIECE = 64 * MIB


@st.composite
def arrays(draw):
    """(shape, partitions, itemsize, piece_bytes_max, writers)."""
    rank = draw(st.integers(0, 4))
    partitions = tuple(draw(st.sampled_from([1, 1, 2, 3, 4, 8])) for _ in range(rank))
    side = st.sampled_from([1, 2, 3, 5, 7, 8, 11, 13, 64, 97, 101, 127, 128, 251, 1000, 1009])
    shape = tuple(draw(side) * p for p in partitions)
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    limit = draw(st.sampled_from([1, 64, 1000, 4096, MIB, PIECE]))
    return shape, partitions, itemsize, limit, draw(st.sampled_from([1, 1, 2, 3, 8, 11]))


def grid_of(case):
    shape, partitions, itemsize, limit, writers = case
    return choose(shape, partitions, itemsize, piece_bytes_max=limit, writers=writers)


many = settings(derandomize=True, deadline=None, max_examples=150)


@many
@given(arrays())
def test_a_tile_divides_its_piece_and_both_have_elements(case):
    piece, tile = grid_of(case)
    assert all(t >= 1 and p % t == 0 for p, t in zip(piece, tile, strict=True))
    assert len(piece) == len(case[0])


@many
@given(arrays())
def test_along_a_sharded_axis_a_piece_divides_the_shard(case):
    shape, partitions, *_ = case
    for n, parts, side in zip(shape, partitions, grid_of(case).piece, strict=True):
        if parts > 1:
            assert (n // parts) % side == 0


@many
@given(arrays())
def test_no_piece_reaches_over_the_edge_of_a_shard(case):
    shape, partitions, *_ = case
    pieces = Lattice(shape, grid_of(case).piece)
    shards = Lattice(shape, tuple(n // p for n, p in zip(shape, partitions, strict=True)))
    if pieces.size <= 200:
        boxes = [pieces.box(i) for i in range(pieces.size)]
        assert all(len(list(shards.touching(box))) == 1 for box in boxes)
        assert covers_exactly_once(boxes, Box.whole(shape))


def is_smooth(n):
    for p in (2, 3, 5, 7):
        while n % p == 0:
            n //= p
    return n == 1


@many
@given(arrays())
def test_tiles_and_pieces_keep_the_limits_where_the_shard_has_divisors(case):
    shape, partitions, itemsize, limit, writers = case
    piece, tile = grid_of(case)
    shard = [n // p for n, p in zip(shape, partitions, strict=True)]
    if all(is_smooth(n) for n, p in zip(shard, partitions, strict=True) if p > 1):
        share = -(-math.prod(shard) * itemsize // writers)
        assert math.prod(tile) * itemsize <= max(min(TILE_BYTES, limit), itemsize)
        assert math.prod(piece) * itemsize <= max(min(limit, share), math.prod(tile) * itemsize)


@many
@given(arrays())
def test_an_unsharded_array_keeps_the_limits_always(case):
    shape, _, itemsize, limit, _ = case
    piece, tile = choose(shape, (1,) * len(shape), itemsize, piece_bytes_max=limit)
    assert math.prod(tile) * itemsize <= max(min(TILE_BYTES, limit), itemsize)
    assert math.prod(piece) * itemsize <= max(limit, itemsize)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0, 3), (0, 0)])
def test_an_array_without_elements_has_a_grid_of_positive_sides(shape):
    piece, tile = choose(shape, (1,) * len(shape), 4, piece_bytes_max=PIECE)
    assert piece == tile == tuple(max(1, n) for n in shape)


def test_a_0d_array_is_one_piece_of_one_tile():
    assert choose((), (), 4, piece_bytes_max=PIECE) == ((), ())


def test_a_small_array_is_one_piece_of_one_tile():
    assert choose((30, 7), (1, 1), 4, piece_bytes_max=PIECE) == ((30, 7), (30, 7))


MESHES = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (8, 1), (1, 8), (2, 4), (4, 2)]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (8192, 2048), (1024, 16384), (32768, 1024), (64, 512, 2048)]
)
def test_power_of_two_shapes_have_the_same_tiles_wherever_those_fit_into_a_shard(shape, itemsize):
    wanted = choose(shape, (1,) * len(shape), itemsize, piece_bytes_max=PIECE).tile
    for mesh in MESHES:
        partitions = (*mesh, 1)[: len(shape)]
        shard = tuple(n // p for n, p in zip(shape, partitions, strict=True))
        if all(s >= t for s, t in zip(shard, wanted, strict=True)):
            assert choose(shape, partitions, itemsize, piece_bytes_max=PIECE).tile == wanted


@pytest.mark.parametrize(
    "shape",
    [(4096, 4096), (8192, 2048), (2048, 8192), (5120, 13824), (4096, 11008), (3072, 12288)],
)
def test_tiles_of_model_shapes_are_the_same_on_most_meshes(shape):
    tiles = [choose(shape, mesh, 2, piece_bytes_max=PIECE).tile for mesh in MESHES]
    assert max(tiles.count(t) for t in tiles) > len(tiles) / 2


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("partitions", MESHES)
@pytest.mark.parametrize("shape", [(8192, 8192), (16384, 4096), (4096, 16384), (50304, 4096)])
def test_tiles_are_near_square(shape, partitions, itemsize):
    tile = choose(shape, partitions, itemsize, piece_bytes_max=PIECE).tile
    assert max(tile) <= 4 * min(tile)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(8192, 8192), (16384, 8192), (8192, 65536)])
def test_eight_readers_of_an_eighth_read_no_more_than_they_need(shape, axis):
    tile = choose(shape, (1, 1), 4, piece_bytes_max=PIECE).tile
    lattice = Lattice(shape, tile)
    part = tuple(n // 8 if d == axis else n for d, n in enumerate(shape))
    boxes = [
        Box(tuple(i * n if d == axis else 0 for d, n in enumerate(part)), part) for i in range(8)
    ]
    read = sum(lattice.box(t).size for box in boxes for t in lattice.touching(box))
    assert read == math.prod(shape)


@pytest.mark.parametrize("prime", [1_000_003, 999_983])
def test_a_long_prime_shard_is_taken_whole(prime):
    piece, tile = choose((2 * prime,), (2,), 8, piece_bytes_max=PIECE)
    assert piece == tile == (prime,)
    assert choose((2 * prime,), (2,), 8, piece_bytes_max=MIB).piece == (prime,)


def test_a_long_prime_axis_that_is_not_sharded_is_cut_like_any_other():
    piece, tile = choose((1_000_003,), (1,), 8, piece_bytes_max=MIB)
    assert tile[0] * 8 <= MIB
    assert piece[0] * 8 <= MIB
    assert piece[0] * 8 >= MIB / 4


def test_a_prime_axis_beside_a_smooth_one_costs_no_limit():
    piece, tile = choose((4 * 1009, 4096), (4, 1), 4, piece_bytes_max=PIECE)
    assert math.prod(tile) * 4 <= TILE_BYTES
    assert 1009 % piece[0] == 0


@pytest.mark.parametrize("limit", [1, 4096, MIB, 8 * MIB, PIECE])
def test_pieces_are_as_large_as_the_limit_allows(limit):
    shape = (8192, 8192)
    piece, _ = choose(shape, (2, 2), 4, piece_bytes_max=limit)
    nbytes = math.prod(piece) * 4
    assert nbytes <= max(4, limit)
    assert nbytes * 2 > min(limit, 64 * MIB)


def test_pieces_are_cut_along_the_first_axes_to_stay_contiguous():
    piece, tile = choose((16384, 4096), (1, 1), 4, piece_bytes_max=PIECE)
    assert piece[1] == 4096
    assert piece[0] < 16384
    assert tile[0] <= piece[0]


@pytest.mark.parametrize("writers", [2, 3, 4, 8])
def test_a_shard_with_several_holders_is_cut_so_that_each_can_write_a_part(writers):
    piece, _ = choose((4096, 4096), (1, 1), 4, piece_bytes_max=PIECE, writers=writers)
    assert Lattice((4096, 4096), piece).size >= writers


@pytest.mark.parametrize("shape", [(6, 10), (7,), (2, 3, 5)])
def test_a_limit_of_one_byte_gives_pieces_of_one_element(shape):
    piece, tile = choose(shape, (1,) * len(shape), 4, piece_bytes_max=1)
    assert piece == tile == (1,) * len(shape)


def test_a_grid_of_a_huge_array_is_found_quickly():
    piece, tile = choose((1 << 45, 3 << 20), (1 << 12, 1), 2, piece_bytes_max=PIECE)
    assert math.prod(piece) * 2 <= PIECE
    assert math.prod(tile) * 2 <= TILE_BYTES
