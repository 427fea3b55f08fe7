"""The Transformer block, and the stack of them.

    pre:     h = x + Attention(Norm(x))           y = h + FeedForward(Norm(h))
    post:    h = Norm(x + Attention(x))           y = Norm(h + FeedForward(h))
    output:  h = x + Norm(Attention(x))           y = h + Norm(FeedForward(h))
    both:    h = x + Norm(Attention(Norm(x)))     y = h + Norm(FeedForward(Norm(h)))

(seeds: lecture 11 §3; OLMo 2 2024; Gemma 2 2024.) Parallel, y = h + FeedForward(Norm(x)). Left out
on demand, residual and norm give the half-built decoder of lecture 10. A block that reads a source
has cross-attention between the two (lecture 13 §4).

`config` below is anything with the fields of models.config, its sizes resolved. What the queries
attend to is handed in, a value of `contexts`, so a block is the same whether it attends to a row or
to a cache, in any implementation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.contexts import SourceAttention
from jaxformer.functional.dropout import dropout
from jaxformer.functional.feedforward import feed_forward, init_feed_forward
from jaxformer.functional.heads import merge_heads, split_heads
from jaxformer.functional.layers import split_key
from jaxformer.functional.linear import init_linear, linear, side_by_side
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.positions import rotary
from jaxformer.functional.spread import row_axes, spread, spread_back
from jaxformer.functional.taps import no_tap

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
CROSS_BLOCK_POINTS = (
    *BLOCK_POINTS[: BLOCK_POINTS.index("block.middle") + 1],
    "cross_attention.query",
    "cross_attention.weights",
    "cross_attention.heads",
    "cross_attention.output",
    "block.crossed",
    *BLOCK_POINTS[BLOCK_POINTS.index("block.middle") + 1 :],
)


def block(
    weights,
    x: Float[Array, "*batch length dim"],
    config,
    attention,
    *,
    positions,
    kept=None,
    source: SourceAttention | None = None,
    cross_keys_values=None,
    dropout_key=None,
    tap=no_tap,
):
    """One Transformer block. Returns (y, what `attention` keeps of these tokens).

    attention: a value of `contexts`, with `kept` what it has kept of earlier tokens; source: what
    cross-attention looks at, with cross_keys_values if they are made already.
    """
    before, of_output, after = norms_of(weights, config)
    keys = split_key(dropout_key, 3)
    x = tap("block.input", x)
    a, kept = self_attention(
        weights["attention"], before("attention_norm", x), config, attention, positions, kept, tap
    )
    a = add(x, of_output("attention_norm", a), config, keys[0])
    rows = row_axes(config.num_heads, config.num_kv_heads)
    h = tap("block.middle", spread_back(after("attention_norm", a), rows))
    if source is not None:
        q = before("cross_attention_norm", h)
        c = cross_attention(weights["cross_attention"], q, config, source, cross_keys_values, tap)
        c = add(h, of_output("cross_attention_norm", c), config, keys[1])
        h = tap("block.crossed", after("cross_attention_norm", c))
    f = feed_forward(
        weights["feedforward"],
        before(*read_by_feed_forward(config, x, h)),
        config.activation,
        output_activation=config.output_activation,
        tap=tap,
    )
    f = add(h, of_output("feedforward_norm", f), config, keys[2])
    return tap("block.output", after("feedforward_norm", f)), kept


def norms_of(weights, config):
    """(before, of_output, after) a sub-layer: each (name, x) → x, normalised by the weights of that
    name, or x as it is. Where there are two of a sub-layer, that of its output has a name of its
    own."""
    normalize = normalizer(config.norm, config.norm_epsilon)

    def norm(name, x):
        return normalize(weights[name], x)

    def identity(name, x):
        return x

    def first(name, x):
        """A norm before a sub-layer; the first of all may have none."""
        return x if name == "attention_norm" and not config.first_attention_norm else norm(name, x)

    return {
        "pre": (first, identity, identity),
        "post": (identity, identity, norm),
        "output": (identity, norm, identity),
        "both": (first, lambda name, x: norm(output_norm(name), x), identity),
    }[config.norm_position]


def output_norm(name: str) -> str:
    """The name of the norm of a sub-layer's output, where it has one before as well."""
    return name.replace("_norm", "_output_norm")


def read_by_feed_forward(config, x, h):
    """(the name of its norm, what is normalised): h, or in a parallel block its input, x."""
    return {
        "no": ("feedforward_norm", h),
        "two_norms": ("feedforward_norm", x),
        "one_norm": ("attention_norm", x),
    }[config.parallel]


def add(x, y, config, dropout_key=None):
    """The residual, x + dropout(y); without it y alone."""
    y = dropout(dropout_key, y, config.dropout)
    return x + y if config.residual else y


def self_attention(weights, x, config, attention, positions, kept=None, tap=no_tap):
    """Concatenate softmax(q kᵀ/√d) v over the heads, then W_O (lecture 11 §4). Returns (y, kept).

    x: [*batch, length, dim]. Rotary positions, where the config has them, turn query and key.
    """
    rows = row_axes(config.num_heads, config.num_kv_heads)
    x = spread(x, rows)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ends = [config.head_dim * sum(heads[:side]) for side in (1, 2)]
    sides = [linear(some, x) for some in query_key_value(weights)]
    if len(sides) < len(heads):
        sides = jnp.split(jnp.concatenate(sides, axis=-1), ends, axis=-1)
    query, key, value = map(split_heads, sides, heads)
    query, key = (
        turned(normalized(weights, name, side, config), positions, config)
        for name, side in (("query_norm", query), ("key_norm", key))
    )
    query, key = tap("attention.query", query), tap("attention.key", key)
    output, kept = attention(query, key, tap("attention.value", value), kept, tap)
    output = linear(weights["output"], merge_heads(tap("attention.heads", output)))
    return tap("attention.output", spread(output)), kept


