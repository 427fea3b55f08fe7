"""What adds to one logit: heads and feed-forward layers, or the vectors of the tokens.

*Direct attribution.* With residuals, the last hidden state is a sum of the embedding and the
outputs of all sub-layers. A norm divides by a size that depends on this sum, so the logit is not
linear in its parts. Here the sizes of the norms stay at their values in this pass. Each norm is
then an affine map, and the parts add up to the logit. A part says what its output adds to the logit
along the residual stream alone. It does not say what would change without it, because later layers
read its output too; ablation measures that.

*Gradients.* A gradient says how the logit changes with a small change of a token's vector. It needs
no heads and no residual stream, so it compares models of all kinds: how far back does a recurrent
model read?

Reference:
    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Simonyan et al. 2014,
    "Deep Inside Convolutional Networks"; for the product with the vector, Li et al. 2016,
    "Visualizing and Understanding Neural Models in NLP".
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.heads import merge_heads
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.outputs import head
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import mixed_layers, transformer_config
from jaxformer.interpret.texts import Read, read_inputs, read_logits
from jaxformer.models.builders.parts import norm_of
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel, Variables

# The point whose value says what a sub-layer writes.
SUB_LAYERS = {
    "attention": "attention.heads",
    "cross_attention": "cross_attention.heads",
    "feedforward": "feedforward.output",
}
EMBEDDING, SOURCE_EMBEDDING = "embedding", "encoder.embedding"
STATES = ("block.output", "recurrent.hidden", "recurrent.cell")


class Attribution(NamedTuple):
    """The parts of the logit of one token, for each batch element.

    Attributes:
        heads: each head of self-attention.
        cross_heads: each head of cross-attention; None if there is none.
        feedforward: each feed-forward layer.
        embedding: the embedding of the token that is read.
        biases: the biases of the output projections, of the norms and of the head.
        logit: the logit that the model computes, before its cap.
    """

    heads: Float[Array, "batch layers heads"]
    cross_heads: Float[Array, "batch layers heads"] | None
    feedforward: Float[Array, "batch layers"]
    embedding: Float[Array, " batch"]
    biases: Float[Array, " batch"]
    logit: Float[Array, " batch"]

    @property
    def total(self) -> Float[Array, " batch"]:
        """The sum of all parts, which equals `logit` up to rounding."""
        parts = self.heads.sum((1, 2)) + self.feedforward.sum(1) + self.embedding + self.biases
        return parts if self.cross_heads is None else parts + self.cross_heads.sum((1, 2))


def attribute(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    target: Int[Array, " batch"],
    position: int = -1,
    source: Any = None,
) -> Attribution:
    """Splits the logit of `target` at one position into the parts that the sub-layers add.

    The difference of two attributions splits the difference of two logits.

    Args:
        model: a decoder, an encoder without BERT's transform, or an encoder–decoder.
        variables: its variables.
        tokens: ids of complete sequences.
        target: the token of each batch element whose logit is split.
        position: the position that predicts it; negative: counted from the end.
        source: for a model that reads one, the sources.

    Raises:
        ValueError: an argument is not accepted, or the model has no sum of sub-layers.
    """
    if (reason := cannot_attribute(model)) is not None:
        raise ValueError(reason)
    read = read_logits(model, variables, tokens, target, position, source)
    return _attribute(model, variables["params"], read)


def cannot_attribute(model: LanguageModel) -> str | None:
    """Returns why a logit of the model is not a sum of sub-layers' outputs; None if it is."""
    if SUB_LAYERS["attention"] not in model.points:
        return f"model is a {type(model).__name__}; attribution needs a Transformer's sub-layers"
    if model.layers is not None:
        return "model has its own layers; attribution needs those of a config"
    if (reason := mixed_layers(model)) is not None:
        return reason
    if getattr(model.config, "transform", False):
        return (
            "model has BERT's transform between the last layer and the head; it is not linear, so "
            "the logit is no sum of parts"
        )
    return None


