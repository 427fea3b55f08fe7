"""Preference tuning: padding, accumulation, order, and a checkpoint that learns to prefer."""

import jax
import numpy as np
import pytest

from jaxformer.training.batch import Share
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.data.examples import Example
from jaxformer.training.data.packing import Examples
from jaxformer.training.data.preferences import PreferenceBatches, answer_batch, pair_batch
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.preference import DirectPreference, answer_log_probs
from jaxformer.training.step import init_state, make_step
from tests.errors import error_of
from tests.properties import tiny

LENGTH, PAIRS = 12, 6
MODEL = tiny.build()
SCORE = jax.jit(lambda params, batch: answer_log_probs(MODEL, params, batch))


def pairs(seed=0):
    """Returns examples 2i and 2i + 1 with a common prompt."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(PAIRS):
        prompt = rng.integers(1, 12, rng.integers(1, 4))
        for _ in range(2):
            answer = rng.integers(1, 12, rng.integers(2, 8))
            ids = np.concatenate([prompt, answer])
            found.append(Example(ids, np.arange(len(ids)) >= len(prompt)))
    return Examples.join(found)


def setting(seed=0):
    params, examples = tiny.weights(MODEL, seed)["params"], pairs(seed)
    whole = answer_batch(examples, range(2 * PAIRS), 2 * PAIRS, LENGTH)
    return params, examples, np.array(SCORE(params, whole))


@pytest.mark.slow
def test_log_probability_of_an_answer_is_the_sum_over_its_tokens():
    params, examples, scores = setting()
    for number in range(2 * PAIRS):
        ids, mask = examples[number]
        logits = np.float64(MODEL.apply({"params": params}, ids[None, :-1].astype(np.int32)))[0]
        logs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        picked = logs[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(scores[number], picked[mask[1:]].sum(), atol=1e-4)


@pytest.mark.slow
def test_initial_preference_loss_is_log_2_per_pair_and_excludes_padding():
    params, examples, scores = setting()
    objective = DirectPreference()
    loss = jax.jit(lambda params, batch: objective.loss(MODEL, params, batch, None))
    for size in (PAIRS, PAIRS + 5):
        batch = pair_batch(examples, scores, range(PAIRS), size, LENGTH)
        sums = loss(params, batch)
        assert objective.count(batch) == PAIRS
        np.testing.assert_allclose(sums.loss, PAIRS * np.log(2), rtol=1e-5)
        np.testing.assert_allclose(sums.figures["preference_margin"], 0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 6), (3, 2), (2, 3)])
def test_accumulating_gradients_over_pairs_equals_one_large_batch(batch_size, accumulate):
    params, examples, scores = setting()
    optimizer = make_optimizer(OptimizerConfig())
    step, seen = make_step(MODEL, optimizer, DirectPreference()), []
    for size, number in ((PAIRS, 1), (batch_size, accumulate)):
        state = init_state(MODEL, optimizer, 0, jax.tree.map(jax.numpy.array, params))
        batches = PreferenceBatches(examples, scores, LENGTH, size, accumulate=number)
        losses = []
        for _ in range(2):
            state, measured = step(state, next(batches), np.float32(1e-3))
            losses.append((float(measured.figures["loss"]), float(measured.gradient_norm)))
        seen.append(losses)
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-4)


@pytest.mark.slow
def test_model_learns_to_prefer_the_better_answers():
    params, examples, scores = setting()
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.0))
    step = make_step(MODEL, optimizer, DirectPreference())
    state = init_state(MODEL, optimizer, 0, jax.tree.map(jax.numpy.array, params))
    batches = PreferenceBatches(examples, scores, LENGTH, PAIRS)
    for _ in range(30):
        state, measured = step(state, next(batches), np.float32(1e-2))
    assert measured.figures["preference_accuracy"] == 1 and measured.figures["loss"] < 0.3
    after = np.array(SCORE(state.params, answer_batch(examples, range(12), 12, LENGTH)))
    assert ((after - scores)[::2] > (after - scores)[1::2]).all()


@pytest.mark.slow
def test_batches_contain_every_pair_with_its_reference_scores_once_per_epoch():
    _, examples, scores = setting()
    batches = PreferenceBatches(examples, scores, LENGTH, 2, 3, accumulate=2)
    for _ in range(2):
        read = [next(batches) for _ in range(2)]
        found = np.concatenate([x.reference_chosen.ravel() for x in read])
        assert sorted(found[found != 0]) == sorted(scores[::2])
        for batch in read:
            flat = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), batch)
            real = flat.reference_chosen != 0
            sides = ((flat.chosen, flat.reference_chosen), (flat.rejected, flat.reference_rejected))
            for side, reference in sides:
                found = np.array(SCORE(tiny.weights(MODEL, 0)["params"], side))
                np.testing.assert_allclose(found[real], reference[real], atol=1e-4)


@pytest.mark.slow
def test_pair_iterator_can_be_restored_and_divided_between_processes():
    _, examples, scores = setting()
    first, second = (PreferenceBatches(examples, scores, LENGTH, 2, 1) for _ in range(2))
    for _ in range(5):
        state = first.state()
        second.restore(state)
        jax.tree.map(np.testing.assert_array_equal, next(first), next(second))
    assert "seed" in error_of(second.restore, {**state, "seed": 2})
    parts = [PreferenceBatches(examples, scores, LENGTH, 2, share=Share(i, 2)) for i in range(2)]
    whole = next(PreferenceBatches(examples, scores, LENGTH, 2))
    for number, part in enumerate(parts):
        expected = jax.tree.map(lambda x, n=number: x[:, n : n + 1], whole)
        jax.tree.map(np.testing.assert_array_equal, next(part), expected)


def test_preference_training_rejects_beta_of_zero():
    assert "beta is 0" in error_of(DirectPreference, 0)