def normalized(weights, name, x, config):
    """Queries or keys [*batch, heads, length, head_dim] through their norm, where there is one."""
    if config.query_key_norm == "none":
        return x
    normalize = normalizer(config.norm, config.norm_epsilon)
    if config.query_key_norm == "head":
        return normalize(weights[name], x)
    return split_heads(normalize(weights[name], merge_heads(x)), x.shape[-3])


def turned(x, positions, config):
    """Queries or keys turned by their positions, where the config has rotary ones."""
    if config.positions != "rotary":
        return x
    layout = {"fraction": config.rotary_fraction, "interleaved": config.rotary_interleaved}
    return rotary(x, positions, config.rotary_base, scaling=config.rotary_scaling, **layout)


_SIDES = ("query", "key", "value")


def query_key_value(weights) -> list:
    """The maps to query, key and value, or the fewer that `fuse_query_key_value` made of them."""
    return weights.get("query_key_value") or [weights[name] for name in _SIDES]


def fuse_query_key_value(weights):
    """The weights of a block with those maps in as few as their kernels allow (`side_by_side`): one
    product in the place of three. Not where a kernel's outputs are cut over devices: the parts of
    the fused one would be cut elsewhere."""
    if "query_key_value" in weights["attention"]:
        return weights
    attention = {name: x for name, x in weights["attention"].items() if name not in _SIDES}
    maps = side_by_side([weights["attention"][name] for name in _SIDES])
    return {**weights, "attention": {**attention, "query_key_value": maps}}


def init_multi_head_attention(key, config, output_stddev: float):
    """Weights of `self_attention`; output_stddev is that of W_O."""
    keys = jax.random.split(key, 4)
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    dim, use_bias = config.embed_dim, config.query_key_value_bias
    output = {"use_bias": config.attention_output_bias, "stddev": output_stddev}
    weights = {
        "query": init_linear(keys[0], dim, heads, use_bias=use_bias),
        "key": init_linear(keys[1], dim, kv_heads, use_bias=use_bias),
        "value": init_linear(keys[2], dim, kv_heads, use_bias=use_bias),
        "output": init_linear(keys[3], heads, dim, **output),
    }
    if config.query_key_norm == "none":
        return weights
    sizes = (heads, kv_heads) if config.query_key_norm == "all" else (config.head_dim,) * 2
    names = ("query_norm", "key_norm")
    return weights | {
        name: init_norm(config.norm, size, use_bias=config.norm_bias)
        for name, size in zip(names, sizes, strict=True)
    }


def cross_attention(weights, x, config, source: SourceAttention, keys_values=None, tap=no_tap):
    """Queries from x, keys and values from a source (lecture 13 §4)."""
    rows = row_axes(config.num_heads, config.num_kv_heads)
    x = spread(x, rows)
    query = split_heads(linear(weights["query"], x), config.num_heads)
    if keys_values is None:
        keys_values = cross_keys_values(weights, source.encoded, config)
    query = tap("cross_attention.query", query)
    output = source(query, *keys_values, lambda name, value: tap(f"cross_{name}", value))
    output = merge_heads(tap("cross_attention.heads", output))
    return tap("cross_attention.output", spread_back(linear(weights["output"], output), rows))


def cross_keys_values(weights, encoded, config):
    """(keys, values) [*batch, kv_heads, source length, head_dim] of what an encoder made of it."""
    key, value = (linear(weights[name], encoded) for name in ("key", "value"))
    return split_heads(key, config.num_kv_heads), split_heads(value, config.num_kv_heads)


def init_block(key, config):
    """Weights of `block`: N(0, 0.02²), and 0.02/√(2 · num_layers) for the two maps that write into
    the residual stream, so that its variance does not grow with depth (GPT-2, Radford et al. 2019).
    """
    attention, feed = jax.random.split(key)
    output_stddev = 0.02 / (2 * config.num_layers) ** 0.5
    names = ["attention_norm"] if config.parallel == "one_norm" else _NORMS
    return init_norms(config, *names) | {
        "attention": init_multi_head_attention(attention, config, output_stddev),
        "feedforward": init_feed_forward(
            feed,
            config.embed_dim,
            config.mlp_dim,
            config.activation,
            use_bias=config.feedforward_bias,
            output_stddev=output_stddev,
        ),
    }


_NORMS = ("attention_norm", "feedforward_norm")


def init_norms(config, *names: str):
    """The norms of these sub-layers; with norm_position "both", two of each."""
    if config.norm_position == "both":
        names = (*names, *map(output_norm, names))
    return {
        name: init_norm(config.norm, config.embed_dim, use_bias=config.norm_bias) for name in names
    }


def init_cross_block(key, config):
    """Weights of a `block` that reads a source: cross-attention like its attention besides."""
    own, cross = jax.random.split(key)
    norms = init_norms(config, "cross_attention_norm")
    output_stddev = 0.02 / (2 * config.num_layers) ** 0.5
    attention = init_multi_head_attention(cross, config, output_stddev)
    return init_block(own, config) | norms | {"cross_attention": attention}


def init_blocks(key, config, init=init_block):
    """num_layers blocks as one tree, each leaf with the layer as its first axis."""
    return jax.vmap(lambda key: init(key, config))(jax.random.split(key, config.num_layers))
