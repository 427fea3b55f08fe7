"""Attribution of one logit to heads and feed-forward layers, or to the input tokens.

*Direct logit attribution.* With residual connections, the last hidden state is the sum of the
embedding and the outputs of all sub-layers. A norm divides by a scale that depends on the whole
sum, so the logit is not linear in the summands. The attribution keeps the scale of each norm at its
value in the forward pass. With fixed scales, each norm is affine, and the contributions add up to
the logit. A contribution counts only the direct path through the residual stream. A contribution
does not measure the effect of removing the sub-layer, because later layers read the output too;
ablation measures this effect.

*Gradients.* The gradient of the logit with respect to a token's input vector measures the effect of
a small change of this vector. Gradients exist for every model, so they can compare architectures.
For example, they show how far back a recurrent model reads.

Reference:
    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Simonyan et al. 2014,
    "Deep Inside Convolutional Networks"; for gradient times input, Li et al. 2016,
    "Visualizing and Understanding Neural Models in NLP".
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.heads import merge_heads
from jaxformer.functional.hooks import Hooks, Patch
from jaxformer.functional.inputs import Forward, Inputs
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.outputs import head
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import mixed_layers, transformer_config
from jaxformer.interpret.summary import summary
from jaxformer.interpret.texts import Read, read_inputs, read_logits
from jaxformer.models.builders.parts import build_norm
from jaxformer.models.check import Sources
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.terminal import kind_of

# {sub-layer: hook point of its output}.
SUB_LAYERS = {
    "attention": "attention.heads",
    "cross_attention": "cross_attention.heads",
    "feedforward": "feedforward.output",
}
EMBEDDING, SOURCE_EMBEDDING = "embedding", "encoder.embedding"
STATES = ("block.output", "recurrent.hidden", "recurrent.cell")


class Attribution(NamedTuple):
    """Contributions to the logit of one token, for each batch element.

    Attributes:
        heads: contribution of each head of self-attention.
        cross_heads: contribution of each head of cross-attention; None without cross-attention.
        feedforward: contribution of each feed-forward layer.
        embedding: contribution of the embedding of the input token at this position.
        biases: contribution of the biases of output projections, norms and the output head.
        logit: the logit that the model computes, before soft-capping.
    """

    heads: Float[Array, "batch layers heads"]
    cross_heads: Float[Array, "batch layers heads"] | None
    feedforward: Float[Array, "batch layers"]
    embedding: Float[Array, " batch"]
    biases: Float[Array, " batch"]
    logit: Float[Array, " batch"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    @property
    def total(self) -> Float[Array, " batch"]:
        """The sum of all contributions, which equals `logit` up to rounding."""
        parts = self.heads.sum((1, 2)) + self.feedforward.sum(1) + self.embedding + self.biases
        return parts if self.cross_heads is None else parts + self.cross_heads.sum((1, 2))


def attribute(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    target: Int[Array, " batch"],
    position: int = -1,
    source: Sources | None = None,
) -> Attribution:
    """Splits the logit of `target` at one position into the contributions of the sub-layers.

    The difference of two attributions is the attribution of the difference of two logits.

    Args:
        model: a decoder, an encoder–decoder, or an encoder without BERT's transform before the
            head.
        variables: the model's variables.
        tokens: ids of complete sequences.
        target: for each batch element, the token whose logit is split.
        position: the position that predicts the target; negative positions count from the end.
        source: the source sequences, for models with a source.

    Raises:
        ValueError: An argument is invalid or the sub-layers do not add to a residual stream.
    """
    if (reason := cannot_attribute(model)) is not None:
        raise ValueError(reason)
    read = read_logits(model, variables, tokens, target, position, source)
    return _attribute(model, variables["params"], read)


def cannot_attribute(model: LanguageModel) -> str | None:
    """Returns the reason why attribution does not support the model, or None."""
    if SUB_LAYERS["attention"] not in model.hook_points:
        return (
            f"model is {kind_of(model)} without attention layers; attribution requires "
            "a Transformer"
        )
    if model.layers is not None:
        return "the model has user-defined layers; attribution requires layers built from a config"
    if (reason := mixed_layers(model)) is not None:
        return reason
    if getattr(model.config, "transform", False):
        return (
            "model has BERT's transform before the head. Because this transform is not linear, the "
            "logit is not a sum of contributions"
        )
    return None


@partial(jax.jit, static_argnums=0)
def _attribute(model: LanguageModel, weights: Weights, read: Read) -> Attribution:
    parts, slopes, logit, passed = logit_slopes(model, weights, read)
    target, position = read.target, read.position
    products = {name: slopes[name] * x for name, x in parts.items()}
    embedding = products.pop("embedding").sum(1)
    added = {
        name: (x.sum(2) if name == "feedforward" else x.sum((3, 4))).swapaxes(0, 1)
        for name, x in products.items()
    }
    split_layers = sum(x.reshape(len(target), -1).sum(1) for x in added.values())
    return Attribution(
        heads=added["attention"],
        cross_heads=added.get("cross_attention"),
        feedforward=added["feedforward"],
        embedding=embedding,
        biases=logit - embedding - split_layers,
        logit=_pick(linear(head(weights), passed.hidden[:, position], jnp.float32), target),
    )


class LogitSlopes(NamedTuple):
    """The summands of the residual stream at one position, and derivatives of a logit.

    Attributes:
        parts: the summands; see `sum_hidden`.
        slopes: the derivative of the logit with respect to each of `parts`, with the scales of the
            norms treated as constants.
        logit: the logit, computed from `parts`.
        passed: the forward pass.
    """

    parts: dict[str, Array]
    slopes: dict[str, Array]
    logit: Float[Array, " batch"]
    passed: Forward


def logit_slopes(
    model: LanguageModel, weights: Weights, read: Read, capture: tuple[str, ...] = ()
) -> LogitSlopes:
    """Differentiates a logit with respect to the outputs of all sub-layers at the same position.

    Args:
        model: a model that `cannot_attribute` accepts.
        weights: the model's parameters.
        read: the inputs, and the token and position of the logit.
        capture: names of further hook points to capture in the forward pass.
    """
    inputs, target, position = read
    points = {name: point for name, point in SUB_LAYERS.items() if point in model.hook_points}
    hooks = Hooks((EMBEDDING, *points.values(), *capture))
    passed = model.forward(weights, inputs, hooks=hooks)
    parts = {EMBEDDING: passed.captured[EMBEDDING][:, position]}
    for name, point in points.items():
        x = passed.captured[point]
        parts[name] = x[:, :, position] if name == "feedforward" else x[..., position, None, :]
    parts = jax.tree.map(lambda x: x.astype(jnp.float32), parts)

    def target_logit(parts: dict[str, Array]) -> tuple[Float[Array, ""], Float[Array, " batch"]]:
        hidden = sum_hidden(weights, transformer_config(model), parts)
        found = _pick(linear(head(weights), hidden, jnp.float32), target)
        # The gradient of the sum contains the gradient of each batch element, because each logit
        # depends on one batch element only.
        return found.sum(), found

    slopes, logit = jax.grad(target_logit, has_aux=True)(parts)
    return LogitSlopes(parts, slopes, logit, passed)


def _pick(
    logits: Float[Array, "batch vocab"], target: Int[Array, " batch"]
) -> Float[Array, " batch"]:
    return jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]


def sum_hidden(
    weights: Weights, config: TransformerConfig, parts: dict[str, Array]
) -> Float[Array, "batch dim"]:
    """Computes the input of the output head at one position from the outputs of all sub-layers.

    Derivatives treat the scales of the norms as constants, so the function is affine in `parts`.

    Args:
        weights: the model's parameters.
        config: the model's config.
        parts: a dict with the summands of the residual stream at the position. "embedding" is the
            input of the first layer, [batch, dim]. "attention" and "cross_attention" contain the
            output of each head, [layers, batch, heads, 1, head_dim]. "feedforward" contains the
            output of each feed-forward layer, [layers, batch, dim].
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
    """Adds the output y of a sub-layer to x, as `functional.layers.layer.Residual` does."""
    if config.norm_position in ("post_sublayer", "sandwich"):
        own = f"{name}_output_norm" if config.norm_position == "sandwich" else f"{name}_norm"
        y = _fixed_norm(block[own], y, config)
    y = x + y if config.residual else y
    return _fixed_norm(block[f"{name}_norm"], y, config) if config.norm_position == "post" else y


