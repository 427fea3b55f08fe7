"""The Transformer's stack, which decoder and encoder have in common.

    tokens → embedding + position → blocks → norm

`forward` computes complete sequences or, with a cache, the next tokens. The two cases differ only
in the contexts that the blocks attend to (`contexts`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxformer.functional.attention.attend import Context, KeysValues
from jaxformer.functional.attention.contexts import (
    PassContexts,
    cache_contexts,
    is_few,
    sequence_contexts,
)
from jaxformer.functional.attention.masks import Causal, Mask, Near, Packed, Prefix, Window
from jaxformer.functional.attention.scores import Alibi, RelativeBias, Scores
from jaxformer.functional.blocks import (
    BLOCK_POINTS,
    CROSS_BLOCK_POINTS,
    Source,
    Tokens,
    block,
    cross_keys_values,
    fuse_query_key_value,
)
from jaxformer.functional.cache.key_values import Cache, init_cache
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import embed, head, pack_kernels
from jaxformer.functional.family import CacheSize, Weights
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.norms import normalize
from jaxformer.functional.taps import Tap
from jaxformer.functional.trees import REMAT, find_period, split_key, stack, unstack

POINTS = ("embedding", *BLOCK_POINTS, "final_norm")
CROSS_POINTS = ("embedding", *CROSS_BLOCK_POINTS, "final_norm")


class CrossAttentionSource(NamedTuple):
    """A source that the blocks read by cross-attention.

    Attributes:
        context: its padding, and how scores are computed.
        encoded: the encoder's output, from which each layer computes keys and values; None if
            `keys_values` has them.
        keys_values: the keys and values for each layer, or None.
    """

    context: Context
    encoded: Float[Array, "sources source dim"] | None = None
    keys_values: list[KeysValues] | None = None


def forward(
    weights: Weights,
    inputs: Inputs,
    config: Any,
    run: Run,
    cache: Cache | None = None,
    source: CrossAttentionSource | None = None,
) -> Forward:
    """Computes the last hidden states [batch, length, dim] of tokens.

    Invalid batch elements become NaN (see `mask_invalid_rows`), because a write beyond the capacity
    would otherwise overwrite the last slots.

    Args:
        weights: those of `stack_initializers`.
        inputs: the tokens.
        config: the `resolved` config of a Transformer, or a value with its fields.
        run: how the pass runs.
        cache: the cache of earlier tokens; None: the tokens are complete sequences.
        source: the source to read, if the blocks have cross-attention.
    """
    masks, scores = self_attention_masks(config, run.mask), scores_of(weights, config)
    if cache is None:
        contexts = sequence_contexts(inputs, masks, scores, run)
    else:
        contexts = cache_contexts(inputs, cache, masks, scores, run)
    embed_key, *layer_keys = split_key(run.dropout_key, 1 + config.num_layers)
    tap = Tap(run.hooks, contexts.positions, contexts.documents, run.placement.of_stack(config))
    x = embed(weights, inputs, contexts.positions, config, tap)
    x = tap("embedding", dropout(embed_key, x, config.dropout))
    layers = (
        weights["blocks"],
        layer_keys,
        None if cache is None else cache.layers,
        None if source is None else source.keys_values,
        run.hooks.of(CROSS_BLOCK_POINTS).of_layers(config.num_layers),
    )
    x, states, captured = run_layers(x, layers, config, run, contexts, source)
    x = tap("final_norm", normalize_last(weights, x, config))
    captured = {**tap.captured, **stack(captured)}
    if cache is None or contexts.cache is None:
        return Forward(x, captured)
    after = contexts.cache.with_layers([state for state in states if state is not None])
    return Forward(mask_invalid_rows(x, cache, after, masks), captured, after)


def normalize_last(
    weights: Weights, x: Float[Array, "*batch dim"], config: Any
) -> Float[Array, "*batch dim"]:
    """Applies the final norm, if there is one, and the output scale to the last layer's output."""
    if "final_norm" in weights:
        x = normalize(weights["final_norm"], x, config)
    if config.output_scale is not None:
        x = x * jnp.asarray(config.output_scale, x.dtype)
    return x


