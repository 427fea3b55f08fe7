"""Gated delta rule: linear attention with a memory that decays and is corrected.

Each head has a memory S [key_dim, value_dim], which is 0 at the start of a document. For each
token, the layer decays, corrects and reads the memory:

    S ← e^{g_t} S
    S ← S + k_t ⊗ β_t (v_t − Sᵀ k_t)
    o_t = Sᵀ q_t

The size of the state does not depend on the length of the text. Decoding applies these formulas
token by token. A longer pass computes chunks of tokens by matrix products (`chunked_delta_rule`),
with equal results.

Reference:
    Gated DeltaNet, Yang et al. 2024 (arXiv:2412.06464); Qwen3-Next, 2025.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.attention.masks import Causal, Mask, Packed
from jaxformer.functional.layers.feedforward import activation_power
from jaxformer.functional.layers.norms import rms_norm
from jaxformer.functional.layers.short_convolution import (
    causal_convolution,
    init_causal_convolution,
    init_past,
)
from jaxformer.functional.layers.sublayer import (
    At,
    Initial,
    Output,
    Start,
    SubLayer,
    WeightAxis,
    axes_of_linear,
)
from jaxformer.functional.layers.token_order import TokenOrder
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.placement import vary_alike
from jaxformer.functional.sequence_size import SequenceSize
from jaxformer.functional.symbolic import Size, at_most, is_known
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

# A chunk has at most `CHUNK` tokens, and its size is a power of two.
CHUNK = 64
# This value is added to the squared norm of queries and keys.
_LENGTH_EPSILON = 1e-6
_PARTS = ("query", "key", "value")

Memory = Float[Array, "batch heads key_dim value_dim"]


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule for each token and head.

    Attributes:
        query: the query q.
        key: the key k.
        value: the value v.
        log_decay: the logarithm g of the decay, at most 0. At padding g is 0, so that the memory is
            unchanged.
        rate: the learning rate β in [0, 1]; 0 at padding.
        begins: whether a document begins at a token.
    """

    query: Float[Array, "batch heads length key_dim"]
    key: Float[Array, "batch heads length key_dim"]
    value: Float[Array, "batch heads length value_dim"]
    log_decay: Float[Array, "batch heads length"]
    rate: Float[Array, "batch heads length"]
    begins: Bool[Array, "batch length"]


def gated_delta_rule(
    inputs: DeltaInputs, memory: Memory, *, keeps_states: bool = False
) -> tuple[Float[Array, "batch heads length value_dim"], Float[Array, "batch *length h k v"]]:
    """Computes the gated delta rule token by token.

    Args:
        inputs: the query, key, value, decay and learning rate of each token.
        memory: the memory S before the first token.
        keeps_states: whether to return the memory S after each token.

    Returns:
        The output o of each token, and the memory S after the last token or after each token.
    """

    def step(memory: Memory, token: DeltaInputs) -> tuple[Memory, tuple[Array, Memory | None]]:
        query, key, value, log_decay, rate, begins = token
        memory = jnp.where(begins[:, None, None, None], 0, memory)
        memory = jnp.exp(log_decay)[..., None, None] * memory
        error = value - _product("bhkv,bhk->bhv", memory, key)
        memory += _product("bhk,bhv->bhkv", key, rate[..., None] * error)
        output = _product("bhkv,bhk->bhv", memory, query)
        return memory, (output, memory if keeps_states else None)

    by_time = DeltaInputs(*(jnp.moveaxis(x, 2, 0) for x in inputs[:-1]), begins=inputs.begins.T)
    memory, (output, memories) = jax.lax.scan(step, memory, by_time)
    return jnp.moveaxis(output, 0, 2), memory if memories is None else jnp.swapaxes(memories, 0, 1)


def chunked_delta_rule(
    inputs: DeltaInputs, memory: Memory, chunk_size: int = CHUNK
) -> tuple[Float[Array, "batch heads length value_dim"], Memory]:
    """Computes `gated_delta_rule` in chunks of `chunk_size` tokens, a power of two."""
    length = inputs.query.shape[2]
    num_chunks = (length + chunk_size - 1) // chunk_size

    def split(x: Array, axis: int) -> Array:
        width = [(0, 0)] * x.ndim
        # The added zeros act as padding tokens.
        width[axis] = (0, num_chunks * chunk_size - length)
        shape = (*x.shape[:axis], num_chunks, chunk_size, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, width).reshape(shape), axis, 0)

    chunks = DeltaInputs(*(split(x, 2) for x in inputs[:-1]), begins=split(inputs.begins, 1))
    memory, output = jax.lax.scan(_delta_of_chunk, memory, chunks)
    output = jnp.moveaxis(output, 0, 2)
    shape = (*output.shape[:2], num_chunks * chunk_size, output.shape[-1])
    return output.reshape(shape)[:, :, :length], memory


