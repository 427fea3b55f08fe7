"""Self-attention: each token reads from the tokens that its mask lets it see.

    softmax(q kᵀ/√d) v for each head, and W_O of all heads

Reference:
    Notes, lecture 11 §4.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.attention.masks import Causal, Mask, Packed
from jaxformer.functional.attention.scores import Alibi, RelativePositions, Scores
from jaxformer.functional.cache.slots import SlotSize
from jaxformer.functional.layers.norms import Norm
from jaxformer.functional.layers.sublayer import (
    GATE_POWER,
    At,
    Initial,
    Output,
    SubLayer,
    WeightAxis,
    axes_of_linear,
)
from jaxformer.functional.linear.affine import fuse_linear, init_linear, linear
from jaxformer.functional.positions import rotary
from jaxformer.functional.row_size import RowSize
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of queries and keys; see `positions.rotary`."""

    base: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Any = None  # a models.config.RotaryScaling, or None

    def __call__(
        self, x: Float[Array, "*batch heads length d"], positions: Int[Array, "*rows length"]
    ) -> Float[Array, "*batch heads length d"]:
        """Rotates queries or keys by their positions."""
        return rotary(
            x,
            positions,
            self.base,
            fraction=self.fraction,
            interleaved=self.interleaved,
            scaling=self.scaling,
        )


