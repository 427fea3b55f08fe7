"""The Transformer: decoder, encoder and encoder–decoder.

    tokens → embedding + position → layers → norm → logits

Decoder: output i predicts token i + 1 and depends on tokens ≤ i. With a prefix it also depends on
all tokens of the prefix: these first tokens of a document see one another in both directions, and
the model does not predict them.

Encoder: tokens see all tokens of their document. It is not autoregressive: output i also depends on
later tokens. It therefore learns to fill in tokens that are masked in a text, from both sides
(Devlin et al. 2019, BERT); see `losses.token_masking.mask_tokens`.

Encoder–decoder: the decoder's layers also attend to the encoder's output for a source, except its
padding. A source is encoded once, and the cache holds its keys and values in addition to the
decoder's own.

Reference:
    Notes, lecture 11 §6; lecture 13 §1–5.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional.architecture import CacheSize, Initializers
from jaxformer.functional.attention.contexts import Pass
from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.key_values import Cache, LayerSlots, init_cache
from jaxformer.functional.cache.source_cache import SourceCache
from jaxformer.functional.embedding import Embedding, Head, head, pack_kernels
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.layers.cross_attention import CrossAttention
from jaxformer.functional.layers.feedforward import activate
from jaxformer.functional.layers.layer import sublayers_of
from jaxformer.functional.layers.norms import Norm
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.stack import Stack, run_stack
from jaxformer.functional.taps import Tap
from jaxformer.functional.trees import Weights, split_key

PREFIX = "encoder."  # of the names of the encoder's points


@dataclass(frozen=True)
class Transform:
    """BERT's map in front of the head, Norm(act(W x + b)).

    Attributes:
        activation: the activation.
        norm: the norm, or None.
        use_bias: whether there is b.
    """

    activation: str
    norm: Norm | None
    use_bias: bool = True

    def initializers(self, dim: int) -> Initializers:
        """Returns {name: initializer of a part of the weights}."""
        parts: Initializers = {
            "transform": lambda key: init_linear(key, dim, dim, use_bias=self.use_bias)
        }
        if self.norm is not None:
            parts["transform_norm"] = partial(_init_norm, self.norm, dim)
        return parts

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes Norm(act(W x + b))."""
        x = activate(linear(weights["transform"], x), self.activation)
        return x if self.norm is None else self.norm(weights["transform_norm"], x)


