"""Tables come back as they were written; a table that does not fit together is damage."""

import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from jaxshard._errors import CorruptionError
from jaxshard._table import DIGEST, ENTRY, PIECE, Table, digest_of, leaf_digest

quick = settings(derandomize=True, deadline=None, max_examples=60)
u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
digests = st.binary(min_size=16, max_size=16)


@st.composite
def tables(draw):
    pieces = draw(st.lists(st.tuples(u32, u32, u64, u64), max_size=4))
    tiles = draw(st.lists(digests, max_size=4))
    segment = draw(st.sampled_from([64, 128, 64 << 20]))
    entries, offset = [], 0
    for nbytes in draw(st.lists(st.integers(1, 64), max_size=4)):
        entries.append((draw(u32), 0, draw(u64), offset, nbytes, draw(digests)))
        offset += 64
    return Table(
        draw(u32),
        np.array(pieces, PIECE),
        np.frombuffer(b"".join(tiles), DIGEST),
        np.array(entries, ENTRY),
        segment if entries else 0,
        -(-offset // segment),
    )


def parts(table):
    arrays = (table.pieces, table.digests, table.entries)
    return table.process, *(a.tobytes() for a in arrays), table.segment_bytes, table.segments


@quick
@given(tables())
def test_a_table_comes_back_as_it_was_written(table):
    assert parts(Table.from_bytes(table.to_bytes(), "t")) == parts(table)


@quick
@given(tables())
def test_its_length_is_that_of_the_documentation(table):
    wanted = 56 + 24 * len(table.pieces) + 16 * len(table.digests) + 48 * len(table.entries)
    assert len(table.to_bytes()) == wanted


def small():
    pieces = np.array([(0, 2, 0, 100), (0, 1, 1, 60), (3, 1, 0, 8)], PIECE)
    entries = np.array([(7, 0, 5, 64, 12, b"e" * 16)], ENTRY)
    return Table(9, pieces, np.frombuffer(b"0123456789abcdef" * 4, DIGEST), entries, 128, 1)


def test_the_bytes_are_those_of_the_documentation():
    assert small().to_bytes() == b"".join(
        [
            b"JXSTABL1",
            struct.pack("<IIQQQQQ", 9, 0, 3, 4, 1, 128, 1),
            struct.pack("<IIQQ", 0, 2, 0, 100),
            struct.pack("<IIQQ", 0, 1, 1, 60),
            struct.pack("<IIQQ", 3, 1, 0, 8),
            b"0123456789abcdef" * 4,
            struct.pack("<IIQQQ", 7, 0, 5, 64, 12),
            b"e" * 16,
        ]
    )


def test_the_first_digest_of_each_piece_follows_those_of_the_pieces_before():
    assert small().first_digest.tolist() == [0, 2, 3]


@pytest.mark.parametrize("cut", [0, 1, 55, 56, 100, -1])
def test_a_cut_table_is_damaged(cut):
    with pytest.raises(CorruptionError, match=r"table 'a/t.bin' is damaged: (shorter|header)"):
        Table.from_bytes(small().to_bytes()[:cut], "a/t.bin")


@pytest.mark.parametrize("offset", [0, 16, 24, 32])
def test_a_changed_magic_or_count_is_damage(offset):
    data = bytearray(small().to_bytes())
    data[offset] ^= 1
    with pytest.raises(CorruptionError, match="header and length do not agree\nhint: "):
        Table.from_bytes(bytes(data), "t")


def test_counts_that_ask_for_all_memory_are_refused_without_taking_it():
    data = bytearray(small().to_bytes())
    data[16:24] = struct.pack("<Q", (1 << 64) - 1)
    with pytest.raises(CorruptionError, match="header and length do not agree"):
        Table.from_bytes(bytes(data), "t")


def test_bytes_behind_the_end_are_damage():
    with pytest.raises(CorruptionError, match="header and length do not agree"):
        Table.from_bytes(small().to_bytes() + b"\0", "t")


@pytest.mark.parametrize(
    ("segment_bytes", "segments", "entries"),
    [
        (0, 0, [(0, 4)]),
        (128, 0, [(0, 4)]),
        (0, 1, [(0, 4)]),
        (128, 1, []),
        (128, 1, [(0, 129)]),
        (128, 1, [(64, 128)]),
        (128, 1, [(128, 4)]),
        (128, 2, [(64, 128)]),
        (128, 2, [(0, 4)]),
        (128, 2, [(128, 4), (0, 4)]),
        (128, 1, [(0, 65), (64, 4)]),
        (128, 1, [(0, 4), (0, 4)]),
        (128, 1, [((1 << 64) - 64, 64)]),
        (1 << 40, 1 << 40, [(0, 4)]),
        (128, 1, [(0, (1 << 64) - 1)]),
    ],
)
def test_entries_that_do_not_lie_in_the_files_of_the_pack_are_damage(
    segment_bytes, segments, entries
):
    records = np.array([(0, 0, i, at, n, b"e" * 16) for i, (at, n) in enumerate(entries)], ENTRY)
    nothing = np.array([], PIECE), np.array([], DIGEST)
    table = Table(0, *nothing, records, segment_bytes, segments)
    with pytest.raises(CorruptionError, match="entries do not lie in the files of its pack"):
        Table.from_bytes(table.to_bytes(), "t")


# Digests ------------------------------------------------------------------------------------


def test_a_digest_is_the_xxh3_128_that_everybody_computes():
    # Test vector of the reference implementation: the empty input, seed 0.
    assert digest_of(b"").hex() == "99aa06d3014798d86001c324468d497f"


@quick
@given(st.binary(max_size=300))
def test_a_digest_is_that_of_the_bytes_whatever_holds_them(data):
    wanted = xxhash.xxh3_128(data).digest()
    for held in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert digest_of(held) == wanted


@quick
@given(st.lists(st.tuples(u64, digests), max_size=6), st.randoms(use_true_random=False))
def test_the_digest_of_a_leaf_does_not_depend_on_the_order_or_on_who_gives_which_part(tiles, rng):
    mixed = list(tiles)
    rng.shuffle(mixed)
    cut = len(mixed) // 2
    together = (leaf_digest(mixed[:cut]) + leaf_digest(mixed[cut:])) % (1 << 128)
    assert leaf_digest(mixed) == leaf_digest(tiles) == together


def test_two_tiles_that_change_places_give_another_digest():
    a, b = b"a" * 16, b"b" * 16
    assert leaf_digest([(0, a), (1, b)]) != leaf_digest([(0, b), (1, a)])


def test_a_tile_twice_is_not_none_at_all():
    tile = (0, b"a" * 16)
    assert len({leaf_digest([]), leaf_digest([tile]), leaf_digest([tile, tile])}) == 3


def test_the_digest_of_a_leaf_is_that_of_the_documentation():
    tiles = [(0, b"a" * 16), (258, b"b" * 16)]
    one = xxhash.xxh3_128_intdigest(b"\0" * 8 + b"a" * 16)
    other = xxhash.xxh3_128_intdigest(b"\x02\x01" + b"\0" * 6 + b"b" * 16)
    assert leaf_digest(tiles) == (one + other) % 2**128