@partial(jax.jit, static_argnums=0)
def _attribute(model: LanguageModel, weights: Weights, read: Read) -> Attribution:
    inputs, target, position = read
    points = {name: point for name, point in SUB_LAYERS.items() if point in model.points}
    passed = model.forward(weights, inputs, hooks=Hooks(("embedding", *points.values())))
    parts = {"embedding": passed.captured["embedding"][:, position]}
    for name, point in points.items():
        x = passed.captured[point]
        parts[name] = x[:, :, position] if name == "feedforward" else x[..., position, None, :]
    parts = jax.tree.map(lambda x: x.astype(jnp.float32), parts)

    def logit_of(parts: dict[str, Array]) -> tuple[Float[Array, ""], Float[Array, " batch"]]:
        hidden = hidden_of(weights, transformer_config(model), parts)
        found = _pick(linear(head(weights), hidden, jnp.float32), target)
        return found.sum(), found  # batch elements do not depend on each other

    slopes, logit = jax.grad(logit_of, has_aux=True)(parts)
    products = {name: slopes[name] * x for name, x in parts.items()}
    embedding = products.pop("embedding").sum(1)
    added = {
        name: (x.sum(2) if name == "feedforward" else x.sum((3, 4))).swapaxes(0, 1)
        for name, x in products.items()
    }
    of_layers = sum(x.reshape(len(target), -1).sum(1) for x in added.values())
    return Attribution(
        heads=added["attention"],
        cross_heads=added.get("cross_attention"),
        feedforward=added["feedforward"],
        embedding=embedding,
        biases=logit - embedding - of_layers,
        logit=_pick(linear(head(weights), passed.hidden[:, position], jnp.float32), target),
    )


def _pick(
    logits: Float[Array, "batch vocab"], target: Int[Array, " batch"]
) -> Float[Array, " batch"]:
    return jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]


def hidden_of(
    weights: Weights, config: TransformerConfig, parts: dict[str, Array]
) -> Float[Array, "batch dim"]:
    """Computes the input of the head at one position from what is written into the stream.

    Its derivative by the parts is that of an affine map: the sizes of norms count as constants.

    Args:
        weights: the model's parameters.
        config: the model's config.
        parts: "embedding", the input of the first layer [batch, dim], and the output of each
            sub-layer by name: attention has the output of each head, [layers, batch, heads, 1,
            head_dim], the feed-forward layer [layers, batch, dim].
    """

    def layer(
        x: Float[Array, "batch dim"], of_layer: tuple[Weights, dict[str, Array]]
    ) -> tuple[Float[Array, "batch dim"], None]:
        block, outputs = of_layer
        for name in filter(outputs.__contains__, SUB_LAYERS):
            y = outputs[name]
            if name != "feedforward":
                y = linear(block[name]["output"], merge_heads(y))[:, 0]
            x = _add(block, name, x, y, config)
        return x, None

    written = {name: x for name, x in parts.items() if name != "embedding"}
    x, _ = jax.lax.scan(layer, parts["embedding"], (weights["blocks"], written))
    if "final_norm" in weights:
        x = _fixed_norm(weights["final_norm"], x, config)
    return x if config.output_scale is None else x * config.output_scale


def _add(
    block: Weights,
    name: str,
    x: Float[Array, "batch dim"],
    y: Float[Array, "batch dim"],
    config: TransformerConfig,
) -> Float[Array, "batch dim"]:
    """Adds y to x as `functional.layers.layer.Residual` does."""
    if config.norm_position in ("output", "both"):
        own = f"{name}_output_norm" if config.norm_position == "both" else f"{name}_norm"
        y = _fixed_norm(block[own], y, config)
    y = x + y if config.residual else y
    return _fixed_norm(block[f"{name}_norm"], y, config) if config.norm_position == "post" else y


def _fixed_norm(
    weights: Weights, x: Float[Array, "batch dim"], config: TransformerConfig
) -> Float[Array, "batch dim"]:
    """Computes the norm of a config, whose size counts as a constant in derivatives."""
    norm = norm_of(config)
    return x if norm is None else norm.affine(weights, x, jax.lax.stop_gradient(x))


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
    read = read_logits(model, variables, tokens, target, position, source)
    return _gradients(model, variables["params"], read)


@partial(jax.jit, static_argnums=0)
def _gradients(model: LanguageModel, weights: Weights, read: Read) -> Gradients:
    inputs, target, position = read
    points = [name for name in (EMBEDDING, SOURCE_EMBEDDING) if name in model.points]
    vectors = model.forward(weights, inputs, hooks=Hooks(tuple(points))).captured

    def logits_of(vectors: dict[str, Array]) -> tuple[Float[Array, ""], Float[Array, " batch"]]:
        hooks = Hooks(patch={name: Patch(True, x) for name, x in vectors.items()})
        hidden = model.forward(weights, inputs, hooks=hooks).hidden[:, position, None]
        logits = model.logits(weights, hidden)[:, 0]
        found = _pick(logits, target)
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


@partial(jax.jit, static_argnums=0)
def _state_norms(model: LanguageModel, weights: Weights, inputs: Inputs) -> dict[str, Array]:
    points = tuple(name for name in STATES if name in model.layer_points)
    captured = model.forward(weights, inputs, hooks=Hooks(points)).captured
    return {name: jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for name, x in captured.items()}
