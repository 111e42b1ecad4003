"""Packed rows hold every token once, in order, and any of them is found without those before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.data import ElasticLoader, Mixture, Pack
from jaxshard.data._order import Order
from jaxshard.data._pack import Concat, Cursor, Stream

LENGTHS = st.lists(st.integers(0, 23), min_size=1, max_size=30).filter(any)


def documents(lengths: list[int]) -> list[np.ndarray]:
    """Documents whose tokens are all different."""
    ends = np.cumsum(lengths)
    return [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]


def stream(lengths: list[int], seq_len: int, **kwargs: object) -> Stream:
    order = Order([len(lengths)], [1], seed=0, shuffle=False, epochs=1)
    return Stream(order, seq_len, lambda _, n: lengths[n], keep_last=True, **kwargs)


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_rows_of_documents_end_to_end_hold_every_token_once(lengths, seq_len):
    concat = Concat(np.array(lengths), seq_len, 0, keep_last=True)
    spans = [span for n in range(concat.length) for span in concat.row(n)]
    tokens = [t for s in spans for t in documents(lengths)[s.document][s.start : s.stop]]
    assert tokens == list(range(sum(lengths)))
    sizes = [sum(s.stop - s.start for s in concat.row(n)) for n in range(concat.length)]
    assert set(sizes[:-1]) <= {seq_len}
    assert sum(sizes) == concat.tokens == sum(lengths)
    shorter = Concat(np.array(lengths), seq_len, 0, keep_last=False)
    assert shorter.length == sum(lengths) // seq_len


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 5))
def test_a_stream_cuts_the_same_rows_from_any_cursor(lengths, seq_len, step):
    whole, _ = stream(lengths, seq_len).take(Cursor(), 10_000)
    concat = Concat(np.array(lengths), seq_len, 0, keep_last=True)
    assert whole == [concat.row(n) for n in range(concat.length)]
    cursor, found = Cursor(), []
    while True:
        rows, cursor = stream(lengths, seq_len).take(cursor, step)  # begun anew each time
        if not rows:
            break
        found += rows
    assert found == whole


def test_a_document_of_many_rows_is_cut_in_its_middle():
    rows, cursor = stream([100], 8).take(Cursor(), 3)
    assert [(s.start, s.stop) for (s,) in rows] == [(0, 8), (8, 16), (16, 24)]
    assert cursor == Cursor(0, 24)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.sampled_from(["concat", "stream"]), st.integers(0, 3))
def test_a_loader_gives_every_token_once(lengths, seq_len, mode, seed):
    loader = ElasticLoader(
        documents(lengths), global_batch=2, epochs=1, seed=seed, drop_remainder=False,
        pack=Pack(seq_len, mode), prefetch=0,
    )  # fmt: skip
    tokens = []
    for batch in loader:
        real = batch["mask"][:, None] & (batch["segment_ids"] > 0)
        tokens += batch["tokens"][real].tolist()
        for segments, positions in zip(batch["segment_ids"], batch["positions"], strict=True):
            for segment in set(segments.tolist()) - {0}:
                inside = positions[segments == segment].tolist()
                assert inside == list(range(len(inside)))
    assert sorted(tokens) == list(range(sum(lengths)))


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 6), st.data())
def test_seeking_is_as_running_there(lengths, seq_len, data):
    def make() -> ElasticLoader:
        return ElasticLoader(
            Mixture([(documents(lengths), 2), (documents([7, 1, 4]), 1)]),
            global_batch=2, pack=Pack(seq_len, mode), drop_remainder=False, prefetch=0,
        )  # fmt: skip

    mode = data.draw(st.sampled_from(["concat", "stream"]))
    k = data.draw(st.integers(0, 12))
    ran, sought, restored = make(), make(), make()
    for _ in range(k):
        next(ran)
    sought.seek(k)
    restored.set_state(ran.get_state())
    assert sought.state == ran.state == restored.state
    want = next(ran)["tokens"].tolist()
    assert next(sought)["tokens"].tolist() == next(restored)["tokens"].tolist() == want


def test_lengths_that_are_given_are_not_read():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            Counted.reads += 1
            return super().__getitem__(index)

    lengths = [5, 9, 2, 30]
    source = Counted(documents(lengths))
    loader = ElasticLoader(
        source, global_batch=1, shuffle=False, prefetch=0, pack=Pack(4, lengths=lengths)
    )
    assert Counted.reads == 0
    loader.seek(5)
    next(loader)
    assert Counted.reads == 1
    with pytest.raises(ValueError, match=r"expected 4 lengths of 0 or more for source 0"):
        ElasticLoader(source, global_batch=1, pack=Pack(4, lengths=[1, 2]))


def test_a_document_that_is_shorter_than_its_length_is_an_error():
    loader = ElasticLoader(
        documents([5, 9]), global_batch=1, shuffle=False, pack=Pack(4, lengths=[5, 12])
    )
    with pytest.raises(ValueError, match="document 1 of source 0: expected 11 tokens or more"):
        list(loader)


@pytest.mark.parametrize(
    ("pack", "source", "message"),
    [
        (Pack(4), [{"ids": [1, 2, 3, 4]}], r"dicts with .*\nhint: Pack\(4, field='ids'\)"),
        (Pack(4, field="text"), [{"input_ids": [1] * 4}], "expected 'text' in a document"),
        (Pack(4), [[0.5, 1.0, 2.0, 3.0]], "expected a document of integers with one axis"),
        (Pack(4), [np.zeros((2, 2), int)], "with the shape"),
        (Pack(9), [[1, 2, 3]], "has 3 tokens in all, too few for a row of 9"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused(pack, source, message):
    with pytest.raises(ValueError, match=message):
        list(ElasticLoader(source, global_batch=1, pack=pack, epochs=1))


@pytest.mark.parametrize("mode", ["concat", "stream"])
def test_documents_without_tokens_do_no_harm(mode):
    source = [[], [1, 2], [], [], [3], []]
    pack = Pack(2, mode)
    loader = ElasticLoader(source, global_batch=1, shuffle=False, pack=pack, epochs=1)
    assert [b["tokens"].tolist() for b in loader] == [[[1, 2]]]
    with pytest.raises(ValueError, match=r"documents are empty|0 tokens in all"):
        next(ElasticLoader([[], []], global_batch=1, pack=pack))


def test_tokens_in_a_field_of_documents():
    source = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    loader = ElasticLoader(
        source, global_batch=1, shuffle=False, pack=Pack(5, field="input_ids"), epochs=1
    )
    assert next(loader)["tokens"].tolist() == [[1, 2, 3, 4, 5]]


def test_each_source_of_a_mixture_is_packed_by_itself():
    a, b = [[1, 2, 3], [4]], [[10, 11], [12, 13, 14, 15, 16, 17]]
    mixture = Mixture([(a, 1), (b, 1)])
    loader = ElasticLoader(
        mixture, global_batch=2, shuffle=False, pack=Pack(4), epochs=1,
    )  # fmt: skip
    assert next(loader)["tokens"].tolist() == [[1, 2, 3, 4], [10, 11, 12, 13]]
    lengths = [[3, 1], [2, 6]]
    given = ElasticLoader(
        mixture, global_batch=2, shuffle=False, pack=Pack(4, lengths=lengths), epochs=1
    )
    assert next(given)["tokens"].tolist() == [[1, 2, 3, 4], [10, 11, 12, 13]]


def test_what_is_no_packing_is_refused():
    for bad in (lambda: Pack(0), lambda: Pack(4, "best-fit")):
        with pytest.raises(ValueError, match=r'hint: Pack\(2048, mode="concat" or "stream"\)'):
            bad()