@dataclass(frozen=True)
class Attention(SubLayer):
    """Multi-head self-attention, with grouped heads if there are fewer key heads than query heads.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, which divides num_heads.
        head_dim: width of a head.
        mask: which tokens of its document a token sees; `Packed` is added if it is missing.
        rotary: rotary positions, or None.
        query_key_norm: a norm of queries and keys before rotary positions, or None.
        norms_all_heads: whether that norm is over all heads together, instead of over each head.
        scale: factor of the scores; None: 1/√head_dim.
        softcap: soft cap of the scores, or None.
        bias: a bias of the scores, or None.
        use_bias: whether the maps to query, key, value and gate have biases.
        output_bias: whether W_O has a bias.
        has_sinks: whether each head has a learned score that joins the softmax without a value.
        has_gate: whether the heads are multiplied by the sigmoid of a linear map of x before W_O.
    """

    name: ClassVar[str] = "attention"
    points: ClassVar[tuple[str, ...]] = tuple(
        f"attention.{x}" for x in ("input", *PARTS, "weights", "heads", "output")
    )

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: Mask = Causal() & Packed()
    rotary: Rotary | None = None
    query_key_norm: Norm | None = None
    norms_all_heads: bool = False
    scale: float | None = None
    softcap: float | None = None
    bias: Alibi | RelativePositions | None = None
    use_bias: bool = True
    output_bias: bool = True
    has_sinks: bool = False
    has_gate: bool = False

    def __post_init__(self) -> None:
        """Limits the mask to the tokens of a document: a cache has empty slots, and padding."""
        if not any(isinstance(rule, Packed) for rule in self.mask.rules()):
            object.__setattr__(self, "mask", self.mask & Packed())

    def rule(self) -> Mask:
        """See `SubLayer`."""
        return self.mask

    def slot_size(self) -> SlotSize:
        """See `SubLayer`."""
        return SlotSize(self.num_kv_heads, self.head_dim, self.mask.reach)

    def flops(self, weights: Weights, row: RowSize) -> int:
        """Returns the operations of the maps, of scores and of weighted sums."""
        scores = 4 * self.num_heads * self.head_dim * row.pairs(self.mask)
        return super().flops(weights, row) + scores

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        maps = axes_of_linear("dim", "heads", *PARTS, "gate")
        return maps | axes_of_linear("heads", "dim", "output") | {"sink": ("heads",)}

    def units(self) -> tuple[int, ...]:
        """See `SubLayer`."""
        return self.num_heads, self.num_kv_heads

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`.

        Without a residual, key kernels equal query kernels at first, so that each token attends
        mostly to itself and the tokens remain distinct (He et al. 2023, arXiv:2302.10322).
        """
        stddev = initial.reading(dim) / initial.input_stddev
        weights = init_heads(key, self, dim, stddev, initial)
        if initial.num_layers is None:
            query = weights["query"]["kernel"]
            weights["key"]["kernel"] = matching_keys(query, self.num_heads, self.num_kv_heads)
        if self.query_key_norm is not None:
            heads = {"query_norm": self.num_heads, "key_norm": self.num_kv_heads}
            for name, num in heads.items():
                size = self.head_dim * (num if self.norms_all_heads else 1)
                weights[name] = self.query_key_norm.init(size)
        if self.has_sinks:
            weights["sink"] = jnp.zeros(self.num_heads, jnp.float32)
        if self.has_gate:
            size, gate_key = self.num_heads * self.head_dim, jax.random.fold_in(key, 4)
            weights["gate"] = init_linear(
                gate_key, dim, size, use_bias=self.use_bias, stddev=stddev
            )
            if initial.num_layers is None:
                weights["output"]["kernel"] *= GATE_POWER**-0.5
        return weights

    def prepare(self, weights: Weights) -> Weights:
        """Fuses the maps to query, key and value, so that one product replaces three.

        Returns the weights unchanged if the maps are fused already or cannot be.
        """
        if "query_key_value" in weights:
            return weights
        fused = fuse_linear([weights[name] for name in PARTS])
        if fused is None:
            return weights
        rest = {name: x for name, x in weights.items() if name not in PARTS}
        return {**rest, "query_key_value": fused}

    def context(self, tokens: Tokens, shared: Weights) -> Context:
        """Returns what the queries attend to."""
        bias = None if self.bias is None else self.bias.with_weights(shared)
        return tokens.self_attention(self.mask, Scores(self.scale, self.softcap, bias))

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes softmax(q kᵀ/√d) v for each head, concatenates the heads and applies W_O."""
        context, tap = self.with_sinks(weights, at.context), at.tap
        x = tap("attention.input", x)
        query, key, value = self.project(weights, x, context)
        query, key = tap("attention.query", query), tap("attention.key", key)
        value = tap("attention.value", value)
        (keys, values), state = context.store(key, value, at.state)
        heads = self.gated(weights, x, attend(query, keys, values, context, tap))
        heads = tap("attention.heads", heads)
        return Output(tap("attention.output", linear(weights["output"], merge_heads(heads))), state)

    def with_sinks(self, weights: Weights, context: Context) -> Context:
        """Returns the context with the sinks of the layer, if it has them."""
        if not self.has_sinks:
            return context
        return replace(context, scores=replace(context.scores, sink=weights["sink"]))

    def gated(
        self,
        weights: Weights,
        x: Float[Array, "*batch length dim"],
        heads: Float[Array, "*batch heads length head_dim"],
    ) -> Float[Array, "*batch heads length head_dim"]:
        """Returns σ(x W_g) ⊙ heads, or the heads if the layer has no gate."""
        if not self.has_gate:
            return heads
        return jax.nn.sigmoid(split_heads(linear(weights["gate"], x), self.num_heads)) * heads

    def project(
        self, weights: Weights, x: Float[Array, "*batch length dim"], context: Context
    ) -> tuple[Array, Array, Array]:
        """Computes queries, keys and values, each [*batch, heads or kv_heads, length, head_dim].

        Queries and keys are normalized and rotated, if the fields ask for it.
        """
        weights = self.prepare(weights) if context.placement.fuses_projections else weights
        num_heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if "query_key_value" in weights:
            ends = [self.head_dim * sum(num_heads[:side]) for side in (1, 2)]
            projected = jnp.split(linear(weights["query_key_value"], x), ends, axis=-1)
        else:
            projected = [linear(weights[name], x) for name in PARTS]
        query, key, value = map(split_heads, projected, num_heads)
        query = self._rotated(self._normed(weights, "query_norm", query), context)
        key = self._rotated(self._normed(weights, "key_norm", key), context)
        return query, key, value

    def _normed(
        self, weights: Weights, name: str, x: Float[Array, "*batch heads length head_dim"]
    ) -> Float[Array, "*batch heads length head_dim"]:
        if self.query_key_norm is None:
            return x
        if not self.norms_all_heads:
            return self.query_key_norm(weights[name], x)
        return split_heads(self.query_key_norm(weights[name], merge_heads(x)), x.shape[-3])

    def _rotated(
        self, x: Float[Array, "*batch heads length head_dim"], context: Context
    ) -> Float[Array, "*batch heads length head_dim"]:
        if self.rotary is None:
            return x
        positions = context.positions
        if positions is None:
            positions = jnp.arange(x.shape[-2], dtype=jnp.int32)
        return self.rotary(x, positions)


def init_heads(
    key: PRNGKeyArray, sizes: Any, dim: int, stddev: float, initial: Initial
) -> dict[str, Any]:
    """Returns the maps to query, key and value, and W_O.

    Args:
        key: a random key.
        sizes: an `Attention` or a `CrossAttention`.
        dim: number of features of the residual stream.
        stddev: standard deviation of the maps to query, key and value.
        initial: the size of W_O.
    """
    keys = jax.random.split(key, 4)
    outputs = [n * sizes.head_dim for n in (sizes.num_heads, *[sizes.num_kv_heads] * 2)]
    weights: dict[str, Any] = {
        name: init_linear(part_key, dim, size, use_bias=sizes.use_bias, stddev=stddev)
        for name, part_key, size in zip(PARTS, keys, outputs, strict=False)
    }
    written = initial.writing(outputs[0])
    output = init_linear(keys[3], outputs[0], dim, use_bias=sizes.output_bias, stddev=written)
    return {**weights, "output": output}


def matching_keys(
    query_kernel: Float[Array, "dim heads_dim"], num_heads: int, num_kv_heads: int
) -> Float[Array, "dim kv_heads_dim"]:
    """Returns a key kernel with which each token's query matches its own key best.

    Args:
        query_kernel: [dim, num_heads · head_dim].
        num_heads: number of query heads.
        num_kv_heads: number of key heads. The kernel of each is the sum of the kernels of its query
            heads, scaled to the same variance.
    """
    group = num_heads // num_kv_heads
    grouped = query_kernel.reshape(query_kernel.shape[0], num_kv_heads, group, -1)
    return (grouped.sum(axis=2) / group**0.5).reshape(query_kernel.shape[0], -1)