def run_layers(
    x: Float[Array, "batch length dim"],
    layers: tuple,
    config: Any,
    run: Run,
    contexts: PassContexts,
    source: CrossAttentionSource | None,
) -> tuple[Float[Array, "batch length dim"], list[KeysValues | None], list[dict[str, Array]]]:
    """Runs all layers, by a scan or unrolled.

    Args:
        x: the input of the first layer.
        layers: for each layer its weights, dropout key, keys and values of earlier tokens, keys and
            values of the source, and hooks: trees of stacked arrays, or lists of a tree per layer.
        config: as in `forward`.
        run: as in `forward`.
        contexts: what the layers attend to.
        source: as in `forward`.

    Returns:
        (output of the last layer, keys and values of each layer, captured values of each layer).
    """
    settings, num_layers = config.layers, config.num_layers
    decodes = contexts.cache is not None
    scanned = run.execution.scans(num_layers, decodes and is_few(x.shape[1]))
    placement = run.placement.of_stack(config)
    by_setting = dict(zip(settings, contexts.layers, strict=True))

    def layer(
        config: Any, x: Float[Array, "batch length dim"], parts_of_layer: tuple[Any, ...]
    ) -> tuple[Float[Array, "batch length dim"], tuple[KeysValues | None, dict[str, Array]]]:
        weights, key, cached, source_keys_values, hooks = parts_of_layer
        weights = fuse_query_key_value(weights) if placement.fuses_projections else weights
        if source is not None and source.encoded is not None:
            cross = weights["cross_attention"]
            source_keys_values = cross_keys_values(cross, source.encoded, config)
        tokens = Tokens(by_setting[config], cached)
        read = None if source is None else Source(source.context, source_keys_values)
        tap = Tap(hooks, contexts.positions, contexts.documents, placement)
        x, cached = block(weights, x, config, tokens, read, key, tap)
        return x, (cached, tap.captured)

    # A pass over a cache is always inside a compiled program: there a layer is traced once for each
    # setting. Outside of a compiled program this would compile it at every call. In a scan the
    # forward and the backward pass are separate loops, so no barrier is needed to prevent common
    # subexpression elimination between them.
    compiled = jax.jit if decodes else lambda step: step
    remat = partial(REMAT[run.execution.remat], prevent_cse=not scanned)
    steps = {x: compiled(remat(partial(layer, x))) for x in dict.fromkeys(settings)}
    if scanned:
        x, outputs = scan_layers(steps, x, [stack(part) for part in layers], settings)
    else:
        outputs = []
        trees = [unstack(part, num_layers) for part in layers]
        for setting, *parts_of_layer in zip(settings, *trees, strict=True):
            x, output = steps[setting](x, tuple(parts_of_layer))
            outputs.append(output)
    states, captured = map(list, zip(*outputs, strict=True))
    return x, states, captured


def scan_layers(
    steps: dict, x: Float[Array, "batch length dim"], layers: list, settings: tuple
) -> tuple:
    """Runs the layers by a scan; each iteration runs one period of the settings.

    Args:
        steps: {setting: (x, tree of the layer) → (x, output)}.
        x: the input of the first layer.
        layers: trees of stacked arrays.
        settings: the setting of each layer.

    Returns:
        (output of the last layer, outputs of each layer).
    """
    num_layers = len(settings)
    first, period = find_period(settings)
    last = num_layers - (num_layers - first) % period

    def some(
        x: Float[Array, "batch length dim"], layers: list, start: int, stop: int
    ) -> tuple[Float[Array, "batch length dim"], list]:
        outputs = []
        parts = [unstack(tree, stop - start) for tree in layers]
        for setting, *parts_of_layer in zip(settings[start:stop], *parts, strict=True):
            x, output = steps[setting](x, tuple(parts_of_layer))
            outputs.append(output)
        return x, outputs

    def one_period(
        x: Float[Array, "batch length dim"], layers: list
    ) -> tuple[Float[Array, "batch length dim"], Any]:
        x, outputs = some(x, layers, first, first + period)
        return x, stack(outputs)

    def part(start: int, stop: int) -> list:
        return jax.tree.map(lambda leaf: leaf[start:stop], layers)

    def by_period(leaf: Shaped[Array, "layers *rest"]) -> Shaped[Array, "periods period *rest"]:
        return leaf.reshape(-1, period, *leaf.shape[1:])

    x, before = some(x, part(0, first), 0, first) if first else (x, [])
    x, outputs = jax.lax.scan(one_period, x, jax.tree.map(by_period, part(first, last)))
    outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
    rest = part(last, num_layers)
    x, after = some(x, rest, last, num_layers) if last < num_layers else (x, [])
    return x, [*before, *unstack(outputs, last - first), *after]