def _delta_of_chunk(
    memory: Memory, chunk: DeltaInputs
) -> tuple[Memory, Float[Array, "batch heads chunk value_dim"]]:
    """Computes one chunk of the gated delta rule with matrix products.

    The corrections u_i = β_i (v_i − S_iᵀ k_i) depend on the memory before the chunk and on earlier
    corrections: u_i = β_i (v_i − e^{g_1 + … + g_i} Sᵀ k_i − Σ_{j<i} e^{g_{j+1} + … + g_i} k_i·k_j
    u_j). The equations of all corrections form a linear system with a unit lower triangular matrix.
    """
    query, key, value, log_decay, rate, begins = chunk
    # `number` counts documents; 0 is the document that began before the chunk.
    number = begins.cumsum(axis=1)
    size = number.shape[1]
    is_earlier = jnp.tril(jnp.ones((size, size), bool))
    is_read = (number[:, :, None] == number[:, None, :]) & is_earlier
    decay = jnp.where(is_read[:, None], jnp.exp(_sums_between(log_decay)), 0)
    continues = (number == 0)[:, None]
    since = jnp.where(continues, jnp.exp(log_decay.cumsum(axis=2)), 0)[..., None]

    system = rate[..., None] * decay * _product("bhik,bhjk->bhij", key, key)
    expected = since * _product("bhik,bhkv->bhiv", key, memory)
    corrections = rate[..., None] * (value - expected)
    inverse = invert_unit_lower(jnp.tril(system, -1))
    corrections = _product("bhij,bhjv->bhiv", inverse, corrections)

    scores = decay * _product("bhik,bhjk->bhij", query, key)
    output = since * _product("bhik,bhkv->bhiv", query, memory)
    output += _product("bhij,bhjv->bhiv", scores, corrections)
    kept = decay[:, :, -1, :, None] * key
    memory = since[:, :, -1:] * memory + _product("bhjk,bhjv->bhkv", kept, corrections)
    return memory, output


