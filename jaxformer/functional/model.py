"""The forward pass of every model: an embedding, a stack of layers and a head.

    tokens → embedding + position → layers → norm → logits

A model with an encoder also attends to a source. For decoding, the cache holds the keys and values
of the source.

Reference:
    Notes, lecture 11 §6; lecture 13 §1–5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.key_values import Cache, CacheSize, empty_cache
from jaxformer.functional.embedding import Embedding
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.layer import input_dims, list_sublayers
from jaxformer.functional.layers.norms import divisor_point
from jaxformer.functional.layers.sublayer import Start
from jaxformer.functional.outputs import Head, Pooler, Transform, head, pack_kernels
from jaxformer.functional.stack import Stack, run_stack
from jaxformer.functional.symbolic import nan_if_longer
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Initializers, Weights, split_key

# The prefix of the names of the encoder's hook points.
PREFIX = "encoder."


@dataclass(frozen=True)
class Model:
    """Architecture of a model: an embedding, a stack and a head, without weights.

    Attributes:
        embedding: the embedding of tokens or features.
        stack: the layers.
        head: the output head; None for an encoder inside an encoder-decoder.
        generates: whether the model is autoregressive.
        encoder: the encoder of the source, or None.
        shares_embedding: whether encoder and decoder share the token vectors.
        transform: BERT's layer between the last norm and the head, or None.
        pooler: the pooler of an encoder, or None.
    """

    embedding: Embedding
    stack: Stack
    head: Head | None = None
    generates: bool = True
    encoder: "Model | None" = None
    shares_embedding: bool = False
    transform: Transform | None = None
    pooler: Pooler | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.stack.layers)

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The masks of all sub-layers that have a mask."""
        return self.stack.masks

    @cached_property
    def layer_hook_points(self) -> tuple[str, ...]:
        """The hook points inside layers; captured values have the layer as first axis."""
        encoder = () if self.encoder is None else self.encoder.layer_hook_points
        return (*(PREFIX + name for name in encoder), *self.stack.hook_points)

    @cached_property
    def hook_points(self) -> tuple[str, ...]:
        """The names of all hook points, in order of computation."""
        encoder = () if self.encoder is None else self.encoder.hook_points
        before, after = (
            () if norm is None else (divisor_point(name),)
            for name, norm in (
                ("embedding_norm", self.embedding.norm),
                ("final_norm", self.stack.final_norm),
            )
        )
        own = (*before, "embedding", *self.stack.hook_points, *after, "final_norm")
        return (*(PREFIX + name for name in encoder), *own)

    @cached_property
    def initializers(self) -> Initializers:
        """The functions that initialize the parts of the weights from a random key, by name."""
        embedding, stack, dim = self.embedding, self.stack, self.stack.dims[-1]
        parts: Initializers = {"embedding": embedding.init, "blocks": stack.init}
        if (embedding_norm := embedding.norm) is not None:
            parts["embedding_norm"] = lambda key: embedding_norm.init(embedding.dim)
        if (final_norm := stack.final_norm) is not None:
            parts["final_norm"] = lambda key: final_norm.init(dim)
        if stack.relative is not None:
            parts["relative_bias"] = stack.relative.init
        for part in (self.pooler, self.transform):
            parts |= {} if part is None else part.initializers(dim)
        if self.encoder is not None:
            parts["encoder"] = self._init_encoder
        return parts | ({} if self.head is None else self.head.initializers())

    def _init_encoder(self, key: PRNGKeyArray) -> Weights:
        """Returns the encoder's weights, without token vectors that the decoder shares."""
        parts = {} if self.encoder is None else self.encoder.initializers
        keys = jax.random.split(key, len(parts))
        tree = {name: init(key) for (name, init), key in zip(parts.items(), keys, strict=True)}
        if self.shares_embedding:
            tables = dict(tree.pop("embedding"))
            del tables["tokens"]
            tree |= {"embedding": tables} if tables else {}
        return tree

    def forward(
        self, weights: Weights, inputs: Inputs, run: Run, cache: Cache | None = None
    ) -> Forward:
        """Computes the input of the head [batch, length, dim].

        Invalid batch elements become NaN (see `mask_invalid_sequences`). For example, a write
        beyond the capacity overwrites the last slots of the cache, and the result must not look
        valid.

        Args:
            weights: the weights of the model; see `initializers`.
            inputs: the tokens; if `cache` is None, also the sources.
            run: the execution options, the dropout key and the hooks of the pass.
            cache: the cache of earlier tokens; if None, the tokens are complete sequences.
        """
        source_key, embed_key, *layer_keys = split_key(run.dropout_key, 2 + self.num_layers)
        encoded = after = states = None
        if self.encoder is not None and cache is None:
            encoded = self.encode(
                weights, inputs.source_inputs(), run.for_encoder(PREFIX, source_key)
            )
        run = replace(run, placement=run.placement.for_stack(self.stack.units))
        if cache is None:
            tokens = Tokens.from_sequences(inputs, run, encoded)
        else:
            (tokens, after), states = Tokens.from_cache(inputs, cache, run), cache.current_states
        hook = tokens.hook(run.hooks)
        x = self.embedding(weights, inputs, tokens.new.positions, embed_key, hook)
        passed = run_stack(self.stack, weights, x, tokens, states, layer_keys)
        x = hook("final_norm", self.stack.finish(weights, passed.hidden, hook))
        x = self.transformed(weights, x)
        source_inputs = {} if encoded is None else encoded.captured
        captured = {**source_inputs, **hook.captured, **passed.captured}
        if cache is not None and after is not None:
            # `after` already contains the new tokens, but not yet their states.
            after = after.with_states(passed.states, tokens.new if run.keeps_states else None)
            x = mask_invalid_sequences(x, cache, after, self.masks)
        return passed._replace(hidden=x, captured=captured, cache=after)

    def encode(self, weights: Weights, source: Inputs, run: Run) -> Forward:
        """Encodes a source."""
        if self.encoder is None:
            raise ValueError("source is not accepted, because this model does not have an encoder")
        own = weights["encoder"]
        shared = {"tokens": weights["embedding"]["tokens"]} if self.shares_embedding else {}
        embedding = {**shared, **own.get("embedding", {})}
        encoded = self.encoder.forward({**own, "embedding": embedding}, source, run)
        captured = {PREFIX + name: x for name, x in encoded.captured.items()}
        length, most = encoded.hidden.shape[1], self.encoder.embedding.max_length
        hidden = nan_if_longer(encoded.hidden, length, most)  # The length includes padding.
        return encoded._replace(hidden=hidden, captured=captured)

    def finish(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Computes the input of the head from the last layer's output."""
        return self.transformed(weights, self.stack.finish(weights, x))

    def transformed(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Applies the layer `transform` to x; returns x if `transform` is None."""
        return x if self.transform is None else self.transform(weights, x)

    def init_cache(
        self, weights: Weights, source: Inputs | None, run: Run, size: CacheSize
    ) -> tuple[Cache, dict[str, Array]]:
        """Returns (cache, captured): a cache without tokens, and the encoder's captured values.

        The cache holds the keys and values of the sources, if any.

        Raises:
            ValueError: `source` is None, but the model has an encoder; or a sub-layer reads
                other tokens, but has neither keys and values nor a state that a cache can store.
        """
        dtype, captured = self.embedding.dtype, {}
        start = Start(size.batch_size, self.embedding.dim, dtype, placement=run.placement)
        if self.encoder is not None:
            if source is None:
                raise ValueError("source is None, but this model has an encoder and needs a source")
            encoded = self.encode(weights, source, run.for_encoder(PREFIX, None))
            info = TokenInfo(encoded.hidden.shape[1], None, source.segment_ids)
            start, captured = start._replace(source=info, encoded=encoded), encoded.captured
        trees = self.stack.layer_trees(weights["blocks"])
        states = [self._kept(number, tree, start) for number, tree in enumerate(trees)]
        return empty_cache(states, size, dtype, start.source), captured

    def _kept(self, number: int, weights: Weights, start: Start) -> dict[str, Any]:
        """Returns {name of a sub-layer: size or initial state} for a layer; see `empty_cache`."""
        layer, kept = self.stack.layers[number], {}
        dims = input_dims(layer, self.stack.dims[number])
        for sublayer in list_sublayers(layer):
            own, here = weights[sublayer.name], start._replace(dim=dims[sublayer.name])
            state = sublayer.key_value_size() or sublayer.init_state(own, here)
            if state is not None:
                kept[sublayer.name] = state
            elif sublayer.rule() is not None:
                raise ValueError(
                    f"layer {number}: the sub-layer {sublayer.name!r} reads other tokens, but "
                    "does not define a state for decoding; define its init_state method"
                )
        return kept

    def pack_weights(self, weights: Weights, parts: int = 1) -> Weights:
        """Repacks the weights for decoding.

        The embedding is cast to the compute dtype, the layers are unstacked, each sub-layer repacks
        its weights, and `pack_kernels` packs the kernels and the head. The weights of an encoder
        stay unchanged, because an encoder runs only a few times, for many tokens at once.
        """
        dtype = self.embedding.dtype
        tables = weights["embedding"].items()
        return {
            **weights,
            "embedding": {name: table.astype(dtype) for name, table in tables},
            "blocks": [
                pack_kernels(layer, dtype, parts)
                for layer in self.stack.pack_weights(weights["blocks"])
            ],
            "head": pack_kernels(head(weights), dtype, parts),
        }


def mask_invalid_sequences(
    x: Float[Array, "batch length dim"], before: Cache, after: Cache, masks: tuple[Mask, ...]
) -> Float[Array, "batch length dim"]:
    """Replaces the output of invalid batch elements by NaN.

    A batch element is invalid if it exceeds the cache's capacity or was rewound by too many tokens.
    It is also invalid if the call starts or ends inside a prefix that must be read in one call.
    """
    least = max((mask.minimum_prefill for mask in masks), default=1)
    old, new = before.cursor.position, after.cursor.position
    is_whole = (old >= 0) & ((old == 0) | (old >= least)) & ((new == 0) | (new >= least))
    if after.capacity is not None:
        is_whole &= after.length <= after.capacity
    return jnp.where(is_whole[:, None, None], x, jnp.nan)


@cache
def weight_shapes(model: Model) -> Mapping[str, Any]:
    """Returns {name of a part of the weights: tree of shapes}."""
    key = jax.random.key(0)
    return {name: jax.eval_shape(init, key) for name, init in model.initializers.items()}
