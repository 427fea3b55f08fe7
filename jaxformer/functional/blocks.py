"""The Transformer block, and the stack of them.

    pre-norm:   h = x + Attention(Norm(x))        y = h + FeedForward(Norm(h))
    post-norm:  h = Norm(x + Attention(x))        y = Norm(h + FeedForward(h))

(seeds: lecture 11 §3.) Left out on demand, residual and norm give the half-built decoder of
lecture 10. A block that reads a source has cross-attention between the two (lecture 13 §4).

`config` below is anything with the fields of models.config; attention itself is handed in, as
`attend(query, key, value) → (output, state)` and `look_up(weights, query) → output`, so a block is
the same whether it attends to rows, to a cache or in any implementation.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.dropout import dropout
from jaxformer.functional.feedforward import feed_forward, init_feed_forward
from jaxformer.functional.heads import merge_heads, split_heads
from jaxformer.functional.linear import init_linear, linear, side_by_side
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.positions import rotary
from jaxformer.functional.taps import Patch, Tap, no_tap

BLOCK_POINTS = (
    "block.input",
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.weights",
    "attention.heads",
    "attention.output",
    "block.middle",
    "feedforward.hidden",
    "feedforward.output",
    "block.output",
)
CROSS_POINTS = (
    "cross_attention.query",
    "cross_attention.weights",
    "cross_attention.heads",
    "cross_attention.output",
    "block.crossed",
)


def multi_head_attention(weights, x, config, *, attend, positions, tap=no_tap):
    """Concatenate softmax(q kᵀ/√d) v over the heads, then W_O (lecture 11 §4). Returns (y, state).

    x: [*batch, length, dim]. Rotary positions, where the config has them, turn query and key.
    """
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ends = [config.head_dim * sum(heads[:side]) for side in (1, 2)]
    maps = query_key_value(weights)
    sides = jnp.concatenate([linear(some, x) for some in maps], axis=-1)
    sides = jnp.split(sides, ends, axis=-1)
    query, key, value = map(split_heads, sides, heads)
    if config.positions == "rotary":
        query, key = (rotary(side, positions, config.rotary_base) for side in (query, key))
    query, key = tap("attention.query", query), tap("attention.key", key)
    output, state = attend(query, key, tap("attention.value", value))
    return linear(weights["output"], merge_heads(tap("attention.heads", output))), state


_SIDES = ("query", "key", "value")


def query_key_value(weights) -> list:
    """The maps to query, key and value in as few as their kernels allow: see `side_by_side`."""
    if "query_key_value" in weights:
        return weights["query_key_value"]
    return side_by_side([weights[name] for name in _SIDES])


def fuse_query_key_value(weights):
    """The weights of a block with those maps made one for good, which saves doing it each step."""
    attention = {name: x for name, x in weights["attention"].items() if name not in _SIDES}
    maps = {"query_key_value": query_key_value(weights["attention"])}
    return {**weights, "attention": {**attention, **maps}}


def init_multi_head_attention(key, config, output_stddev: float):
    """Weights of `multi_head_attention`; output_stddev is that of W_O."""
    keys = jax.random.split(key, 4)
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    dim, use_bias = config.embed_dim, config.use_bias
    return {
        "query": init_linear(keys[0], dim, heads, use_bias=use_bias),
        "key": init_linear(keys[1], dim, kv_heads, use_bias=use_bias),
        "value": init_linear(keys[2], dim, kv_heads, use_bias=use_bias),
        "output": init_linear(keys[3], heads, dim, use_bias=use_bias, stddev=output_stddev),
    }


def cross_attention(weights, x, config, *, look_up, tap=no_tap):
    """Queries from x, keys and values from a source (lecture 13 §4): look_up(query) has them."""
    query = split_heads(linear(weights["query"], x), config.num_heads)
    output = tap("cross_attention.heads", look_up(tap("cross_attention.query", query)))
    return tap("cross_attention.output", linear(weights["output"], merge_heads(output)))


def source_heads(weights, encoded, config):
    """(keys, values) [*batch, kv_heads, source length, head_dim] of what an encoder made of it."""
    key, value = (linear(weights[name], encoded) for name in ("key", "value"))
    return split_heads(key, config.num_kv_heads), split_heads(value, config.num_kv_heads)


def sublayer(norm_weights, x, function, config, *, dropout_key=None):
    """function with the norm before or after it and the residual around it, as config says."""
    normalize = normalizer(config.norm, config.norm_epsilon)
    pre_norm = config.norm_position == "pre"
    y = function(normalize(norm_weights, x) if pre_norm else x)
    y = dropout(dropout_key, y, config.dropout)
    y = x + y if config.residual else y
    return y if pre_norm else normalize(norm_weights, y)


def self_attention_sublayer(weights, x, config, *, attend, positions, dropout_key=None, tap=no_tap):
    """Attention in a row or its cache, norm and residual around it; returns (y, state)."""
    state = None

    def attention(x):
        nonlocal state
        y, state = multi_head_attention(
            weights["attention"], x, config, attend=attend, positions=positions, tap=tap
        )
        return tap("attention.output", y)

    return sublayer(weights["attention_norm"], x, attention, config, dropout_key=dropout_key), state


def feed_forward_sublayer(weights, x, config, dropout_key=None, tap=no_tap):
    """The feed-forward layer, norm and residual around it."""

    def feed(x):
        y = feed_forward(
            weights["feedforward"],
            x,
            config.activation,
            output_activation=config.output_activation,
            tap=tap,
        )
        return tap("feedforward.output", y)

    return sublayer(weights["feedforward_norm"], x, feed, config, dropout_key=dropout_key)


def block(
    weights,
    x: Float[Array, "*batch length dim"],
    config,
    *,
    attend,
    positions,
    dropout_key=None,
    tap=no_tap,
):
    """One Transformer block: attention, then feed-forward. Returns (y, what `attend` left)."""
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    how = {"attend": attend, "positions": positions, "dropout_key": keys[0], "tap": tap}
    x, state = self_attention_sublayer(weights, tap("block.input", x), config, **how)
    x = feed_forward_sublayer(weights, tap("block.middle", x), config, keys[1], tap)
    return tap("block.output", x), state


def cross_block(
    weights,
    x: Float[Array, "*batch length dim"],
    config,
    *,
    look_up,
    attend,
    positions,
    dropout_key=None,
    tap=no_tap,
):
    """A block that reads a source: attention, cross-attention, then feed-forward.

    look_up(weights, query, tap) → what the source has for the query; else as `block`.
    """
    keys = (None, None, None) if dropout_key is None else jax.random.split(dropout_key, 3)

    def cross(x):
        def look(query):
            return look_up(weights, query, lambda name, value: tap(f"cross_{name}", value))

        return cross_attention(weights["cross_attention"], x, config, look_up=look, tap=tap)

    how = {"attend": attend, "positions": positions, "dropout_key": keys[0], "tap": tap}
    x, state = self_attention_sublayer(weights, tap("block.input", x), config, **how)
    x = tap("block.middle", x)
    x = sublayer(weights["cross_attention_norm"], x, cross, config, dropout_key=keys[1])
    x = feed_forward_sublayer(weights, tap("block.crossed", x), config, keys[2], tap)
    return tap("block.output", x), state


def init_block(key, config):
    """Weights of `block`: N(0, 0.02²), and 0.02/√(2 · num_layers) for the two maps that write into
    the residual stream, so that its variance does not grow with depth (GPT-2, Radford et al. 2019).
    """
    attention, feed = jax.random.split(key)
    output_stddev = 0.02 / (2 * config.num_layers) ** 0.5
    return {
        "attention_norm": init_norm(config.norm, config.embed_dim, use_bias=config.use_bias),
        "attention": init_multi_head_attention(attention, config, output_stddev),
        "feedforward_norm": init_norm(config.norm, config.embed_dim, use_bias=config.use_bias),
        "feedforward": init_feed_forward(
            feed,
            config.embed_dim,
            config.mlp_dim,
            config.activation,
            use_bias=config.use_bias,
            output_stddev=output_stddev,
        ),
    }


def init_cross_block(key, config):
    """Weights of `cross_block`: those of `block`, and cross-attention like its attention."""
    own, cross = jax.random.split(key)
    norm = init_norm(config.norm, config.embed_dim, use_bias=config.use_bias)
    output_stddev = 0.02 / (2 * config.num_layers) ** 0.5
    attention = init_multi_head_attention(cross, config, output_stddev)
    return init_block(own, config) | {"cross_attention_norm": norm, "cross_attention": attention}


def init_blocks(key, config, init=init_block):
    """num_layers blocks as one tree, each leaf with the layer as its first axis."""
    return jax.vmap(lambda key: init(key, config))(jax.random.split(key, config.num_layers))


def unstack(blocks, num_layers: int) -> list:
    """The blocks one by one; done once outside a decoding loop, it saves the slicing inside."""
    if isinstance(blocks, list):
        return blocks
    leaves, treedef = jax.tree.flatten(blocks)
    # Going back, a split is one concatenation; an index would be zeros as large as all layers.
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    return [treedef.unflatten(leaf[0] for leaf in layer) for layer in zip(*split, strict=True)]


def run_blocks(step, blocks, x, config, execution, *, dropout_key=None, capture=(), patch=None):
    """x through all blocks, by scan or unrolled; returns (y, captured), captured stacked by layer.

    step(weights, x, dropout_key, tap) → x runs one of them. Dropout keys are split per layer here
    and scanned over: a key drawn inside a scan body would be the same in each layer.
    """
    keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    patch = {name: _per_layer(name, *of, config.num_layers) for name, of in (patch or {}).items()}

    def run(x, layer):
        weights, key, patch = layer
        tap = Tap(capture, patch)
        return step(weights, x, key, tap), tap.captured

    # In a scan the two passes are loops of their own: nothing need keep them from being merged.
    run = _REMAT[execution.remat](run, prevent_cse=execution.layers != "scan")
    if execution.layers == "scan":
        return jax.lax.scan(run, x, (blocks, keys, patch))
    captured = []
    for layer in unstack((blocks, keys, patch), config.num_layers):
        x, values = run(x, layer)
        captured.append(values)
    return x, jax.tree.map(lambda *values: jnp.stack(values), *captured)


def _per_layer(name: str, where, value, num_layers: int) -> Patch:
    for part, x in (("where", where), ("value", value)):
        if jnp.shape(x)[:1] not in ((1,), (num_layers,)):
            raise ValueError(
                f"patch {name!r}: {part} is {jnp.shape(x)}; inside the blocks its first axis is "
                f"the layer, of size 1 or {num_layers}"
            )
    return Patch(*(jnp.broadcast_to(x, (num_layers, *jnp.shape(x)[1:])) for x in (where, value)))


# What the backward pass finds in memory: everything; matrix products only; block inputs only.
_REMAT = {
    "none": lambda run, **_: run,
    "dots": partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "full": jax.checkpoint,
}
