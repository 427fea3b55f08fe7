"""The training step: averages, skipped updates, dropout and donation of the state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.decoding.score import score
from jaxformer.functional import cross_entropy
from jaxformer.models.config import DecoderConfig, EncoderDecoderConfig
from jaxformer.models.kinds import Decoder, build
from jaxformer.models.sequences import padded
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.data.pairs import PairBatches
from jaxformer.training.objectives import CrossEntropy, summed_loss
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import init_state, make_step

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = DecoderConfig(vocab_size=29, max_length=8, num_layers=2, embed_dim=16, num_heads=2)
MODEL = Decoder(CONFIG)
OPTIMIZER = make_optimizer(OptimizerConfig())
STEP = make_step(MODEL, OPTIMIZER)


@jax.jit
def fresh_state():
    return init_state(MODEL, OPTIMIZER, 0)


def random_batch(seed, lengths):
    """Returns sequences with lengths[i] counted tokens, followed by padding."""
    random = np.random.default_rng(seed)
    sequences = random.integers(0, CONFIG.vocab_size, (len(lengths), CONFIG.max_length + 1))
    weights = np.arange(CONFIG.max_length) < np.asarray(lengths)[:, None]
    return (
        sequences[:, :-1].astype(np.int32),
        sequences[:, 1:].astype(np.int32),
        weights.astype(np.float32),
        weights.astype(np.int32),
    )


def arranged(batch, accumulate):
    return Batch(*(x.reshape(accumulate, -1, *x.shape[1:]) for x in batch))


@pytest.mark.slow
@given(st.integers(0, 2**16), st.lists(st.integers(0, 8), min_size=4, max_size=4))
def test_unequal_micro_batches_give_the_gradient_of_the_full_batch(seed, lengths):
    """Averaging the averages would weight tokens by the token counts of their micro-batches."""
    batch = random_batch(seed, lengths)
    whole, loss = STEP(fresh_state(), arranged(batch, 1))
    parts, loss_of_parts = STEP(fresh_state(), arranged(batch, 4))
    np.testing.assert_allclose(loss_of_parts.loss, loss.loss, rtol=1e-5)
    np.testing.assert_allclose(loss_of_parts.gradient_norm, loss.gradient_norm, rtol=1e-5)
    # The first moment is (1 − β₁) × the clipped gradient. The parameters would show less, because
    # Adam's first update is almost only the sign of the gradient.
    moments = (state.optimizer[1][0].mu for state in (parts, whole))
    for a, b in zip(*map(jax.tree.leaves, moments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_update_with_a_batch_without_targets_only_decays_the_weights():
    """The loss and all gradients are 0, so the first moments do not change."""
    state, measured = STEP(fresh_state(), arranged(random_batch(0, [0] * 4), 1))
    assert measured == ({"loss": 0}, 0)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.optimizer[1][0].mu))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.slow
def test_the_gradient_norm_is_measured_before_clipping():
    batch = arranged(random_batch(0, [8] * 4), 2)
    _, measured = STEP(fresh_state(), batch)

    def mean_loss(params):
        micro = (jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), batch) for i in (0, 1))
        return sum(summed_loss(MODEL, params, some) for some in micro) / batch.weights.sum()

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(fresh_state().params)
    norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose((measured.loss, measured.gradient_norm), (loss, norm), rtol=1e-5)


def test_an_update_with_a_non_finite_loss_is_skipped():
    """The next update ignores the skipped batch. Without `skip_non_finite`, the next update
    fails."""
    batch = arranged(random_batch(0, [8] * 4), 1)
    bad = batch._replace(weights=batch.weights * jnp.inf)
    step = make_step(MODEL, OPTIMIZER, skip_non_finite=True)
    state, measured = step(fresh_state(), bad)
    assert not np.isfinite(measured.loss)
    after, _ = step(state, batch)
    alone, _ = STEP(fresh_state(), batch)
    for one, other in ((after.params, alone.params), (after.optimizer, alone.optimizer)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, other)
    spoilt, _ = STEP(fresh_state(), bad)
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(spoilt.params))


@pytest.mark.slow
def test_an_update_with_a_non_finite_gradient_is_skipped():
    """The update is skipped even if the loss is finite."""

    class Steep(CrossEntropy):
        def scaled_loss(self, model, params, *rest):
            sums = super().scaled_loss(model, params, *rest)
            return sums._replace(loss=sums.loss + jnp.sqrt(0 * jax.tree.leaves(params)[0].sum()))

    step = make_step(MODEL, OPTIMIZER, Steep(), skip_non_finite=True)
    state, measured = step(fresh_state(), arranged(random_batch(0, [8] * 4), 1))
    assert np.isfinite(measured.loss) and not np.isfinite(measured.gradient_norm)
    jax.tree.map(np.testing.assert_array_equal, state.params, fresh_state().params)


@pytest.mark.slow
@pytest.mark.parametrize("num_micro", [1, 2])
def test_the_loss_is_measured_with_and_without_label_smoothing(num_micro):
    """Both losses are cross-entropies of the initial model's logits."""
    inputs, targets, weights, segment_ids = map(jnp.asarray, random_batch(1, [8, 3, 5, 8]))
    logits = MODEL.apply({"params": fresh_state().params}, inputs, segment_ids)
    batch = arranged((inputs, targets, weights, segment_ids), num_micro)
    _, measured = make_step(MODEL, OPTIMIZER, CrossEntropy(0.1))(fresh_state(), batch)
    found = measured.loss, measured.figures["smoothed_loss"]
    wanted = [cross_entropy(logits, targets, weights, x) for x in (0.0, 0.1)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert abs(wanted[0] - wanted[1]) > 1e-3


@pytest.mark.slow
def test_training_loss_of_a_pair_batch_equals_score_of_each_pair():
    """The loss of a batch of pairs agrees with `score` on each single pair."""
    end, sizes = 0, {"vocab_size": 29, "max_length": 16, "embed_dim": 16}
    model = build(EncoderDecoderConfig(**sizes, num_layers=1, num_heads=2))
    state = init_state(model, OPTIMIZER, 0)
    params = jax.tree.map(np.array, state.params)  # a copy, because the step donates the state
    pairs = [([5, 6, 7], [8, 9]), ([10], [11, 12, 13, 14]), ([15, 16], [17])]
    batch = next(PairBatches(pairs, 64, end, num_buckets=1))
    loss = make_step(model, OPTIMIZER)(state, batch)[1].loss
    texts = [[end, *target, end] for _, target in pairs]
    sequences, segment_ids = padded(texts, 8)
    sources = [source for source, _ in pairs]
    scores = score(model, {"params": params}, sequences, segment_ids, sources)
    tokens = sum(len(text) - 1 for text in texts)
    np.testing.assert_allclose(loss, -scores.sum() / tokens, rtol=1e-5)


def test_training_step_donates_its_input_state():
    state = fresh_state()
    after, _ = STEP(state, arranged(random_batch(0, [8] * 4), 1))
    donated = [leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.optimizer))]
    assert all(donated)
    assert int(after.step) == 1


@pytest.mark.slow
def test_dropout_differs_from_step_to_step_and_repeats_with_the_seed():
    """Two states that differ only in the step have different dropout noise."""
    model = Decoder(DecoderConfig(**{**vars(CONFIG), "dropout": 0.5}))
    step, batch = make_step(model, OPTIMIZER), arranged(random_batch(0, [8] * 4), 1)

    def loss_at(number):
        return float(step(fresh_state()._replace(step=jnp.int32(number)), batch)[1].loss)

    assert loss_at(3) == loss_at(3)
    assert loss_at(3) != loss_at(4)