def self_attention_mask(config: Any, mask: Mask | None = None) -> Mask:
    """Returns the mask of self-attention, which holds within each document.

    It is `mask` if that is not None. Otherwise an encoder has the config's window or no
    restriction, and a decoder is causal, or has a prefix, with the config's window.
    """
    if mask is not None:
        return mask & Packed()
    if config.bidirectional:
        return Packed() if config.window is None else Near(config.window) & Packed()
    mask = Prefix(config.prefix) if config.prefix else Causal()
    if config.window is not None:
        mask = mask & Window(config.window)
    return mask & Packed()


def self_attention_masks(config: Any, mask: Mask | None = None) -> tuple[Mask, ...]:
    """Returns the mask of each layer."""
    masks = {layer: self_attention_mask(layer, mask) for layer in dict.fromkeys(config.layers)}
    return tuple(masks[layer] for layer in config.layers)


def scores_of(weights: Weights, config: Any) -> Scores:
    """Returns the scale, cap and bias of attention scores, which all layers share."""
    bias = None
    if config.positions == "alibi":
        bias = Alibi(config.num_heads)
    if config.positions == "relative":
        table = weights["relative_bias"]["table"]
        bias = RelativeBias(table, config.relative_distance, config.bidirectional)
    return Scores(config.attention_scale, config.attention_cap, bias)


def mask_invalid_rows(
    x: Float[Array, "batch length dim"], before: Cache, after: Cache, masks: tuple[Mask, ...]
) -> Float[Array, "batch length dim"]:
    """Replaces invalid rows by NaN.

    A row is invalid if it exceeds the cache's capacity, was rewound by too many tokens, or starts
    or ends inside a prefix that must be read in one call.
    """
    old, new = before.cursor.position, after.cursor.position
    least = max(mask.minimum_prefill for mask in masks)
    is_whole = (old >= 0) & ((old == 0) | (old >= least)) & ((new == 0) | (new >= least))
    if after.capacity is not None:
        is_whole &= after.length <= after.capacity
    return jnp.where(is_whole[:, None, None], x, jnp.nan)


def start(
    weights: Weights, source: Inputs | None, config: Any, run: Run, size: CacheSize
) -> tuple[Cache, dict]:
    """Returns an empty cache for this stack, and the captured values of the source: none."""
    return init_cache(config, size), {}


def prepare(weights: Weights, config: Any, parts: int = 1) -> dict:
    """Repacks the weights for decoding.

    It casts the tables of vectors to the compute dtype, unstacks the blocks, fuses the projections
    to query, key and value, and packs the kernels and the head (see `pack_kernels`). An encoder's
    weights are unchanged, because it takes few, large steps.
    """
    blocks = unstack(weights["blocks"], config.num_layers)
    return {
        **weights,
        "embedding": {
            name: table.astype(config.dtype) for name, table in weights["embedding"].items()
        },
        "blocks": [pack_kernels(fuse_query_key_value(block), config, parts) for block in blocks],
        "head": pack_kernels(head(weights), config, parts),
    }
