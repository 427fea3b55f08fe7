"""Objectives: the gradient of the mean over a whole batch, and errors for wrong objectives."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from jaxformer.functional import cross_entropy
from jaxformer.training.batch import Batch
from jaxformer.training.objectives import CrossEntropy, Objective, Sums, read_batch
from jaxformer.training.step import init_state, make_step
from tests.errors import error_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = {"vocab_size": 13, "max_length": 6, "num_layers": 1, "embed_dim": 8}
MODEL = jf.Decoder(jf.DecoderConfig(**SIZES, num_heads=2))
TASKS = {
    "next tokens": MODEL,
    "masked tokens": jf.Encoder(jf.EncoderConfig(**SIZES, num_heads=2)),
    "pairs": jf.RecurrentEncoderDecoder(jf.RecurrentEncoderDecoderConfig(**SIZES)),
    "frames": jf.RecurrentEncoderDecoder(
        jf.RecurrentEncoderDecoderConfig(**SIZES, source_features=3)
    ),
}
GRADIENT = optax.sgd(1.0)  # an update subtracts the gradient
LENGTHS = (6, 5, 1, 0, 2, 2)  # three micro-batches of 11, 1 and 4 targets


def random_batch(model, micro=3):
    """Returns micro-batches with unequal numbers of targets."""
    random = np.random.default_rng(0)
    inputs, targets, source = random.integers(1, 13, (3, len(LENGTHS), 6)).astype(np.int32)
    weights = (np.arange(6) < np.asarray(LENGTHS)[:, None]).astype(np.float32)
    if not model.config.reads_source:
        source = None
    elif (features := model.config.source_features) is not None:
        source = random.normal(size=(*source.shape, features)).astype(np.float32)
    batch = Batch(inputs, targets, weights, source=source)
    return jax.tree.map(lambda x: x.reshape(micro, -1, *x.shape[1:]), batch)


def whole(batch):
    """Concatenates micro-batches into one batch."""
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), batch)


def update_of(model, batch, objective):
    """Returns the measurements and the gradient of an update."""
    params = init_state(model, GRADIENT, 0).params
    state, measured = make_step(model, GRADIENT, objective)(init_state(model, GRADIENT, 0), batch)
    return measured, jax.tree.map(jnp.subtract, params, state.params)


def reference(model, loss):
    """Returns a loss at the initial parameters and its gradient, computed by JAX alone."""
    return jax.jit(jax.value_and_grad(loss))(init_state(model, GRADIENT, 0).params)


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("task", TASKS)
def test_micro_batches_have_the_gradient_of_the_mean_over_all_targets(task, smoothing):
    model, batch = TASKS[task], random_batch(TASKS[task])
    inputs, targets, weights, _, source, _ = whole(batch)

    def mean(params):
        read = {} if source is None else {"source": source}
        logits = model.apply({"params": params}, inputs, **read)
        return cross_entropy(logits, targets, weights, label_smoothing=smoothing)

    measured, gradient = update_of(model, batch, CrossEntropy(smoothing))
    loss = measured.figures["smoothed_loss" if smoothing else "loss"]
    assert_close((loss, gradient), reference(model, mean))


class Sequences(NamedTuple):
    """A batch type that a user's file defines."""

    tokens: jax.Array
    counts: jax.Array


@dataclass(frozen=True)
class SquaredLogits(Objective[Sequences]):
    """A user's objective: the mean squared logit at the counted positions."""

    batch_type = Sequences
    power: int = 2
    result: object = None

    def count(self, batch):
        return batch.counts.sum()

    def loss(self, model, params, batch, key):
        logits = model.apply({"params": params}, batch.tokens)
        positions = jnp.arange(batch.tokens.shape[1]) < batch.counts[:, None]
        total = jnp.where(positions[..., None], logits**self.power, 0).sum()
        largest = jnp.where(positions, logits.max(-1), 0).sum()
        return Sums(total, {"largest": largest}) if self.result is None else self.result(total)


def sequences(micro=3):
    batch = random_batch(MODEL, micro)
    return Sequences(batch.inputs, batch.weights.sum(-1).astype(np.int32))


