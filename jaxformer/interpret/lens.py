"""Lenses: what a model would predict if it ended after a layer.

The logit lens applies the final norm and the head to the residual stream after each layer. Earlier
layers may write in another basis than the last one, so a lens can translate a state h first, to
h + h K + b with K and b of that layer. The tuned lens learns K and b; the Jacobian lens takes
I + K from the average derivative of the last state by h.

Reference:
    nostalgebraist 2020, "Interpreting GPT: the logit lens"; Belrose et al. 2023, "Eliciting Latent
    Predictions from Transformers with the Tuned Lens".
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.functional.trees import Weights
from jaxformer.interpret.texts import read_inputs
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables

STATES = ("embedding", "block.output")


class Translators(NamedTuple):
    """One affine map per state: h becomes h + h K + b.

    State 0 is the embedding, state i the residual stream after layer i.

    Attributes:
        kernel: K of each state.
        bias: b of each state.
    """

    kernel: Float[Array, "states dim dim"]
    bias: Float[Array, "states dim"]


class Lens(NamedTuple):
    """The predictions after the embedding (state 0) and after each layer.

    Attributes:
        tokens: the most probable ids, the most probable first.
        probabilities: their probabilities.
        entropy: of the prediction, in nats.
        divergence: KL(model's prediction ‖ prediction of the state), in nats.
    """

    tokens: Int[Array, "states batch length k"]
    probabilities: Float[Array, "states batch length k"]
    entropy: Float[Array, "states batch length"]
    divergence: Float[Array, "states batch length"]


def logit_lens(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    source: Any = None,
    top_k: int = 5,
    translators: Translators | None = None,
) -> Lens:
    """Computes the prediction after each layer.

    Args:
        model: a decoder, an encoder or an encoder–decoder.
        variables: its variables.
        tokens: ids of complete sequences.
        source: for a model that reads one, the sources.
        top_k: how many of the most probable tokens to return.
        translators: of a tuned or a Jacobian lens; None: states are read as they are.

    Raises:
        ValueError: an argument is not accepted, or the model has no residual stream.
    """
    check_stream(model)
    inputs = read_inputs(model, variables, tokens, source)
    if whole_number("top_k", top_k, 1) > model.config.vocab_size:
        raise ValueError(f"top_k is {top_k}; vocab_size is {model.config.vocab_size}")
    if translators is not None:
        num, dim = model.config.num_layers + 1, model.config.embed_dim
        if np.shape(translators.kernel) != (num, dim, dim):
            raise ValueError(
                f"translators have a kernel {np.shape(translators.kernel)}; this model needs "
                f"{(num, dim, dim)}"
            )
    return _lens(model, variables["params"], inputs, top_k, translators)


def check_stream(model: LanguageModel) -> None:
    """Raises ValueError unless the model has a residual stream that its head reads."""
    if "attention.heads" not in model.points:
        raise ValueError(
            f"model is a {type(model).__name__}; a lens needs the residual stream of a Transformer"
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

    def of_state(state: tuple[Array, Translators | None]) -> Lens:
        found = prediction(model, weights, *state)
        best, tokens = jax.lax.top_k(found, top_k)
        entropy = -(jnp.exp(found) * found).sum(-1)
        return Lens(tokens, jnp.exp(best), entropy, divergence(log_probs, found))

    return jax.lax.map(of_state, (states, translators))


def read_states(
    model: LanguageModel, weights: Weights, inputs: Inputs
) -> tuple[Float[Array, "states batch length dim"], Float[Array, "batch length vocab"]]:
    """Returns the residual stream around the layers, and the model's log probabilities."""
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
    """Computes the log probabilities of the next tokens if the last layer ended with `state`.

    Args:
        model: the model.
        weights: its parameters.
        state: the residual stream.
        translator: the map of this state alone, without the axis of states.
    """
    if translator is not None:
        state = state + state @ translator.kernel.astype(state.dtype)
        state = state + translator.bias.astype(state.dtype)
    hidden = model.architecture.finish(weights, state)
    return jax.nn.log_softmax(model.logits(weights, hidden))


def divergence(
    log_p: Float[Array, "*batch vocab"], log_q: Float[Array, "*batch vocab"]
) -> Float[Array, "*batch"]:
    """Computes KL(p ‖ q) in nats."""
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def no_translators(model: LanguageModel) -> Translators:
    """Returns translators that change nothing."""
    num, dim = model.config.num_layers + 1, model.config.embed_dim
    return Translators(jnp.zeros((num, dim, dim), jnp.float32), jnp.zeros((num, dim), jnp.float32))


def train_tuned_lens(
    model: LanguageModel,
    variables: Variables,
    batches: Iterable[Int[Array, "batch length"]],
    learning_rate: float = 1e-3,
    on_step: Callable[[int, np.ndarray], None] | None = None,
) -> Translators:
    """Learns translators that bring each state's prediction near the model's.

    Each step minimizes the mean divergence over tokens and states with Adam, on one batch. The last
    state needs no translator and its own stays zero.

    Args:
        model: a decoder or an encoder.
        variables: its variables, which stay as they are.
        batches: batches of ids, one per step, all of one shape.
        learning_rate: of Adam.
        on_step: called with the number of the step and the divergence of each state, in nats per
            token.

    Raises:
        ValueError: an argument is not accepted.
    """
    check_stream(model)
    if model.config.reads_source:
        raise ValueError("model reads a source; the tuned lens learns from texts alone")
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
    trained: tuple[Translators, Any],
) -> tuple[Translators, Any, Float[Array, " states"]]:
    translators, optimizer_state = trained
    states, log_probs = read_states(model, weights, inputs)

    def loss(translators: Translators) -> tuple[Float[Array, ""], Float[Array, " states"]]:
        @jax.checkpoint  # otherwise the logits of every state are kept for the backward pass
        def of_state(state: tuple[Array, Translators]) -> Float[Array, ""]:
            return divergence(log_probs, prediction(model, weights, *state)).mean()

        losses = jax.lax.map(of_state, (states, translators))
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
    source: Any = None,
) -> Translators:
    """Returns translators from the average derivative of the last states by each state.

    The translated state is h J, where J is the mean over texts and positions t of the sum over t'
    of ∂ (last state at t') / ∂ (state at t). It says how a change of h moves this and all later
    predictions, to first order.

    Args:
        model: a decoder, an encoder or an encoder–decoder.
        variables: its variables.
        tokens: ids of complete sequences.
        source: for a model that reads one, the sources.

    Raises:
        ValueError: an argument is not accepted, or the model has no residual stream.
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

    def of_state(state: tuple[Array, Array]) -> Float[Array, "dim dim"]:
        number, value = state
        ended, pull_back = jax.vjp(partial(last, number), value)

        def row(feature: Float[Array, " dim"]) -> Float[Array, " dim"]:
            (slope,) = pull_back(jnp.broadcast_to(feature, ended.shape).astype(ended.dtype))
            return slope.astype(jnp.float32).mean((0, 1))

        return jax.lax.map(row, jnp.eye(dim, dtype=jnp.float32)).T

    jacobians = jax.lax.map(of_state, (jnp.arange(num, dtype=jnp.int32), states))
    return Translators(
        jacobians - jnp.eye(dim, dtype=jnp.float32), jnp.zeros((num, dim), jnp.float32)
    )
