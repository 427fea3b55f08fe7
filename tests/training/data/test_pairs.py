"""Batches of pairs."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.training.batch import Share, num_tokens
from jaxformer.training.data.pairs import PairBatches

END = 0
ids = st.lists(st.integers(1, 50), min_size=1, max_size=30)
pairs = st.lists(st.tuples(ids, ids), min_size=1, max_size=40)


def pairs_in(batch):
    """Yields (source, target) for each sequence of a batch that is not padding."""
    for index in range(batch.inputs.shape[1]):
        weights, real = batch.weights[0, index], batch.segment_ids[0, index]
        if not weights.any():
            continue
        inputs = batch.inputs[0, index][real == 1].tolist()
        targets = batch.targets[0, index][weights == 1].tolist()
        assert inputs == [END, *targets[:-1]] and targets[-1] == END
        source = batch.source[0, index][batch.source_segment_ids[0, index] == 1].tolist()
        yield tuple(source), tuple(targets[:-1])


@given(pairs=pairs, seed=st.integers(0, 5), num_buckets=st.integers(1, 4))
def test_epoch_of_pair_batches_contains_every_pair_once(pairs, seed, num_buckets):
    """Every epoch contains every pair exactly once, in a different order.

    The end-of-text token precedes the inputs and ends the targets. Padding has weight 0.
    """
    batches = PairBatches(pairs, 40, END, seed, num_buckets)
    wanted = Counter((tuple(source), tuple(target)) for source, target in pairs)
    for epoch in range(2):
        found = Counter()
        while found.total() < len(pairs):
            batch = next(batches)
            assert batches.epoch == epoch
            assert batch.inputs.shape[2] in batches.widths
            assert batch.inputs.shape[2] <= max(len(side) + 1 for pair in pairs for side in pair)
            a_source = batch.source_segment_ids.any(axis=2)
            assert (
                a_source == batch.segment_ids.any(axis=2)
            ).all()  # a padding sequence has neither side
            assert not batch.weights[batch.segment_ids == 0].any()
            found.update(pairs_in(batch))
        assert found == wanted


@given(
    pairs=st.lists(st.tuples(ids, ids), min_size=9, max_size=40),
    seed=st.integers(0, 5),
    multiple=st.integers(2, 9),
    accumulate=st.sampled_from([1, 3]),
)
def test_batches_contain_the_same_pairs_for_any_number_of_devices(
    pairs, seed, multiple, accumulate
):
    """Micro-batches contain the same pairs for any `multiple`, with more padding.

    The losses are therefore equal, and a run that one device saved continues on several devices.
    """
    one, many = (
        PairBatches(pairs, 64, END, seed, 1, accumulate=accumulate, multiple=number)
        for number in (1, multiple)
    )
    for _ in range(5):
        few, filled = next(one), next(many)
        number = few.inputs.shape[1]
        assert filled.inputs.shape[1] % multiple == 0 and num_tokens(few) == num_tokens(filled)
        for x, y in zip(few, filled, strict=True):
            np.testing.assert_array_equal(x, y[:, :number])
        assert not filled.segment_ids[:, number:].any()
        for batches, batch in ((one, few), (many, filled)):
            assert batch.inputs.shape in [shape.inputs.shape for shape in batches.shapes()]
    many.restore(one.state())


@given(pairs=pairs, seed=st.integers(0, 5), steps=st.integers(0, 30))
def test_a_restored_iterator_continues_with_the_same_batches(pairs, seed, steps):
    """A new iterator with the saved state continues with the same batches."""
    first = PairBatches(pairs, 64, END, seed)
    for _ in range(steps):
        next(first)
    second = PairBatches(pairs, 64, END, seed)
    second.restore(first.state())
    for _ in range(3):
        for one, other in zip(next(first), next(second), strict=True):
            np.testing.assert_array_equal(one, other)


def test_seed_determines_the_order_of_training_pairs():
    many = [([i + 1], [i + 1]) for i in range(50)]
    orders = [
        [pair for batch in range(3) for pair in pairs_in(next(batches))]
        for batches in (PairBatches(many, 64, END, seed) for seed in (0, 0, 1))
    ]
    assert orders[0] == orders[1] != orders[2]


def test_pair_batches_reject_invalid_pairs():
    for given_pairs, tokens, message in (
        ([], 8, "pairs is empty"),
        ([([1], [2]), ([1], [])], 8, "one side of pair 2 is empty"),
        (
            [([1] * 9, [2])],
            8,
            "pair 1 has 9 tokens on a side; a sequence of a batch holds at most 8",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            PairBatches(given_pairs, tokens, END)


@given(
    pairs=pairs,
    seed=st.integers(0, 5),
    count=st.sampled_from([1, 2, 3]),
    accumulate=st.sampled_from([1, 2]),
)
def test_concatenated_pair_batches_of_processes_equal_the_batch_of_one_process(
    pairs, seed, count, accumulate
):
    def read(share):
        how = {"accumulate": accumulate, "multiple": count, "share": share}
        return PairBatches(pairs, 200, END, seed, **how)

    one, parts = read(Share()), [read(Share(index, count)) for index in range(count)]
    for _ in range(3):
        shares = [next(part) for part in parts]
        for name, whole in next(one)._asdict().items():
            together = np.concatenate([getattr(share, name) for share in shares], axis=1)
            assert np.array_equal(together, whole)
        assert all(part.state() == one.state() for part in parts)