def _fixed_norm(
    weights: Weights, x: Float[Array, "batch dim"], config: TransformerConfig
) -> Float[Array, "batch dim"]:
    """Applies the config's norm to x; derivatives treat the scale of the norm as a constant."""
    norm = build_norm(config)
    if norm is None:
        return x
    return norm.divide(weights, x, jax.lax.stop_gradient(norm.divisor(weights, x)))


class InputGradient(NamedTuple):
    """The gradient of a logit with respect to the input vectors of the first layer.

    Attributes:
        vectors: the input vectors.
        gradient: the gradient with respect to each input vector.
    """

    vectors: Float[Array, "batch length dim"]
    gradient: Float[Array, "batch length dim"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    @property
    def norms(self) -> Float[Array, "batch length"]:
        """The Euclidean norm of the gradient for each token."""
        return jnp.linalg.norm(self.gradient, axis=-1)

    @property
    def products(self) -> Float[Array, "batch length"]:
        """Scalar product of each input vector with its gradient (gradient times input)."""
        return (self.gradient * self.vectors).sum(axis=-1)


class Gradients(NamedTuple):
    """Gradients of the logit of one token, for each batch element.

    Attributes:
        tokens: the gradient with respect to the embeddings of the tokens.
        source: the gradient with respect to the embeddings of the source; None for a model without
            a source.
        logit: the logit.
    """

    tokens: InputGradient
    source: InputGradient | None
    logit: Float[Array, " batch"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


def input_gradients(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    target: Int[Array, " batch"],
    position: int = -1,
    source: Sources | None = None,
) -> Gradients:
    """Computes the gradient of one logit with respect to the input vectors of all tokens.

    Args:
        model: any model.
        variables: the model's variables.
        tokens: ids of complete sequences.
        target: for each batch element, the token whose logit is differentiated.
        position: the position that predicts the target; negative positions count from the end.
        source: the source sequences, for models with a source.

    Raises:
        ValueError: An argument is invalid.
    """
    read = read_logits(model, variables, tokens, target, position, source)
    return _gradients(model, variables["params"], read)


@partial(jax.jit, static_argnums=0)
def _gradients(model: LanguageModel, weights: Weights, read: Read) -> Gradients:
    inputs, target, position = read
    points = [name for name in (EMBEDDING, SOURCE_EMBEDDING) if name in model.hook_points]
    vectors = model.forward(weights, inputs, hooks=Hooks(tuple(points))).captured

    def patched_logits(
        vectors: dict[str, Array],
    ) -> tuple[Float[Array, ""], Float[Array, " batch"]]:
        hooks = Hooks(patch={name: Patch(True, x) for name, x in vectors.items()})
        hidden = model.forward(weights, inputs, hooks=hooks).hidden[:, position, None]
        logits = model.logits(weights, hidden)[:, 0]
        found = _pick(logits, target)
        # The gradient of the sum contains the gradient of each batch element, because each logit
        # depends on one batch element only.
        return found.sum(), found

    slopes, logit = jax.grad(patched_logits, has_aux=True)(vectors)
    found = {name: InputGradient(vectors[name], slopes[name]) for name in points}
    return Gradients(found[EMBEDDING], found.get(SOURCE_EMBEDDING), logit)


def state_norms(
    model: LanguageModel, variables: Variables, tokens: Any, source: Sources | None = None
) -> dict[str, Float[Array, "layers batch length"]]:
    """Computes the Euclidean norm of the hidden states of every layer at every token.

    Args:
        model: any model.
        variables: the model's variables.
        tokens: ids of complete sequences.
        source: the source sequences, for models with a source.

    Returns:
        {hook point: norms} for "block.output", for "recurrent.hidden" in recurrent models, and for
        "recurrent.cell" in an LSTM.

    Raises:
        ValueError: An argument is invalid.
    """
    inputs = read_inputs(model, variables, tokens, source)
    return _state_norms(model, variables["params"], inputs)


@partial(jax.jit, static_argnums=0)
def _state_norms(model: LanguageModel, weights: Weights, inputs: Inputs) -> dict[str, Array]:
    points = tuple(name for name in STATES if name in model.layer_hook_points)
    captured = model.forward(weights, inputs, hooks=Hooks(points)).captured
    return {name: jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for name, x in captured.items()}
