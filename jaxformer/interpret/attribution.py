"""Direct logit attribution: how much each head and feed-forward layer adds to one logit.

With residuals, the last hidden state is a sum of the embedding and the outputs of all sub-layers. A
norm divides by a size that depends on this sum, so the logit is not linear in its parts. Here the
sizes of the norms stay at their values in this pass. Each norm is then an affine map, and the parts
add up to the logit.

A part says what its output adds to the logit along the residual stream alone. It does not say what
would change without it, because later layers read its output too; ablation measures that.

Reference:
    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
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
from jaxformer.functional.taps import Hooks
from jaxformer.functional.trees import Weights
from jaxformer.interpret.inputs import read_logits
from jaxformer.interpret.layers import mixed_layers, transformer_config
from jaxformer.models.builders.parts import norm_of
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel, Variables

# The point whose value says what a sub-layer writes.
SUB_LAYERS = {
    "attention": "attention.heads",
    "cross_attention": "cross_attention.heads",
    "feedforward": "feedforward.output",
}


class Parts(NamedTuple):
    """What is written into the residual stream at one position.

    Attributes:
        embedding: the input of the first layer.
        written: {name of a sub-layer: its output in each layer}; attention has the output of each
            head, [layers, batch, heads, 1, head_dim], the feed-forward layer [layers, batch, dim].
    """

    embedding: Float[Array, "batch dim"]
    written: dict[str, Array]


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
    checked = read_logits(model, variables, tokens, target, position, source)
    return _attribute(model, variables["params"], *checked)


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


@partial(jax.jit, static_argnums=(0, 4))
def _attribute(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    target: Int[Array, " batch"],
    position: int,
) -> Attribution:
    points = {name: point for name, point in SUB_LAYERS.items() if point in model.points}
    passed = model.forward(weights, inputs, hooks=Hooks(("embedding", *points.values())))
    values = {name: passed.captured[point] for name, point in points.items()}
    at_position = {
        name: x[:, :, position] if name == "feedforward" else x[..., position, None, :]
        for name, x in values.items()
    }
    parts = Parts(passed.captured["embedding"][:, position], at_position)

    def logit_of(parts: Parts, real: Parts) -> Float[Array, " batch"]:
        hidden = affine_hidden(weights, transformer_config(model), parts, real)
        return _pick(linear(head(weights), hidden, jnp.float32), target)

    _, pull_back = jax.vjp(partial(logit_of, real=parts), parts)
    (slopes,) = pull_back(jnp.ones(len(target), jnp.float32))
    products = jax.tree.map(lambda slope, x: (slope * x).astype(jnp.float32), slopes, parts)
    added = {
        name: (x.sum(2) if name == "feedforward" else x.sum((3, 4))).swapaxes(0, 1)
        for name, x in products.written.items()
    }
    return Attribution(
        heads=added["attention"],
        cross_heads=added.get("cross_attention"),
        feedforward=added["feedforward"],
        embedding=products.embedding.sum(1),
        biases=logit_of(jax.tree.map(jnp.zeros_like, parts), parts),
        logit=_pick(linear(head(weights), passed.hidden[:, position], jnp.float32), target),
    )


def _pick(
    logits: Float[Array, "batch vocab"], target: Int[Array, " batch"]
) -> Float[Array, " batch"]:
    return jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]


def affine_hidden(
    weights: Weights, config: TransformerConfig, parts: Parts, real: Parts
) -> Float[Array, "batch dim"]:
    """Computes the input of the head from the parts, with the sizes of all norms from `real`.

    The result is affine in `parts`, and equals the model's if `parts` are `real`.
    """

    def layer(
        pair: tuple[Array, Array], of_layer: tuple[Any, Any, Any]
    ) -> tuple[tuple[Array, Array], None]:
        block, *outputs = of_layer
        for name in SUB_LAYERS:
            if name in block:
                written, written_really = (_output(block, name, x[name]) for x in outputs)
                pair = _add(block, name, pair, (written, written_really), config)
        return pair, None

    pair = parts.embedding, real.embedding
    pair, _ = jax.lax.scan(layer, pair, (weights["blocks"], parts.written, real.written))
    hidden, _ = pair
    if "final_norm" in weights:
        hidden = _fixed_norm(weights["final_norm"], *pair, config)
    return hidden if config.output_scale is None else hidden * config.output_scale


def _output(block: Weights, name: str, written: Array) -> Float[Array, "batch dim"]:
    """Returns what a sub-layer adds: the feed-forward output, or W_O of all heads."""
    if name == "feedforward":
        return written
    return linear(block[name]["output"], merge_heads(written))[:, 0]


def _add(
    block: Weights,
    name: str,
    x: tuple[Array, Array],
    y: tuple[Array, Array],
    config: TransformerConfig,
) -> tuple[Array, Array]:
    """Adds y to x as `functional.layers.layer.Residual` does; each is (value, real value)."""

    def norm(name: str, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        value, real = (_fixed_norm(block[name], of, pair[1], config) for of in pair)
        return value, real

    if config.norm_position in ("output", "both"):
        y = norm(f"{name}_output_norm" if config.norm_position == "both" else f"{name}_norm", y)
    if config.residual:
        y = x[0] + y[0], x[1] + y[1]
    return norm(f"{name}_norm", y) if config.norm_position == "post" else y


def _fixed_norm(
    weights: Weights,
    x: Float[Array, "batch dim"],
    real: Float[Array, "batch dim"],
    config: TransformerConfig,
) -> Float[Array, "batch dim"]:
    """Computes the affine map of x that equals the norm of a config at `real`."""
    norm = norm_of(config)
    return x if norm is None else norm.affine(weights, x, real)
