"""Gradients of a logit by the vectors of the tokens, and sizes of states, for every kind of model.

A gradient says how the logit changes with a small change of a token's vector. It needs no heads and
no residual stream, so it compares models of all kinds: how far back does a recurrent model read?

Reference:
    Simonyan et al. 2014, "Deep Inside Convolutional Networks"; for the product with the vector,
    Li et al. 2016, "Visualizing and Understanding Neural Models in NLP".
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.functional.trees import Weights
from jaxformer.interpret.inputs import read_inputs, read_logits
from jaxformer.models.language_model import LanguageModel, Variables

EMBEDDING, SOURCE_EMBEDDING = "embedding", "encoder.embedding"


class InputGradient(NamedTuple):
    """The gradient of a logit by the vectors that the first layer reads.

    Attributes:
        vectors: the vectors.
        gradient: the gradient by each of them.
    """

    vectors: Float[Array, "batch length dim"]
    gradient: Float[Array, "batch length dim"]

    @property
    def norms(self) -> Float[Array, "batch length"]:
        """The Euclidean norm of the gradient by the vector of each token."""
        return jnp.linalg.norm(self.gradient, axis=-1)

    @property
    def products(self) -> Float[Array, "batch length"]:
        """The product gradient · vector: to first order, how much the vector adds to the logit."""
        return (self.gradient * self.vectors).sum(axis=-1)


class Gradients(NamedTuple):
    """The gradients of the logit of one token, for each batch element.

    Attributes:
        tokens: by the vectors of the tokens.
        source: by the vectors of the source; None if the model reads none.
        logit: the logit.
    """

    tokens: InputGradient
    source: InputGradient | None
    logit: Float[Array, " batch"]


def input_gradients(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    target: Int[Array, " batch"],
    position: int = -1,
    source: Any = None,
) -> Gradients:
    """Computes the gradient of the logit of `target` at one position by the vectors of all tokens.

    Args:
        model: a model of any kind.
        variables: its variables.
        tokens: ids of complete sequences.
        target: the token of each batch element.
        position: the position that predicts it; negative: counted from the end.
        source: for a model that reads one, the sources.

    Raises:
        ValueError: an argument is not accepted.
    """
    checked = read_logits(model, variables, tokens, target, position, source)
    return _gradients(model, variables["params"], *checked)


@partial(jax.jit, static_argnums=(0, 4))
def _gradients(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    target: Int[Array, " batch"],
    position: int,
) -> Gradients:
    points = [name for name in (EMBEDDING, SOURCE_EMBEDDING) if name in model.points]
    vectors = model.forward(weights, inputs, hooks=Hooks(tuple(points))).captured

    def logits_of(vectors: dict[str, Array]) -> tuple[Float[Array, ""], Float[Array, " batch"]]:
        hooks = Hooks(patch={name: Patch(True, x) for name, x in vectors.items()})
        hidden = model.forward(weights, inputs, hooks=hooks).hidden[:, position, None]
        logits = model.logits(weights, hidden)[:, 0]
        found = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        return found.sum(), found  # batch elements do not depend on each other

    slopes, logit = jax.grad(logits_of, has_aux=True)(vectors)
    found = {name: InputGradient(vectors[name], slopes[name]) for name in points}
    return Gradients(found[EMBEDDING], found.get(SOURCE_EMBEDDING), logit)


def state_norms(
    model: LanguageModel, variables: Variables, tokens: Any, source: Any = None
) -> dict[str, Float[Array, "layers batch length"]]:
    """Computes the Euclidean norm of the states of every layer at every token.

    Args:
        model: a model of any kind.
        variables: its variables.
        tokens: ids of complete sequences.
        source: for a model that reads one, the sources.

    Returns:
        {point: norms}: of "block.output" and, for recurrent layers, of "recurrent.hidden" and
        for an LSTM of "recurrent.cell".

    Raises:
        ValueError: an argument is not accepted.
    """
    inputs = read_inputs(model, variables, tokens, source)
    return _state_norms(model, variables["params"], inputs)


STATES = ("block.output", "recurrent.hidden", "recurrent.cell")


@partial(jax.jit, static_argnums=0)
def _state_norms(model: LanguageModel, weights: Weights, inputs: Inputs) -> dict[str, Array]:
    points = tuple(name for name in STATES if name in model.layer_points)
    captured = model.forward(weights, inputs, hooks=Hooks(points)).captured
    return {name: jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for name, x in captured.items()}