@pytest.mark.slow
def test_micro_batches_do_not_change_gradient_of_user_defined_objective():
    """The objective's class handles neither micro-batches nor the scale of the gradient."""
    objective, one = SquaredLogits(), whole(sequences())
    measured, gradient = update_of(MODEL, sequences(), objective)

    def mean(params):
        return objective.loss(MODEL, params, one, None).loss / sum(LENGTHS)

    assert_close((measured.loss, gradient), reference(MODEL, mean))
    params = init_state(MODEL, GRADIENT, 0).params
    largest = objective.loss(MODEL, params, one, None).figures["largest"]
    np.testing.assert_allclose(measured.figures["largest"], largest / sum(LENGTHS), rtol=1e-5)


@pytest.mark.slow
def test_auxiliary_losses_are_added_only_if_the_objective_uses_them(monkeypatch):
    """`Forward.auxiliary` reaches the objective and has the same scale as other losses."""

    def with_penalty(*arguments):
        passed = read_batch(*arguments)
        return passed._replace(auxiliary={"penalty": jnp.square(passed.hidden).sum()})

    monkeypatch.setattr("jaxformer.training.objectives.read_batch", with_penalty)
    batch = random_batch(MODEL)
    inputs, targets, weights, *_ = whole(batch)

    def mean(params, weight=0.5):
        hidden = MODEL.apply({"params": params}, inputs, method="hidden_states")
        plain = cross_entropy(MODEL.apply({"params": params}, inputs), targets, weights)
        return plain + weight * jnp.square(hidden).sum() / sum(LENGTHS)

    named = CrossEntropy(auxiliary=(("penalty", 0.5),))
    measured, gradient = update_of(MODEL, batch, named)
    assert_close(gradient, reference(MODEL, mean)[1])
    params = init_state(MODEL, GRADIENT, 0).params
    assert_close(measured.loss, mean(params, 0))
    assert_close(measured.loss + 0.5 * measured.figures["penalty"], mean(params))
    _, gradient = update_of(MODEL, batch, CrossEntropy())
    assert_close(gradient, reference(MODEL, lambda params: mean(params, 0))[1])
    message = (
        "auxiliary has 'balance'; the layers of the model return the auxiliary losses: penalty"
    )
    unknown = CrossEntropy(auxiliary=(("balance", 1.0),))
    assert message in error_of(update_of, MODEL, batch, unknown)


@dataclass(frozen=True)
class WithArray(SquaredLogits):
    teacher: np.ndarray = field(default_factory=lambda: np.zeros(3))


class Counted(SquaredLogits):
    count: ClassVar = lambda self, batch: batch.counts


FLAT = Batch(*(np.zeros((2, 6), np.int32),) * 2)
UNEQUAL = sequences()._replace(counts=np.zeros((2, 2), np.int32))
WRONG = {
    "objective is 0.1; it must be an Objective such as CrossEntropy()": (0.1, random_batch(MODEL)),
    "which is not hashable": (WithArray(), sequences()),
    "batch is a Batch, but the objective SquaredLogits needs a Sequences": (
        SquaredLogits(),
        random_batch(MODEL),
    ),
    "targets has shape (6,); it must be [batch, length] in a micro-batch": (CrossEntropy(), FLAT),
    "batch has arrays of shapes (3, 2, 6), (2, 2); the first axis of each array must be the number "
    "of micro-batches": (SquaredLogits(), UNEQUAL),
    "the objective SquaredLogits returned loss of shape (2,); it must be a scalar": (
        SquaredLogits(result=lambda total: Sums(jnp.stack([total, total]))),
        sequences(),
    ),
    "returned a loss of dtype int32; it must be a float": (
        SquaredLogits(result=lambda total: Sums(total.astype(jnp.int32))),
        sequences(),
    ),
    "the objective SquaredLogits returned an array; its method `loss` must return a Sums": (
        SquaredLogits(result=lambda total: total),
        sequences(),
    ),
    "returned the figure 'right' of shape (1,)": (
        SquaredLogits(result=lambda total: Sums(total, {"right": total[None]})),
        sequences(),
    ),
    "`figures` have the key 'step'; choose another key": (
        SquaredLogits(result=lambda total: Sums(total, {"step": total})),
        sequences(),
    ),
    "the objective Counted returned count of shape (3, 2)": (Counted(), sequences()),
}


@pytest.mark.parametrize("message", WRONG)
def test_training_step_raises_error_that_names_invalid_objective_or_batch(message):
    """Tracing the step raises the error, before any computation."""
    objective, batch = WRONG[message]

    def traced():
        state = jax.eval_shape(lambda: init_state(MODEL, GRADIENT, 0))
        jax.eval_shape(make_step(MODEL, GRADIENT, objective), state, batch)

    assert message in error_of(traced)
