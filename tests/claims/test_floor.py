"""The loss floor: without seeing its target, no model can predict uniform random tokens.

Every causal model trains briefly on random tokens. Its loss on new ones stays at ln V up to chance.
A model that sees its targets soon falls below that.
"""

import jax
import numpy as np
import optax
import pytest

from tests.properties import tiny
from tests.properties.models import MODELS, centred, each_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, BATCH_SIZE, STEPS = tiny.SIZES["vocab_size"], 64, 120


def held_out_loss(model, function):
    """Trains for STEPS updates at 10⁻². Returns the mean loss in nats and its standard error."""
    optimizer = optax.adam(1e-2)

    def loss(params, key):
        tokens = jax.random.randint(key, (BATCH_SIZE, tiny.LENGTH), 0, VOCAB)
        logits = function(params, tokens, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean(), losses

    @jax.jit
    def train(params):
        def step(state, key):
            params, rest = state
            gradients, _ = jax.grad(loss, has_aux=True)(params, key)
            updates, rest = optimizer.update(gradients, rest, params)
            return (optax.apply_updates(params, updates), rest), None

        keys = jax.random.split(jax.random.key(0), STEPS)
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        _, losses = jax.lax.map(
            lambda key: loss(params, key), jax.random.split(jax.random.key(1), 16)
        )
        return losses

    losses = np.asarray(train(tiny.weights(model, 0)["params"]), np.float64).reshape(
        -1, tiny.LENGTH - 1
    )
    means = losses.mean(axis=1)
    return means.mean(), means.std(ddof=1) / np.sqrt(len(means))


def logits_of(model):
    """Returns (params, tokens, key) → logits. If the model reads a source, it is random too."""

    def run(params, tokens, key):
        read = {}
        if model.config.reads_source:
            key = jax.random.fold_in(key, 1)
            if (features := model.config.source_features) is not None:
                read["source"] = jax.random.normal(key, (BATCH_SIZE, 5, features))
            else:
                size = model.config.source_vocab_size
                read["source"] = jax.random.randint(key, (BATCH_SIZE, 5), 0, size)
        return model.apply({"params": params}, tokens, **read)

    return run


@each_model("dilated cnn")
def test_the_loss_on_random_tokens_is_at_least_their_entropy(name):
    model = tiny.build(**MODELS[name])
    loss, error = held_out_loss(model, logits_of(model))
    assert np.log(VOCAB) - 4 * error < loss < np.log(VOCAB) + 0.15


@pytest.mark.slow
def test_model_that_sees_its_target_has_loss_below_the_entropy():
    """The counter-example: a centred convolution, which sees the token that it predicts."""
    model = centred()
    loss, error = held_out_loss(model, logits_of(model))
    assert loss < np.log(VOCAB) - 1.0 and error < 0.1
