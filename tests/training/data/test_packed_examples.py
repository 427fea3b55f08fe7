"""Examples that share a sequence are learnt as each alone, and every example once per epoch."""

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.training.batch import Share
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.data.examples import Example
from jaxformer.training.data.packing import Examples, PackedBatches, pack, pack_sequence
from jaxformer.training.objectives import CrossEntropy, summed_loss
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import init_state, make_step
from tests.errors import error_of
from tests.properties import tiny
from tests.properties.models import HYBRID, MODELS
from tests.slow import mostly_slow

LENGTH = 16
IDS = st.lists(st.integers(1, 12), min_size=2, max_size=LENGTH + 1)


@st.composite
def examples(draw, least=1, most=12):
    """Draws examples with at least one token to learn each."""
    found = []
    for ids in draw(st.lists(IDS, min_size=least, max_size=most)):
        mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        mask[draw(st.integers(1, len(ids) - 1))] = True
        found.append(Example(ids, mask))
    return found


def targets_of(batch):
    """Returns the tokens that the sequences of a batch learn, with the tokens before them."""
    found = []
    flat = [np.asarray(x).reshape(-1, LENGTH) for x in batch if x is not None]
    for inputs, targets, weights, segment_ids in zip(*flat, strict=True):
        for number in range(1, segment_ids.max() + 1):
            own = segment_ids == number
            learnt = [(int(t), w > 0) for t, w in zip(targets[own], weights[own], strict=True)]
            found.append((int(inputs[own][0]), tuple(learnt)))
            assert (inputs[own][1:] == targets[own][:-1]).all()
        assert (weights[segment_ids == 0] == 0).all()
    return sorted(found)


def expected(found):
    pairs = ((x.ids[0], tuple(zip(x.ids[1:], map(bool, x.mask[1:]), strict=True))) for x in found)
    return sorted(pairs)


@given(examples(), st.integers(1, 3), st.integers(1, 2), st.integers(0, 5), st.booleans())
@settings(deadline=None)
def test_batches_contain_every_example_once_per_epoch(found, batch_size, accumulate, seed, packs):
    batches = PackedBatches(
        Examples.join(found), LENGTH, batch_size, seed, accumulate=accumulate, packs=packs
    )
    for _ in range(2):
        seen = []
        while len(seen) < len(found):
            batch = next(batches)
            assert batch.inputs.shape == (accumulate, batch_size, LENGTH)
            seen += targets_of(batch)
        assert sorted(seen) == expected(found)
    once = [pair for batch in batches.once() for pair in targets_of(batch)]
    assert sorted(once) == expected(found)


@given(st.lists(st.integers(2, LENGTH + 1), min_size=1, max_size=40))
def test_packed_sequences_never_exceed_the_length_and_are_rarely_half_empty(lengths):
    sequences = pack(np.array(lengths), range(len(lengths)), LENGTH)
    used = [sum(lengths[i] - 1 for i in sequence) for sequence in sequences]
    assert sorted(i for sequence in sequences for i in sequence) == list(range(len(lengths)))
    assert max(used) <= LENGTH
    # Among the newest open sequences, two that are at most half full would have become one.
    assert sum(size * 2 <= LENGTH for size in used[-16:]) <= 1
    assert pack(np.array(lengths), range(len(lengths)), 0) == [[i] for i in range(len(lengths))]


NAMES = {name: MODELS[name] for name in ("decoder", "llama", "lstm", "dilated cnn", *HYBRID)}


@cache
def _model(name):
    model = tiny.build(**NAMES[name])
    return model, jax.jit(lambda params, batch: summed_loss(model, params, batch))