def _sums_between(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n n"]:
    """Computes x_{j+1} + … + x_i for each i ≥ j, and 0 for i < j.

    A difference of two cumulative sums would lose small terms after a large term.
    """
    size = x.shape[-1]
    is_later = jnp.tril(jnp.ones((size, size), bool), -1)
    return jnp.where(is_later, x[..., None], 0).cumsum(axis=-2)


def invert_unit_lower(a: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Returns (1 + a)⁻¹ for a strictly lower triangular a, whose size n is a power of two.

    The block [[P, 0], [R, Q]] has the inverse [[P⁻¹, 0], [−Q⁻¹ R P⁻¹, Q⁻¹]], so the inverses of
    diagonal blocks are merged in pairs. The series Σ (−a)ᵏ is not used, because its powers
    could exceed float32 before they vanish.
    """
    *batch, size, _ = a.shape
    blocks = jnp.ones((*batch, size, 1, 1), a.dtype)
    half = 1
    while half < size:
        num = size // (2 * half)
        first, second = jnp.moveaxis(blocks.reshape(*batch, num, 2, half, half), -3, 0)
        corners = a.reshape(*batch, num, 2, half, num, 2, half)[..., :, 1, :, :, 0, :]
        corners = jnp.moveaxis(jnp.diagonal(corners, axis1=-4, axis2=-2), -1, -3)
        below = -_product("...ij,...jk,...kl->...il", second, corners, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([below, second], axis=-1)
        blocks = jnp.concatenate([upper, lower], axis=-2)
        half *= 2
    return blocks[..., 0, :, :]


def _product(letters: str, *arrays: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes an einsum in full float32 precision on every device."""
    return jnp.einsum(letters, *arrays, precision=jax.lax.Precision.HIGHEST)


def unit_vectors(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Returns x / √(|x|² + ε) in float32."""
    x = x.astype(jnp.float32)
    square = jnp.square(x).sum(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + _LENGTH_EPSILON)


class DeltaContext(NamedTuple):
    """Context of the delta rule: order and documents of the tokens of a forward pass.

    Attributes:
        order: the order of the tokens for the convolution.
        begins: bool [batch, length] or [length], whether a document begins at a token.
        is_token: bool [batch, length], False for padding; None without padding.
    """

    order: TokenOrder
    begins: Bool[Array, "*batch length"]
    is_token: Bool[Array, "batch length"] | None


@dataclass(frozen=True)
class GatedDelta(SubLayer):
    """Gated delta rule, a sub-layer that replaces self-attention.

    A causal convolution and SiLU are applied to queries, keys and values. Queries and keys are
    scaled to norm 1. The output of each head is normalised and multiplied by SiLU of a gate.

    Attributes:
        num_key_heads: number of heads of queries and keys, which must divide num_value_heads.
        num_value_heads: number of value heads, each with a memory. Value head i uses key head i //
            (num_value_heads / num_key_heads).
        key_dim: width of a query and of a key.
        value_dim: width of a value.
        kernel_size: the number of tokens that the convolution reads per output.
        epsilon: added to the mean square in the norm of the output.
    """

    name: ClassVar[str] = "gated_delta"
    hook_points: ClassVar[tuple[str, ...]] = tuple(
        f"gated_delta.{x}" for x in (*_PARTS, "decay", "rate", "heads", "output")
    )

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int = 4
    epsilon: float = 1e-6

    @property
    def widths(self) -> tuple[int, int, int]:
        """The number of features of all queries, all keys and all values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`.

        The initial decay per token is e^{−a Δ}, with a in 1 … 16 and Δ in 0.001 … 0.1 (Mamba 2, Dao
        & Gu 2024).
        """
        heads, values = self.num_value_heads, self.widths[2]
        outputs = dict(zip(_PARTS, self.widths, strict=True))
        outputs |= {"gate": values, "rate": heads, "decay": heads}
        keys = jax.random.split(key, len(outputs) + 4)
        stddev = initial.reading(dim) / initial.input_stddev
        weights = {
            name: init_linear(map_key, dim, size, use_bias=False, stddev=stddev)
            for map_key, (name, size) in zip(keys[4:], outputs.items(), strict=True)
        }
        low, high = jnp.log(0.001), jnp.log(0.1)
        shape = (heads,)
        steps = jnp.exp(jax.random.uniform(keys[0], shape, jnp.float32, low, high))
        scale = jax.random.uniform(keys[1], shape, jnp.float32, 1.0, 16.0)
        weights["decay"] |= {"bias": jnp.log(jnp.expm1(steps)), "log_scale": jnp.log(scale)}
        filters = self.kernel_size**-0.5
        weights["convolution"] = init_causal_convolution(
            keys[2], self.kernel_size, sum(self.widths), use_bias=False, stddev=filters
        )
        weights["norm"] = {"scale": jnp.ones(self.value_dim, jnp.float32)}
        writing = initial.writing(values) * initial.gain(activation_power("silu"))
        weights["output"] = init_linear(keys[3], values, dim, use_bias=False, stddev=writing)
        return weights

    def init_state(self, weights: Weights, start: Start) -> tuple[Array, Memory]:
        """Returns zeros for the last inputs of the convolution and for the memory."""
        past = init_past(start.batch_size, self.kernel_size, sum(self.widths), start.dtype)
        return past, self._init_memory(start.batch_size)

    def _init_memory(self, batch_size: Size) -> Memory:
        shape = (batch_size, self.num_value_heads, self.key_dim, self.value_dim)
        return jnp.zeros(shape, jnp.float32)

    def rule(self) -> Mask:
        """See `SubLayer`."""
        return Causal() & Packed()

    def flops(self, weights: Weights, size: SequenceSize) -> int:
        """Returns the FLOPs of the linear layers, and of two reads and one update of the memory."""
        steps = 6 * size.length * self.num_value_heads * self.key_dim * self.value_dim
        return super().flops(weights, size) + steps

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        maps = axes_of_linear("dim", "heads", *_PARTS, "gate")
        maps |= axes_of_linear("heads", "dim", "output")
        return maps | {"convolution/filter": (None, "heads")}

    def units(self) -> tuple[int, ...]:
        """See `SubLayer`."""
        return self.num_key_heads, self.num_value_heads

    def context(self, tokens: Tokens, shared: Weights) -> DeltaContext:
        """Returns the order, the document starts and the padding of the tokens."""
        new = tokens.new
        is_token = None if new.segment_ids is None else new.segment_ids != 0
        begins = jnp.asarray(new.position_ids() == 0)
        begins = begins if is_token is None else begins & is_token
        return DeltaContext(TokenOrder.of(new), begins, is_token)

    def __post_init__(self) -> None:
        """Raises ValueError unless num_key_heads divides num_value_heads."""
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads is {self.num_key_heads}, but must divide num_value_heads "
                f"({self.num_value_heads})"
            )

    def __call__(self, weights: Weights, x: Float[Array, "batch length dim"], at: At) -> Output:
        """Computes the outputs, the last inputs of the convolution and the memory."""
        past, memory = (None, self._init_memory(x.shape[0])) if at.state is None else at.state
        inputs, past = self.project_inputs(weights, x, at, past)
        memory, _ = vary_alike(memory, inputs)
        length = x.shape[1]
        if at_most(length, 1) or at.keeps_states:
            heads, memory = gated_delta_rule(inputs, memory, keeps_states=at.keeps_states)
        else:
            heads, memory = chunked_delta_rule(inputs, memory, _chunk_size(length))
        if (is_token := at.context.is_token) is not None:
            heads = jnp.where(is_token[:, None, :, None], heads, 0)
        heads = rms_norm(heads, weights["norm"]["scale"], self.epsilon)
        gate = split_heads(linear(weights["gate"], x), self.num_value_heads)
        heads = at.hook("gated_delta.heads", heads * jax.nn.silu(gate.astype(jnp.float32)))
        y = linear(weights["output"], merge_heads(heads).astype(x.dtype))
        y = at.hook("gated_delta.output", y)
        return Output(y, None if past is None else (past, memory))

    def project_inputs(
        self,
        weights: Weights,
        x: Float[Array, "batch length dim"],
        at: At,
        past: Float[Array, "batch earlier features"] | None,
    ) -> tuple[DeltaInputs, Float[Array, "batch *length earlier features"] | None]:
        """Computes the inputs of the delta rule, and the last inputs of the convolution."""
        context, hook, group = at.context, at.hook, self.num_value_heads // self.num_key_heads
        joined = jnp.concatenate([linear(weights[name], x) for name in _PARTS], axis=-1)
        joined, past = causal_convolution(
            weights["convolution"], joined, context.order, past, keeps_states=at.keeps_states
        )
        ends = [self.widths[0], 2 * self.widths[0]]
        parts = jnp.split(jax.nn.silu(joined.astype(jnp.float32)), ends, axis=-1)
        numbers = (self.num_key_heads, self.num_key_heads, self.num_value_heads)
        query, key, value = map(split_heads, parts, numbers)
        query, key = unit_vectors(query) * self.key_dim**-0.5, unit_vectors(key)
        query, key = hook("gated_delta.query", query), hook("gated_delta.key", key)
        value = hook("gated_delta.value", value)

        steps = jax.nn.softplus(linear(weights["decay"], x, jnp.float32))
        log_decay = -jnp.exp(weights["decay"]["log_scale"]) * steps
        rate = jax.nn.sigmoid(linear(weights["rate"], x, jnp.float32))
        if context.is_token is not None:
            is_token = context.is_token[..., None]
            log_decay, rate = jnp.where(is_token, log_decay, 0), jnp.where(is_token, rate, 0)
        log_decay, rate = hook("gated_delta.decay", log_decay), hook("gated_delta.rate", rate)
        query, key = (jnp.repeat(part, group, axis=1) for part in (query, key))
        log_decay, rate = (jnp.swapaxes(part, 1, 2) for part in (log_decay, rate))
        begins = jnp.broadcast_to(context.begins, x.shape[:2])
        return DeltaInputs(query, key, value, log_decay, rate, begins), past


def _chunk_size(length: Size) -> int:
    """Returns `length`, rounded up to a power of two, but at most CHUNK."""
    return min(CHUNK, 1 << (length - 1).bit_length()) if is_known(length) else CHUNK
