"""Windows for training: epochs, order, resuming, several processes and packed documents."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxformer.training.batch import Share
from jaxformer.training.data import windows
from jaxformer.training.data.windows import WindowBatches
from tests.errors import error_of

many_cases = settings(max_examples=5 * settings().max_examples)


# Batches for training

shapes = st.tuples(st.integers(1, 200), st.integers(1, 20), st.integers(1, 9), st.integers(0, 9))


def _batches(shape):
    """Returns batches of a circular stream whose token at index i is i."""
    num_tokens, length, batch_size, seed = shape
    assume(num_tokens > length)
    return WindowBatches(np.arange(num_tokens, dtype=np.uint16), length, batch_size, seed)


def _epochs(batches, length, count):
    """Returns windows of targets, int [count, num_windows, length]."""
    needed = count * batches.num_windows
    targets = []
    while len(targets) < needed:
        targets.extend(next(batches).targets[0])
    return np.reshape(targets[:needed], (count, batches.num_windows, length))


@many_cases
@given(shapes)
def test_each_token_is_a_target_at_most_once_per_epoch(shape):
    num_tokens, length, _, _ = shape
    for epoch in _epochs(_batches(shape), length, 3):
        counts = np.bincount(epoch.ravel(), minlength=num_tokens)
        assert counts.max() == 1
        assert np.sum(counts == 0) == num_tokens % length  # less than one window


@many_cases
@given(shapes)
def test_targets_of_training_windows_are_the_inputs_shifted_by_one(shape):
    num_tokens, length, batch_size, _ = shape
    batches = _batches(shape)
    for _ in range(3):
        inputs, targets = (ids[0] for ids in next(batches)[:2])
        assert inputs.shape == targets.shape == (batch_size, length)
        assert inputs.dtype == targets.dtype == np.int32
        assert type(inputs) is type(targets) is np.ndarray
        window = np.concatenate([inputs, targets[:, -1:]], axis=1)
        assert np.all(np.diff(window, axis=1) % num_tokens == 1)  # successive on the circle
        assert np.array_equal(window[:, 1:], targets)


def test_every_token_is_a_training_target_in_some_epoch():
    epochs = _epochs(WindowBatches(np.arange(10), 4, 2), 4, 30)
    assert set(epochs.ravel()) == set(range(10))


def test_order_and_offset_of_windows_differ_between_epochs_and_seeds():
    tokens = np.arange(1000)
    seeds = [_epochs(WindowBatches(tokens, 10, 7, seed), 10, 3) for seed in range(3)]
    firsts = [epoch[:, 0] for epochs in seeds for epoch in epochs]
    for this in range(len(firsts)):
        assert np.any(np.diff(firsts[this]) % 1000 != 10)  # shuffled
        for other in range(this):
            assert not np.array_equal(firsts[this], firsts[other])
            turned = (firsts[other] + firsts[this][0] - firsts[other][0]) % 1000
            assert not np.array_equal(firsts[this], turned)  # not the same order, rotated
    assert len({int(first.min()) % 10 for first in firsts}) > 3


@many_cases
@given(shapes, st.integers(0, 12), st.integers(0, 12))
def test_batches_resumed_twice_equal_uninterrupted_batches(shape, first, second):
    whole = _batches(shape)
    expected = [next(whole) for _ in range(first + second + 3)]
    received, state = [], None
    for count in first, second, 3:
        batches = _batches(shape)
        if state is not None:
            batches.restore(json.loads(state))
        received += [next(batches) for _ in range(count)]
        state = json.dumps(batches.state())
    for one, other in zip(received, expected, strict=True):
        assert np.array_equal(one[:2], other[:2])


def test_a_window_iterator_restores_any_position():
    batches = WindowBatches(np.arange(100), 5, 3)
    assert iter(batches) is batches
    state = batches.state()
    first = [next(batches) for _ in range(5)]
    batches.restore(state)
    for one, other in zip(first, [next(batches) for _ in range(5)], strict=True):
        assert np.array_equal(one[:2], other[:2])


@pytest.mark.parametrize("changed", ["length", "batch_size", "seed", "corpus", "order"])
def test_iterator_state_of_other_tokens_or_settings_is_rejected(changed):
    tokens = np.arange(100, dtype=np.uint16)
    shape = {"length": 5, "batch_size": 3, "seed": 0}
    batches = WindowBatches(tokens, **shape)
    next(batches)
    state = batches.state()
    if changed in shape:
        other = WindowBatches(tokens, **{**shape, changed: shape[changed] + 1})
        message = (
            f"state has {changed} {shape[changed]}, but this iterator has {shape[changed] + 1}; "
        )
    else:
        other = WindowBatches(tokens[:-1] if changed == "corpus" else tokens[::-1], **shape)
        message = "state has corpus '"
    before = other.state()
    assert error_of(other.restore, state).startswith(message)
    assert other.state() == before


def test_an_empty_iterator_state_is_rejected():
    batches = WindowBatches(np.arange(100), 5, 3)
    assert error_of(batches.restore, {}).startswith(
        "state has length None, but this iterator has 5; "
    )


def test_a_corpus_shorter_than_a_window_is_rejected():
    assert error_of(WindowBatches, np.arange(64), 64, 1) == (
        "the text has 64 tokens, but one window of length 64 needs 65; "
        "give more text or a smaller length"
    )
    assert next(WindowBatches(np.arange(65), 64, 8)).inputs.shape == (1, 8, 64)


@pytest.mark.parametrize(
    "name, value, least", [("length", 0, 1), ("batch_size", 0, 1), ("seed", -1, 0)]
)
def test_window_sizes_out_of_range_are_rejected(name, value, least):
    shape = {"length": 5, "batch_size": 3, "seed": 0, name: value}
    message = f"{name} is {value}; it must be at least {least}"
    assert error_of(lambda: WindowBatches(np.arange(100), **shape)) == message


@many_cases
@given(shapes, st.integers(1, 9))
def test_windows_of_a_large_text_are_shuffled_in_blocks(shape, block):
    """Only the order of one block is in memory, and each token is still a target once per epoch.

    With a single block, the order is the same as in a version without blocks.
    """
    num_tokens, length, _, _ = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "BLOCK", block)
        batches = _batches(shape)
        epochs = _epochs(batches, length, 2)
        assert len(batches._block(0, 0, -(-batches.num_windows // block))[1]) <= block
    for epoch in epochs:
        counts = np.bincount(epoch.ravel(), minlength=num_tokens)
        assert counts.max() == 1 and np.sum(counts == 0) == num_tokens % length
    if batches.num_windows <= block:
        assert np.array_equal(epochs, _epochs(_batches(shape), length, 2))


def test_random_numbers_of_a_range_equal_that_slice_of_the_whole_sequence():
    """Each block therefore uses different random words, for any start."""
    batches = WindowBatches(np.arange(100), 2, 1)
    words = batches._words(3, 0, 51)
    assert all(np.array_equal(batches._words(3, at, 5), words[at : at + 5]) for at in range(46))


def test_order_of_windows_is_the_same_in_every_jaxformer_version():
    """A run of an earlier version continues with the same batches."""
    batches = WindowBatches(np.arange(1000), 7, 5, 3)
    starts = [next(batches).inputs[0, :, 0].tolist() for _ in range(60)]
    assert starts[0] == [188, 496, 489, 859, 118] and starts[-1] == [188, 34, 670, 146, 244]
    batches.restore({**batches.state(), "iterator": {"next_index": 59}})
    assert next(batches).inputs[0, :, 0].tolist() == starts[-1]


# Several processes


@given(shapes, st.integers(1, 3), st.integers(1, 3))
def test_concatenated_window_batches_of_processes_equal_the_batch_of_one_process(
    shape, count, accumulate
):
    """This holds for any number of processes, and a run may continue with a different number."""
    num_tokens, length, size, seed = shape
    assume(num_tokens > length)
    tokens, batch_size = np.arange(num_tokens), count * size

    def read(share):
        how = {"accumulate": accumulate, "share": share}
        return WindowBatches(tokens, length, batch_size, seed, **how)

    one, parts = read(Share()), [read(Share(index, count)) for index in range(count)]
    for _ in range(3):
        whole = next(one).inputs
        shares = [next(part).inputs for part in parts]
        assert whole.shape == (accumulate, batch_size, length)
        assert np.array_equal(np.concatenate(shares, axis=1), whole)
        assert all(part.state() == one.state() for part in parts)
        parts[0].restore(json.loads(json.dumps(one.state())))


@pytest.mark.parametrize(
    "share, message",
    [
        (
            Share(0, 3),
            "share: the batch size is 4; it must be a multiple of the number of processes (3)",
        ),
        (Share(2, 2), "share: index is 2; it must be at least 0 and below 2"),
        (Share(-1, 2), "share: index is -1; it must be at least 0 and below 2"),
    ],
)
def test_invalid_process_index_and_count_are_rejected(share, message):
    assert error_of(share.indices, 4) == message


# Packed documents

packed = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def _packed(sizes, length, batch_size, seed):
    """Returns the start indices of documents, and batches of the documents.

    Each document has an opening token and `sizes` further tokens. Each token equals its index, so a
    token does not reveal the start of a document.
    """
    starts = np.cumsum([0, *(size + 1 for size in sizes)])
    tokens, starts = np.arange(starts[-1]), starts[:-1]
    assume(len(tokens) > length)
    return starts, WindowBatches(tokens, length, batch_size, seed, starts=starts)


@many_cases
@given(packed, st.integers(1, 20), st.integers(1, 5), st.integers(0, 3))
def test_each_token_of_packed_documents_is_a_target_once_per_epoch(sizes, length, size, seed):
    """Each token is predicted from the previous token.

    The stream is circular, so the first opening token follows the last token.
    """
    _, batches = _packed(sizes, length, size, seed)
    number = sum(sizes) + len(sizes)
    pairs = Counter((token, (token + 1) % number) for token in range(number))
    elements = ((batch, index) for batch in batches for index in range(size))
    for _ in range(2):
        found = Counter()
        for batch, index in itertools.islice(elements, batches.num_windows):
            real = batch.weights[0, index] == 1
            assert np.array_equal(real, batch.segment_ids[0, index] > 0)
            inputs, targets = (ids[0, index][real].tolist() for ids in batch[:2])
            found.update(zip(inputs, targets, strict=True))
        assert found == pairs


@many_cases
@given(packed, st.integers(1, 20), st.integers(0, 3))
def test_each_document_of_a_packed_window_has_its_own_segment_id(sizes, length, seed):
    starts, batches = _packed(sizes, length, 3, seed)
    batch = next(batches)
    for inputs, segment_ids in zip(batch.inputs[0], batch.segment_ids[0], strict=True):
        for place in range(1, length):
            begins = segment_ids[place] > 0 and segment_ids[place] != segment_ids[place - 1]
            assert begins == (segment_ids[place] > 0 and inputs[place] in starts)
        assert segment_ids[0] in (0, 1) and set(np.diff(segment_ids)) <= {0, 1, -segment_ids.max()}