@pytest.mark.parametrize(
    "name", mostly_slow(NAMES, "decoder", "lstm", slow=(*HYBRID, "dilated cnn"))
)
@given(found=examples(least=2, most=4), seed=st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_loss_of_packed_examples_is_the_sum_of_the_losses_of_single_examples(name, found, seed):
    """No example sees another one, neither by attention nor by a recurrent state."""
    model, loss = _model(name)
    params = tiny.weights(model, seed)["params"]
    together = sum(len(x.ids) - 1 for x in found)
    if together > LENGTH:
        found = [Example(x.ids[:4], [*x.mask[:1], *[True] * 3][: len(x.ids[:4])]) for x in found]
    packed = jax.tree.map(lambda x: x[None], pack_sequence(found, LENGTH))
    alone = [jax.tree.map(lambda x: x[None], pack_sequence([x], LENGTH)) for x in found]
    total = sum(float(loss(params, batch)) for batch in alone)
    np.testing.assert_allclose(float(loss(params, packed)), total, rtol=2e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False])
def test_accumulated_micro_batches_update_as_one_large_batch(packs):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(8):
        ids = rng.integers(1, 12, rng.integers(5, LENGTH + 1))
        found.append(Example(ids, np.arange(len(ids)) >= rng.integers(1, len(ids) - 1)))
    model = tiny.build()
    optimizer = make_optimizer(OptimizerConfig())
    step, after = make_step(model, optimizer, CrossEntropy()), []
    for batch_size, accumulate in ((8, 1), (1, 8), (2, 4)):
        params = tiny.weights(model, 0)["params"]
        state = init_state(model, optimizer, 0, jax.tree.map(jax.numpy.array, params))
        batches = PackedBatches(
            Examples.join(found), LENGTH, batch_size, accumulate=accumulate, packs=packs
        )
        losses = []
        for _ in range(3):
            state, measured = step(state, next(batches), np.float32(1e-3))
            losses.append((float(measured.loss), float(measured.gradient_norm)))
        after.append(losses)
    # Adam enlarges rounding errors of vanishing gradients, so the weights are not compared.
    for losses in after[1:]:
        np.testing.assert_allclose(losses, after[0], rtol=1e-5)


def _batches(**options):
    found = [Example(range(1, 2 + n), [True] * (1 + n)) for n in range(1, 13)]
    return PackedBatches(Examples.join(found), LENGTH, 2, 3, **options)


def test_concatenated_example_batches_of_processes_equal_the_batch_of_one_process():
    whole, parts = _batches(), [_batches(share=Share(i, 2)) for i in range(2)]
    for _ in range(12):
        expected = next(whole)
        for number, part in enumerate(parts):
            mine = jax.tree.map(lambda x, n=number: x[:, n : n + 1], expected)
            jax.tree.map(np.testing.assert_array_equal, next(part), mine)


def test_restored_iterator_continues_with_the_next_batch():
    first, second = _batches(), _batches()
    for _ in range(7):
        state = first.state()
        second.restore(state)
        jax.tree.map(np.testing.assert_array_equal, next(first), next(second))
    assert "seed" in error_of(_batches().restore, {**state, "seed": 4})
    assert "packs" in error_of(_batches(packs=False).restore, state)


def test_packed_batches_reject_an_empty_set_of_examples_and_too_long_examples():
    none = Examples.join([])
    assert "at least one" in error_of(lambda: PackedBatches(none, LENGTH, 1))
    long = Examples.join([Example(range(LENGTH + 2), [True] * (LENGTH + 2))])
    assert "18 tokens" in error_of(lambda: PackedBatches(long, LENGTH, 1))


def test_saved_examples_load_unchanged_but_not_with_a_different_tokenizer(tmp_path):
    found = Examples.join([Example([1, 2, 3], [False, True, True]), Example([4, 5], [False, True])])
    path = tmp_path / "train.npz"
    found.save(path, "abc")
    read = Examples.load(path, "abc")
    assert [list(read[i].ids) for i in range(2)] == [[1, 2, 3], [4, 5]]
    assert read.num_targets == 3 and read.digest == found.digest
    assert "different tokenizer" in error_of(Examples.load, path, "abd")
    path.write_bytes(path.read_bytes()[:100])
    assert "train.npz" in error_of(Examples.load, path, "abc")
