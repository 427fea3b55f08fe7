"""Self-attention: each token attends to the tokens that the mask allows.

    y = W_O [heads], where each head is softmax(q kᵀ/√d) v

Reference:
    Notes, lecture 11 §4.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.attention.masks import Causal, Mask, Packed
from jaxformer.functional.attention.scores import Alibi, RelativePositions, Scores
from jaxformer.functional.cache.slots import KeyValueSize
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
from jaxformer.functional.positions import Scaling, rotary
from jaxformer.functional.sequence_size import SequenceSize
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Rotary:
    """Rotary positional encoding of queries and keys; see `positions.rotary`."""

    base: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __call__(
        self,
        x: Float[Array, "*batch heads length d"],
        positions: Int[Array, "*position_batch length"],
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
    """Multi-head self-attention; with fewer key heads than query heads, grouped-query attention.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, which must divide num_heads.
        head_dim: width of a head.
        mask: which tokens a token attends to. `Packed` is added if missing, so that tokens attend
            only to their own document.
        rotary: rotary positional encoding, or None.
        query_key_norm: a norm of queries and keys before the rotation, or None.
        norms_all_heads: whether `query_key_norm` normalizes all heads together instead of each
            head.
        scale: factor of the scores; defaults to 1/√head_dim.
        softcap: soft cap of the scores, or None.
        bias: a bias that is added to the scores, or None.
        use_bias: whether the projections to query, key, value and gate have biases.
        output_bias: whether W_O has a bias.
        has_sinks: whether each head has an attention sink, a learned score that takes part in the
            softmax but has no value vector.
        has_gate: whether the heads are multiplied by a gate, sigmoid(W_g x), before W_O.
    """

    name: ClassVar[str] = "attention"
    hook_points: ClassVar[tuple[str, ...]] = tuple(
        f"attention.{x}" for x in ("input", *PARTS, "scores", "weights", "heads", "output")
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
        """Adds `Packed` to the mask, which also hides padding and the empty slots of a cache."""
        if not any(isinstance(rule, Packed) for rule in self.mask.rules()):
            object.__setattr__(self, "mask", self.mask & Packed())

    def rule(self) -> Mask:
        """See `SubLayer`."""
        return self.mask

    def key_value_size(self) -> KeyValueSize:
        """See `SubLayer`."""
        return KeyValueSize(self.num_kv_heads, self.head_dim, self.mask.reach)

    def flops(self, weights: Weights, size: SequenceSize) -> int:
        """Returns the FLOPs of the linear layers, of attention scores and of weighted sums."""
        scores = 4 * self.num_heads * self.head_dim * size.pairs(self.mask)
        return super().flops(weights, size) + scores

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        maps = axes_of_linear("dim", "heads", *PARTS, "gate")
        return maps | axes_of_linear("heads", "dim", "output") | {"sink": ("heads",)}

    def units(self) -> tuple[int, ...]:
        """See `SubLayer`."""
        return self.num_heads, self.num_kv_heads

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`."""
        stddev = initial.reading(dim) / initial.input_stddev
        weights = init_heads(key, self, dim, stddev, initial)
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
            weights["output"]["kernel"] *= initial.gain(GATE_POWER)
        return weights

    def pack_weights(self, weights: Weights) -> Weights:
        """Fuses the projections to query, key and value into one matrix product.

        The weights are returned unchanged if the projections are already fused or cannot be fused.
        """
        if "query_key_value" in weights:
            return weights
        fused = fuse_linear([weights[name] for name in PARTS])
        if fused is None:
            return weights
        rest = {name: x for name, x in weights.items() if name not in PARTS}
        return {**rest, "query_key_value": fused}

    def context(self, tokens: Tokens, shared: Weights) -> Context:
        """Returns the context of the queries: mask, keys and scores."""
        bias = None if self.bias is None else self.bias.with_weights(shared)
        return tokens.self_attention(self.mask, Scores(self.scale, self.softcap, bias))

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes softmax(q kᵀ/√d) v for each head, concatenates the heads and applies W_O."""
        context, hook = self.with_sinks(weights, at.context), at.hook
        x = hook("attention.input", x)
        query, key, value = self.project(weights, x, context)
        query, key = hook("attention.query", query), hook("attention.key", key)
        value = hook("attention.value", value)
        (keys, values), state = context.store(key, value, at.state)
        heads = self.gated(weights, x, attend(query, keys, values, context, hook))
        heads = hook("attention.heads", heads)
        return Output(
            hook("attention.output", linear(weights["output"], merge_heads(heads))), state
        )

    def with_sinks(self, weights: Weights, context: Context) -> Context:
        """Adds the attention sinks of the layer, if any, to the context."""
        if not self.has_sinks:
            return context
        return replace(context, scores=replace(context.scores, sink=weights["sink"]))

    def gated(
        self,
        weights: Weights,
        x: Float[Array, "*batch length dim"],
        heads: Float[Array, "*batch heads length head_dim"],
    ) -> Float[Array, "*batch heads length head_dim"]:
        """Returns σ(x W_g) ⊙ heads; without a gate, returns `heads`."""
        if not self.has_gate:
            return heads
        return jax.nn.sigmoid(split_heads(linear(weights["gate"], x), self.num_heads)) * heads

    def project(
        self, weights: Weights, x: Float[Array, "*batch length dim"], context: Context
    ) -> tuple[Array, Array, Array]:
        """Computes queries, keys and values, each [*batch, heads or kv_heads, length, head_dim].

        `query_key_norm` normalizes queries and keys, and `rotary` rotates them.
        """
        weights = self.pack_weights(weights) if context.placement.fuses_projections else weights
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


@runtime_checkable
class HeadSizes(Protocol):
    """Head sizes of self-attention or cross-attention; see `Attention`."""

    @property
    def num_heads(self) -> int:
        """Number of query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def use_bias(self) -> bool:
        """Whether the projections to query, key and value have biases."""

    @property
    def output_bias(self) -> bool:
        """Whether W_O has a bias."""


def init_heads(
    key: PRNGKeyArray, sizes: HeadSizes, dim: int, stddev: float, initial: Initial
) -> dict[str, Any]:
    """Returns initial weights of the projections to query, key and value, and of W_O.

    Args:
        key: a random key.
        sizes: the sizes of the heads.
        dim: number of features of the residual stream.
        stddev: standard deviation of the query, key and value kernels.
        initial: the standard deviations of initial weights; `initial.writing` returns the standard
            deviation of W_O.
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