@dataclass(frozen=True)
class Pooler:
    """One vector for each row, tanh(W h + b), and the classes that it predicts.

    h is the vector of the row's first token that is not padding.

    Attributes:
        use_bias: whether there is b.
        num_labels: number of classes; 0: there is no classifier.
    """

    use_bias: bool = True
    num_labels: int = 0

    def initializers(self, dim: int) -> Initializers:
        """Returns {name: initializer of a part of the weights}."""
        parts: Initializers = {
            "pooler": lambda key: init_linear(key, dim, dim, use_bias=self.use_bias)
        }
        if self.num_labels:
            parts["classifier"] = lambda key: init_linear(key, dim, self.num_labels)
        return parts

    def __call__(
        self,
        weights: Weights,
        encoded: Float[Array, "batch length dim"],
        segments: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch dim"]:
        """Computes the vector of each row."""
        is_first = jnp.zeros(encoded.shape[0], int)
        first = is_first if segments is None else (segments != 0).argmax(axis=1)
        rows = jnp.take_along_axis(encoded, first[:, None, None], axis=1)[:, 0]
        return jnp.tanh(linear(weights["pooler"], rows))

    def classify(
        self,
        weights: Weights,
        encoded: Float[Array, "batch length dim"],
        segments: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Computes float32 logits of each row's classes: an affine map of its vector."""
        return linear(weights["classifier"], self(weights, encoded, segments), jnp.float32)


@dataclass(frozen=True)
class Transformer:
    """A Transformer as a value.

    Attributes:
        embedding: the embedding of its tokens.
        stack: its layers.
        head: the map to logits; None for an encoder whose output a decoder reads.
        generates: whether it is autoregressive.
        encoder: the encoder of its source, or None.
        shares_embedding: whether the encoder's token vectors are those of the decoder.
        transform: BERT's map in front of the head, or None.
        pooler: the pooler of an encoder, or None.
    """

    embedding: Embedding
    stack: Stack
    head: Head | None = None
    generates: bool = True
    encoder: "Transformer | None" = None
    shares_embedding: bool = False
    transform: Transform | None = None
    pooler: Pooler | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.stack.layers)

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The mask of each sub-layer that reads other tokens."""
        return self.stack.masks

    @cached_property
    def layer_points(self) -> tuple[str, ...]:
        """The points inside the layers; captured values have the layer as their first axis."""
        encoder = () if self.encoder is None else self.encoder.layer_points
        return (*(PREFIX + name for name in encoder), *self.stack.points)

    @cached_property
    def points(self) -> tuple[str, ...]:
        """The names of the points to capture or patch, in the order of computation."""
        encoder = () if self.encoder is None else self.encoder.points
        own = ("embedding", *self.stack.points, "final_norm")
        return (*(PREFIX + name for name in encoder), *own)

    @cached_property
    def initializers(self) -> Initializers:
        """{name: initializer of a part of the weights}, each a pure function of a key."""
        embedding, stack, dim = self.embedding, self.stack, self.embedding.dim
        parts: Initializers = {"embedding": embedding.init_tables, "blocks": stack.init}
        norms = {"embedding_norm": embedding.norm, "final_norm": stack.final_norm}
        for name, norm in norms.items():
            if norm is not None:
                parts[name] = partial(_init_norm, norm, dim)
        if stack.relative is not None:
            parts["relative_bias"] = stack.relative.init
        for part in (self.pooler, self.transform):
            parts |= {} if part is None else part.initializers(dim)
        if self.encoder is not None:
            parts["encoder"] = self._init_encoder
        return parts | ({} if self.head is None else self.head.initializers())

    def _init_encoder(self, key: PRNGKeyArray) -> Weights:
        """Returns the encoder's weights, without token vectors if it shares the decoder's."""
        parts = {} if self.encoder is None else self.encoder.initializers
        keys = jax.random.split(key, len(parts))
        tree = {name: init(key) for (name, init), key in zip(parts.items(), keys, strict=True)}
        if self.shares_embedding:
            tables = dict(tree.pop("embedding"))
            del tables["tokens"]
            tree |= {"embedding": tables} if tables else {}
        return tree

    def forward(self, weights: Weights, inputs: Inputs, run: Run, cache: Any = None) -> Forward:
        """Computes the input of the head [batch, length, dim].

        Args:
            weights: those of `initializers`.
            inputs: the tokens and, without a cache, the sources that they read.
            run: how the pass runs.
            cache: the `Cache` of earlier tokens or, if the model reads sources, a `SourceCache`;
                None: the tokens are complete sequences.
        """
        if self.encoder is None:
            return self._run_layers(weights, inputs, run, cache)
        encoder_key, decoder_key = split_key(run.dropout_key, 2)
        own = replace(run, dropout_key=decoder_key)
        if cache is not None:
            passed = self._run_layers(weights, inputs, own, cache.self_cache, cache)
            return passed._replace(cache=replace(cache, self_cache=passed.cache))
        encoded = self.encode(weights, inputs.of_source(), run.of_encoder(PREFIX, encoder_key))
        passed = self._run_layers(weights, inputs, own, encoded=encoded.hidden)
        return passed._replace(captured={**encoded.captured, **passed.captured})

    def encode(self, weights: Weights, source: Inputs, run: Run) -> Forward:
        """Encodes a source."""
        if self.encoder is None:
            raise ValueError("source was given; this model reads none")
        own = weights["encoder"]
        tables = {"tokens": weights["embedding"]["tokens"], **own.get("embedding", {})}
        encoded = self.encoder.forward({**own, "embedding": tables}, source, run)
        return encoded._replace(captured={PREFIX + name: x for name, x in encoded.captured.items()})

    def _run_layers(
        self,
        weights: Weights,
        inputs: Inputs,
        run: Run,
        cache: Cache | None = None,
        read: SourceCache | None = None,
        encoded: Float[Array, "sources source dim"] | None = None,
    ) -> Forward:
        """Computes the embedding, the layers and the norm; see `forward`.

        Invalid batch elements become NaN (see `mask_invalid_rows`), because a write beyond the
        capacity would otherwise overwrite the last slots.

        Args:
            weights: see `forward`.
            inputs: see `forward`.
            run: see `forward`.
            cache: the cache of earlier tokens, or None.
            read: the cache that has read the sources, or None.
            encoded: the encoded sources, or None.
        """
        run = replace(run, placement=run.placement.of_stack(self.stack.units))
        after, states = None, None
        if cache is None:
            tokens = Pass.of_sequences(inputs, run)
        else:
            tokens, after = Pass.of_cache(inputs, cache, run)
            states = cache.layer_states
        if encoded is not None:
            source = TokenInfo(encoded.shape[1], None, inputs.source_segments)
            tokens = replace(tokens, source=source, encoded=encoded)
        if read is not None:
            tokens, states = replace(tokens, source=read.source), read.layer_states
        embed_key, *layer_keys = split_key(run.dropout_key, 1 + len(self.stack.layers))
        tap = Tap(run.hooks, tokens.new.positions, tokens.new.segments, run.placement)
        x = self.embedding(weights, inputs, tokens.new.positions, embed_key, tap)
        x, states, captured, auxiliary = run_stack(
            self.stack, weights, x, tokens, states, layer_keys
        )
        x = self.transformed(weights, tap("final_norm", self.stack.finish(weights, x)))
        captured = {**tap.captured, **captured}
        if cache is None or after is None:
            return Forward(x, captured, None, auxiliary)
        after = after.with_states(states)
        x = mask_invalid_rows(x, cache, after, self.masks)
        return Forward(x, captured, after, auxiliary)

    def finish(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Computes the input of the head from the last layer's output."""
        return self.transformed(weights, self.stack.finish(weights, x))

    def transformed(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Applies BERT's map in front of the head, if there is one."""
        return x if self.transform is None else self.transform(weights, x)

    def start(
        self, weights: Weights, source: Inputs | None, run: Run, size: CacheSize
    ) -> tuple[Cache | SourceCache, dict[str, Array]]:
        """Returns (the cache of rows that have read only their source, captured values of it).

        Raises:
            ValueError: there is no source, but the model reads one.
        """
        slots, states = zip(*map(partial(_kept, self, size), range(self.num_layers)), strict=True)
        cache = init_cache(slots, size, self.embedding.dtype, states)
        if self.encoder is None:
            return cache, {}
        if source is None:
            raise ValueError("source is None; this model reads one")
        encoded = self.encode(weights, source, run.of_encoder(PREFIX, None))
        cross = [
            sublayer.keys_values(tree[sublayer.name], encoded.hidden)
            for layer, tree in zip(
                self.stack.layers, self.stack.layer_trees(weights["blocks"]), strict=True
            )
            for sublayer in sublayers_of(layer)
            if isinstance(sublayer, CrossAttention)
        ]
        return SourceCache.of(cache, cross, source), encoded.captured

    def prepare(self, weights: Weights, parts: int = 1) -> Weights:
        """Repacks the weights for decoding.

        It casts the tables of vectors to the compute dtype, unstacks the layers, prepares each
        sub-layer, and packs the kernels and the head (see `pack_kernels`). An encoder's weights are
        unchanged, because it takes few, large steps.
        """
        dtype = self.embedding.dtype
        tables = weights["embedding"].items()
        return {
            **weights,
            "embedding": {name: table.astype(dtype) for name, table in tables},
            "blocks": [
                pack_kernels(layer, dtype, parts) for layer in self.stack.prepare(weights["blocks"])
            ],
            "head": pack_kernels(head(weights), dtype, parts),
        }


def _kept(
    model: Transformer, size: CacheSize, number: int
) -> tuple[LayerSlots | None, dict[str, Any]]:
    """Returns what a layer keeps of each token, and the states of its other sub-layers.

    Raises:
        ValueError: a sub-layer reads other tokens and keeps nothing of them.
    """
    slots, states, embedding = None, {}, model.embedding
    for sublayer in sublayers_of(model.stack.layers[number]):
        if isinstance(sublayer, Attention):
            slots = LayerSlots(sublayer.num_kv_heads, sublayer.head_dim, sublayer.mask.reach)
            continue
        state = sublayer.init_state(size.batch_size, embedding.dim, embedding.dtype)
        if state is not None:
            states[sublayer.name] = state
        elif sublayer.rule() is not None:
            raise ValueError(
                f"layer {number}: the sub-layer {sublayer.name!r} reads other tokens and keeps no "
                "state between passes, so it cannot decode; define its init_state"
            )
    return slots, states


def _init_norm(norm: Norm, dim: int, key: PRNGKeyArray) -> Weights:
    return norm.init(dim)


def mask_invalid_rows(
    x: Float[Array, "batch length dim"], before: Cache, after: Cache, masks: tuple[Mask, ...]
) -> Float[Array, "batch length dim"]:
    """Replaces invalid rows by NaN.

    A row is invalid if it exceeds the cache's capacity, was rewound by too many tokens, or starts
    or ends inside a prefix that must be read in one call.
    """
    old, new = before.cursor.position, after.cursor.position
    least = max((mask.minimum_prefill for mask in masks), default=1)
    is_whole = (old >= 0) & ((old == 0) | (old >= least)) & ((new == 0) | (new >= least))
    if after.capacity is not None:
        is_whole &= after.length <= after.capacity
    return jnp.where(is_whole[:, None, None], x, jnp.nan)
