"""Lenses: predictions of the next token from the residual stream after each layer.

The logit lens applies the final norm and the output head to the residual stream after each layer.
Earlier layers may represent information in a different basis from the last layer. A lens can
therefore first translate a state h to h + h K + b, where each layer has its own K and b. The tuned
lens learns K and b. The Jacobian lens sets b = 0 and K = J − I, where J is the average derivative
of the last layer's output with respect to h.

Reference:
    nostalgebraist 2020, "Interpreting GPT: the logit lens"; Belrose et al. 2023, "Eliciting Latent
    Predictions from Transformers with the Tuned Lens".
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxformer.functional.hooks import Hooks, Patch
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.trees import Weights
from jaxformer.interpret.summary import summary
from jaxformer.interpret.texts import read_inputs
from jaxformer.models.check import Sources
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.terminal import kind_of

STATES = ("embedding", "block.output")


class Translators(NamedTuple):
    """One affine transformation per state: h becomes h + h K + b.

    State 0 is the embedding, and state i is the residual stream after layer i.

    Attributes:
        kernel: the matrices K, one for each state.
        bias: the vectors b, one for each state.
    """

    kernel: Float[Array, "states dim dim"]
    bias: Float[Array, "states dim"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


class Lens(NamedTuple):
    """The predictions after the embedding (state 0) and after each layer.

    Attributes:
        tokens: the ids with the largest probabilities, in descending order.
        probabilities: the probabilities of `tokens`.
        entropy: the entropy of the prediction from the state, in nats.
        divergence: KL(p ‖ q) in nats, where p is the model's prediction and q the prediction from
            the state.
    """

    tokens: Int[Array, "states batch length k"]
    probabilities: Float[Array, "states batch length k"]
    entropy: Float[Array, "states batch length"]
    divergence: Float[Array, "states batch length"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


def logit_lens(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    source: Sources | None = None,
    top_k: int = 5,
    translators: Translators | None = None,
) -> Lens:
    """Computes the predictions of a logit lens, a tuned lens or a Jacobian lens.

    Args:
        model: a model with a residual stream.
        variables: the model's variables.
        tokens: ids of complete sequences.
        source: the source sequences, for models with a source.
        top_k: the number of most probable tokens to return.
        translators: the translators of a tuned or Jacobian lens. If None, the function computes a
            plain logit lens.

    Raises:
        ValueError: An argument is invalid or the model does not have a residual stream.
    """
    check_stream(model)
    inputs = read_inputs(model, variables, tokens, source)
    if whole_number("top_k", top_k, 1) > model.config.vocab_size:
        raise ValueError(
            f"top_k is {top_k}; it must be in 1 … vocab_size ({model.config.vocab_size})"
        )
    if translators is not None:
        num, dim = model.config.num_layers + 1, model.config.embed_dim
        if np.shape(translators.kernel) != (num, dim, dim):
            raise ValueError(
                f"translators.kernel has the shape {np.shape(translators.kernel)}; for this model, "
                f"it must be {(num, dim, dim)}"
            )
    return _lens(model, variables["params"], inputs, top_k, translators)


def check_stream(model: LanguageModel) -> None:
    """Raises ValueError unless every layer adds its output to a residual stream."""
    for number, layer in enumerate(model.architecture.stack.layers):
        if not all(part.adds for part in layer):
            raise ValueError(
                f"model is {kind_of(model)}; a lens needs a residual stream, but layer "
                f"{number} of this model has no residual connection"
            )


@partial(jax.jit, static_argnums=(0, 3))
def _lens(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    top_k: int,
    translators: Translators | None,
) -> Lens:
    states, log_probs = read_states(model, weights, inputs)

    def one_state(state: tuple[Array, Translators | None]) -> Lens:
        found = prediction(model, weights, *state)
        best, tokens = jax.lax.top_k(found, top_k)
        entropy = -(jnp.exp(found) * found).sum(-1)
        return Lens(tokens, jnp.exp(best), entropy, divergence(log_probs, found))

    return jax.lax.map(one_state, (states, translators))


def read_states(
    model: LanguageModel, weights: Weights, inputs: Inputs
) -> tuple[Float[Array, "states batch length dim"], Float[Array, "batch length vocab"]]:
    """Returns the states and the log probabilities that the model predicts.

    The states are the residual stream before the first layer and after each layer.
    """
    passed = model.forward(weights, inputs, hooks=Hooks(STATES))
    embedding, outputs = (passed.captured[name] for name in STATES)
    states = jnp.concatenate([embedding[None], outputs])
    return states, jax.nn.log_softmax(model.logits(weights, passed.hidden))


def prediction(
    model: LanguageModel,
    weights: Weights,
    state: Float[Array, "batch length dim"],
    translator: Translators | None = None,
) -> Float[Array, "batch length vocab"]:
    """Computes the log probabilities of the next tokens from a state of the residual stream.

    Args:
        model: the model.
        weights: the model's parameters.
        state: the residual stream before the first layer or after a layer.
        translator: the translator of this state: its kernel is [dim, dim], and its bias [dim].
    """
    if translator is not None:
        state = state + state @ translator.kernel.astype(state.dtype)
        state = state + translator.bias.astype(state.dtype)
    hidden = model.architecture.finish(weights, state)
    return jax.nn.log_softmax(model.logits(weights, hidden))


def divergence(
    log_p: Float[Array, "*batch vocab"], log_q: Float[Array, "*batch vocab"]
) -> Float[Array, "*batch"]:
    """Computes the divergence KL(p ‖ q) in nats."""
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def no_translators(model: LanguageModel) -> Translators:
    """Returns translators that leave all states unchanged."""
    num, dim = model.config.num_layers + 1, model.config.embed_dim
    return Translators(jnp.zeros((num, dim, dim), jnp.float32), jnp.zeros((num, dim), jnp.float32))


def train_tuned_lens(
    model: LanguageModel,
    variables: Variables,
    batches: Iterable[Int[Array, "batch length"]],
    learning_rate: float = 1e-3,
    on_step: Callable[[int, np.ndarray], None] | None = None,
) -> Translators:
    """Trains the translators of a tuned lens.

    The loss is the mean divergence between the model's prediction and the prediction of each state.
    Each batch gives one step of Adam. The translator of the last layer's output is not trained,
    so it leaves this output unchanged.

    Args:
        model: a model with a residual stream and without a source.
        variables: the model's variables; they do not change.
        batches: batches of token ids, one per step, all of the same shape.
        learning_rate: the learning rate of Adam.
        on_step: called with the number of the step and the divergence of each state, in nats per
            token.

    Raises:
        ValueError: An argument is invalid.
    """
    check_stream(model)
    if model.config.reads_source:
        raise ValueError(
            "the model reads a source text; the tuned lens supports only models without one"
        )
    optimizer = optax.adam(learning_rate)
    translators = no_translators(model)
    state = optimizer.init(translators)
    for number, tokens in enumerate(batches, 1):
        inputs = read_inputs(model, variables, tokens)
        translators, state, losses = _tune(
            model, optimizer, variables["params"], inputs, (translators, state)
        )
        if on_step is not None:
            on_step(number, np.asarray(losses))
    return translators


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _tune(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    weights: Weights,
    inputs: Inputs,
    trained: tuple[Translators, optax.OptState],
) -> tuple[Translators, optax.OptState, Float[Array, " states"]]:
    translators, optimizer_state = trained
    states, log_probs = read_states(model, weights, inputs)

    def loss(translators: Translators) -> tuple[Float[Array, ""], Float[Array, " states"]]:
        # Without `jax.checkpoint`, the backward pass would store the logits of every state.
        @jax.checkpoint
        def one_state(state: tuple[Array, Translators]) -> Float[Array, ""]:
            return divergence(log_probs, prediction(model, weights, *state)).mean()

        losses = jax.lax.map(one_state, (states, translators))
        return losses[:-1].mean(), losses

    gradient, losses = jax.grad(loss, has_aux=True)(translators)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state)
    updates = jax.tree.map(lambda x: x.at[-1].set(0.0), updates)
    moved = jax.tree.map(jnp.add, translators, updates)
    return moved, optimizer_state, losses


def jacobian_lens(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    source: Sources | None = None,
) -> Translators:
    """Returns the translators of a Jacobian lens.

    The lens maps a hidden state h to h J. J is the mean over texts and positions t of the sum over
    t' of ∂ (output of the last layer at t') / ∂ (state at t). To first order, a change δ of h
    changes the sum of the last layer's outputs over all positions by δ J, on average.

    Args:
        model: a model with a residual stream.
        variables: the model's variables.
        tokens: ids of complete sequences.
        source: the source sequences, for models with a source.

    Raises:
        ValueError: An argument is invalid or the model does not have a residual stream.
    """
    check_stream(model)
    inputs = read_inputs(model, variables, tokens, source)
    return _jacobians(model, variables["params"], inputs)


@partial(jax.jit, static_argnums=0)
def _jacobians(model: LanguageModel, weights: Weights, inputs: Inputs) -> Translators:
    states, _ = read_states(model, weights, inputs)
    num, dim = len(states), states.shape[-1]

    def last(number: Int[Array, ""], state: Array) -> Float[Array, "batch length dim"]:
        at_embedding = Patch(number == 0, state)
        layers = (jnp.arange(num - 1, dtype=jnp.int32) == number - 1).reshape(-1, 1, 1, 1)
        at_layer = Patch(layers, state[None])
        hooks = Hooks(STATES[1:], dict(zip(STATES, (at_embedding, at_layer), strict=True)))
        return model.forward(weights, inputs, hooks=hooks).captured[STATES[1]][-1]

    def one_state(state: tuple[Array, Array]) -> Float[Array, "dim dim"]:
        number, value = state
        ended, pull_back = jax.vjp(partial(last, number), value)

        def row(feature: Float[Array, " dim"]) -> Float[Array, " dim"]:
            (slope,) = pull_back(jnp.broadcast_to(feature, ended.shape).astype(ended.dtype))
            return slope.astype(jnp.float32).mean((0, 1))

        return jax.lax.map(row, jnp.eye(dim, dtype=jnp.float32)).T

    jacobians = jax.lax.map(one_state, (jnp.arange(num, dtype=jnp.int32), states))
    return Translators(
        jacobians - jnp.eye(dim, dtype=jnp.float32), jnp.zeros((num, dim), jnp.float32)
    )
