"""Parallel text: what is read, what is refused, and what a batch holds."""

import gzip
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.training.pairs import PairBatches, read_pairs

END = 0
ids = st.lists(st.integers(1, 50), min_size=1, max_size=30)
pairs = st.lists(st.tuples(ids, ids), min_size=1, max_size=40)


def rows(batch):
    """(source, target) of each row that counts, read back from what the model is given."""
    for row in range(batch.inputs.shape[1]):
        weights, real = batch.weights[0, row], batch.segments[0, row]
        if not weights.any():
            continue
        inputs = batch.inputs[0, row][real == 1].tolist()
        targets = batch.targets[0, row][weights == 1].tolist()
        assert inputs == [END, *targets[:-1]] and targets[-1] == END
        source = batch.source[0, row][batch.source_segments[0, row] == 1].tolist()
        yield tuple(source), tuple(targets[:-1])


@given(pairs=pairs, seed=st.integers(0, 5), num_buckets=st.integers(1, 4))
def test_an_epoch_has_every_pair_once(pairs, seed, num_buckets):
    """Teacher forcing: the end of text in front of the inputs, behind the targets; no weight on
    padding; nothing dropped, nothing twice, epoch after epoch, in another order."""
    batches = PairBatches(pairs, 40, END, seed, num_buckets)
    wanted = Counter((tuple(source), tuple(target)) for source, target in pairs)
    for epoch in range(2):
        found = Counter()
        while found.total() < len(pairs):
            batch = next(batches)
            assert batches.epoch == epoch
            assert batch.inputs.shape[2] in batches.widths
            assert batch.inputs.shape[2] <= max(len(side) + 1 for pair in pairs for side in pair)
            assert (batch.source_segments.sum(axis=2) > 0).all()  # a source is never all padding
            assert not batch.weights[batch.segments == 0].any()
            found.update(rows(batch))
        assert found == wanted


@given(pairs=pairs, seed=st.integers(0, 5), steps=st.integers(0, 30))
def test_what_comes_is_resumed_where_it_stood(pairs, seed, steps):
    """From the state alone, in a new process as it were, the same batches come."""
    first = PairBatches(pairs, 64, END, seed)
    for _ in range(steps):
        next(first)
    second = PairBatches(pairs, 64, END, seed)
    second.restore(first.state())
    for _ in range(3):
        for one, other in zip(next(first), next(second), strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_order_is_anothers_for_another_seed():
    many = [([i + 1], [i + 1]) for i in range(50)]
    orders = [
        [pair for batch in range(3) for pair in rows(next(batches))]
        for batches in (PairBatches(many, 64, END, seed) for seed in (0, 0, 1))
    ]
    assert orders[0] == orders[1] != orders[2]


def test_files_are_read_line_by_line(tmp_path):
    """Plain and gzip, side by side; a line keeps what is in it."""
    (tmp_path / "a.en").write_text("one\n two, \nthree\n", encoding="utf-8")
    with gzip.open(tmp_path / "a.fr.gz", "wt", encoding="utf-8") as file:
        file.write("un\ndeux\u2028\ntrois")
    assert read_pairs(tmp_path / "a.en", tmp_path / "a.fr.gz") == [
        ("one", "un"),
        (" two, ", "deux\u2028"),
        ("three", "trois"),
    ]


# Whatever Unicode calls the end of a line, and a carriage return, may stand within one.
separators = st.sampled_from("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
pieces = st.one_of(st.text(st.characters(exclude_characters="\n", codec="utf-8")), separators)
lines = st.lists(pieces, min_size=1, max_size=4).map("".join).map(lambda line: f"a{line}z")


@given(lines=st.lists(lines, min_size=1), ends=st.randoms(), packed=st.booleans())
def test_a_line_ends_at_a_line_feed_alone(tmp_path_factory, lines, ends, packed):
    """Or at a carriage return and a line feed; the last one may have no end. So line n of one side
    stands beside line n of the other."""
    path = tmp_path_factory.mktemp("lines") / ("a.gz" if packed else "a")
    text = "".join(line + ends.choice(["\n", "\r\n"]) for line in lines)
    text = text[:-1] if ends.random() < 0.5 and not text.endswith("\r\n") else text
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert read_pairs(path, path) == [(line, line) for line in lines]


@pytest.mark.parametrize(
    "target, message",
    [
        ("un\ndeux\n", "a.en has 3 lines and .*a.fr has 2"),
        ("un\n \ntrois\n", "a.fr: line 2 is empty"),
        ("un\ndeux\n\n", "a.fr: line 3 is empty"),
    ],
)
def test_texts_that_are_not_parallel_are_refused(tmp_path, target, message):
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    (tmp_path / "a.fr").write_text(target)
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / "a.en", tmp_path / "a.fr")


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.en").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    (tmp_path / "not.gz").write_text("plain\n")
    whole = bytearray(gzip.compress(b"one\n"))
    whole[10] = 7  # a kind of block that there is not: zlib's own kind of error
    (tmp_path / "torn.gz").write_bytes(whole)
    for name, message in (
        ("a.en", "there are no lines"),
        ("missing", "missing: not readable"),
        ("bytes", "bytes: not readable"),
        ("not.gz", "not.gz: not readable"),
        ("torn.gz", "torn.gz: not readable"),
    ):
        with pytest.raises(ValueError, match=message):
            read_pairs(tmp_path / name, tmp_path / "a.en")


def test_pairs_that_make_no_batch_are_refused():
    for given_pairs, tokens, message in (
        ([], 8, "there are none"),
        ([([1], [2]), ([1], [])], 8, "one side of number 2 is empty"),
        ([([1] * 9, [2])], 8, "number 1 has 9 tokens on a side; a batch has 8"),
    ):
        with pytest.raises(ValueError, match=message):
            PairBatches(given_pairs, tokens, END)
