"""What every model is: an embedding, a stack of layers and a head.

    tokens → embedding + position → layers → norm → logits

With an encoder, the layers also read its result for a source, which the cache keeps.

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
from jaxformer.functional.cache.key_values import Cache, CacheSize, init_cache
from jaxformer.functional.embedding import Embedding
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.layer import input_dims, sublayers_of
from jaxformer.functional.layers.sublayer import Start
from jaxformer.functional.outputs import Head, Pooler, Transform, head, pack_kernels
from jaxformer.functional.stack import Stack, run_stack
from jaxformer.functional.symbolic import nan_if_longer
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Initializers, Weights, split_key

PREFIX = "encoder."  # of the names of the encoder's points


@dataclass(frozen=True)
class Model:
    """A model as a value.

    Attributes:
        embedding: the embedding of its tokens.
        stack: its layers.
        head: the map to logits; None for an encoder whose output a decoder reads.
        generates: whether it is autoregressive.
        encoder: the encoder of its source, or None.
        shares_embedding: whether the encoder's token vectors are those of the decoder.
        transform: the layer of BERT between the last norm and the head; None: there is none.
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
        embedding, stack, dim = self.embedding, self.stack, self.stack.dims[-1]
        parts: Initializers = {"embedding": embedding.init_tables, "blocks": stack.init}
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
        """Returns the encoder's weights, without token vectors if it shares the decoder's."""
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

        Invalid rows become NaN (see `mask_invalid_rows`): a write beyond the capacity has
        overwritten the last slots, and its result must not look valid.

        Args:
            weights: those of `initializers`.
            inputs: the tokens and, without a cache, the sources that they read.
            run: the execution, the dropout key and the hooks of the pass.
            cache: the cache of earlier tokens; None: the tokens are complete sequences.
        """
        source_key, embed_key, *layer_keys = split_key(run.dropout_key, 2 + self.num_layers)
        encoded = after = states = None
        if self.encoder is not None and cache is None:
            encoded = self.encode(weights, inputs.of_source(), run.of_encoder(PREFIX, source_key))
        run = replace(run, placement=run.placement.of_stack(self.stack.units))
        if cache is None:
            tokens = Tokens.of_sequences(inputs, run, encoded)
        else:
            (tokens, after), states = Tokens.of_cache(inputs, cache, run), cache.current_states
        tap = tokens.tap(run.hooks)
        x = self.embedding(weights, inputs, tokens.new.positions, embed_key, tap)
        passed = run_stack(self.stack, weights, x, tokens, states, layer_keys)
        x = tap("final_norm", self.stack.finish(weights, passed.hidden))
        x = self.transformed(weights, x)
        of_source = {} if encoded is None else encoded.captured
        captured = {**of_source, **tap.captured, **passed.captured}
        if cache is not None and after is not None:
            # Its tables are those after the new tokens already.
            after = after.with_states(passed.states, tokens.new if run.keeps_states else None)
            x = mask_invalid_rows(x, cache, after, self.masks)
        return passed._replace(hidden=x, captured=captured, cache=after)

    def encode(self, weights: Weights, source: Inputs, run: Run) -> Forward:
        """Encodes a source."""
        if self.encoder is None:
            raise ValueError("source was given; this model reads none")
        own = weights["encoder"]
        tables = {"tokens": weights["embedding"]["tokens"], **own.get("embedding", {})}
        encoded = self.encoder.forward({**own, "embedding": tables}, source, run)
        captured = {PREFIX + name: x for name, x in encoded.captured.items()}
        length, most = encoded.hidden.shape[1], self.encoder.embedding.max_length
        hidden = nan_if_longer(encoded.hidden, length, most)  # padding counts too
        return encoded._replace(hidden=hidden, captured=captured)

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
    ) -> tuple[Cache, dict[str, Array]]:
        """Returns (the cache of rows that have read only their source, captured values of it).

        Raises:
            ValueError: there is no source, but the model reads one; or a sub-layer reads other
                tokens and keeps nothing of them.
        """
        dtype, captured = self.embedding.dtype, {}
        start = Start(size.batch_size, self.embedding.dim, dtype, placement=run.placement)
        if self.encoder is not None:
            if source is None:
                raise ValueError("source is None; this model reads one")
            encoded = self.encode(weights, source, run.of_encoder(PREFIX, None))
            info = TokenInfo(encoded.hidden.shape[1], None, source.segments)
            start, captured = start._replace(source=info, encoded=encoded), encoded.captured
        trees = self.stack.layer_trees(weights["blocks"])
        states = [self._kept(number, tree, start) for number, tree in enumerate(trees)]
        return init_cache(states, size, dtype, start.source), captured

    def _kept(self, number: int, weights: Weights, start: Start) -> dict[str, Any]:
        """Returns what the sub-layers of a layer keep, by name; see `init_cache`."""
        layer, kept = self.stack.layers[number], {}
        dims = input_dims(layer, self.stack.dims[number])
        for sublayer in sublayers_of(layer):
            own, here = weights[sublayer.name], start._replace(dim=dims[sublayer.name])
            state = sublayer.slot_size() or sublayer.init_state(own, here)
            if state is not None:
                kept[sublayer.name] = state
            elif sublayer.rule() is not None:
                raise ValueError(
                    f"layer {number}: the sub-layer {sublayer.name!r} reads other tokens and keeps "
                    "no state between passes, so it cannot decode; define its init_state"
                )
        return kept

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


def mask_invalid_rows(
    x: Float[Array, "batch length dim"], before: Cache, after: Cache, masks: tuple[Mask, ...]
) -> Float[Array, "batch length dim"]:
    """Replaces invalid rows by NaN.

    A row is invalid if it exceeds the cache's capacity, was rewound by too many tokens, or starts
    or ends inside a prefix that must be read in one call.
    """
    least = max((mask.minimum_prefill for mask in masks), default=1)
    old, new = before.cursor.position, after.cursor.position
    is_whole = (old >= 0) & ((old == 0) | (old >= least)) & ((new == 0) | (new >= least))
    if after.capacity is not None:
        is_whole &= after.length <= after.capacity
    return jnp.where(is_whole[:, None, None], x, jnp.nan)


@cache
def weight_shapes(model: Model) -> Mapping[str, Any]:
    """Returns the shapes of the weights, {name of a part: shapes}."""
    key = jax.random.key(0)
    return {name: jax.eval_shape(init, key) for name, init in model.initializers.items()}
