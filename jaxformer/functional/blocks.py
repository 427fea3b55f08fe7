"""The Transformer block, and the stack of them.

    pre-norm:   h = x + Attention(Norm(x))        y = h + FeedForward(Norm(h))
    post-norm:  h = Norm(x + Attention(x))        y = Norm(h + FeedForward(h))

(seeds: lecture 11 §3.) Left out on demand, residual and norm give the half-built decoder of
lecture 10. `config` below is anything with the fields of models.config; attention itself is handed
in as `attend(query, key, value) → (output, state)`, so the block is the same whether it attends to
its own row, to a cache or in any implementation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.dropout import dropout
from jaxformer.functional.feedforward import feed_forward, init_feed_forward
from jaxformer.functional.heads import merge_heads, split_heads
from jaxformer.functional.linear import init_linear, linear
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


def multi_head_attention(weights, x, config, *, attend, positions, tap=no_tap):
    """Concatenate softmax(q kᵀ/√d) v over the heads, then W_O (lecture 11 §4). Returns (y, state).

    x: [*batch, length, dim]. Rotary positions, where the config has them, turn query and key.
    """
    query = split_heads(linear(weights["query"], x), config.num_heads)
    key = split_heads(linear(weights["key"], x), config.num_kv_heads)
    value = split_heads(linear(weights["value"], x), config.num_kv_heads)
    if config.positions == "rotary":
        query, key = (rotary(side, positions, config.rotary_base) for side in (query, key))
    query, key = tap("attention.query", query), tap("attention.key", key)
    output, state = attend(query, key, tap("attention.value", value))
    return linear(weights["output"], merge_heads(tap("attention.heads", output))), state


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


def sublayer(norm_weights, x, function, config, *, dropout_key=None):
    """function with the norm before or after it and the residual around it, as config says."""
    normalize = normalizer(config.norm, config.norm_epsilon)
    pre_norm = config.norm_position == "pre"
    y = function(normalize(norm_weights, x) if pre_norm else x)
    y = dropout(dropout_key, y, config.dropout)
    y = x + y if config.residual else y
    return y if pre_norm else normalize(norm_weights, y)


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
    state = None

    def attention(x):
        nonlocal state
        y, state = multi_head_attention(
            weights["attention"], x, config, attend=attend, positions=positions, tap=tap
        )
        return tap("attention.output", y)

    def feed(x):
        y = feed_forward(
            weights["feedforward"],
            x,
            config.activation,
            output_activation=config.output_activation,
            tap=tap,
        )
        return tap("feedforward.output", y)

    x = tap("block.input", x)
    x = sublayer(weights["attention_norm"], x, attention, config, dropout_key=keys[0])
    x = tap("block.middle", x)
    x = sublayer(weights["feedforward_norm"], x, feed, config, dropout_key=keys[1])
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


def init_blocks(key, config):
    """num_layers blocks as one tree, each leaf with the layer as its first axis."""
    return jax.vmap(lambda key: init_block(key, config))(jax.random.split(key, config.num_layers))


def unstack(blocks, num_layers: int) -> list:
    """The blocks one by one; done once outside a decoding loop, it saves the slicing inside."""
    if isinstance(blocks, list):
        return blocks
    leaves, treedef = jax.tree.flatten(blocks)
    # Going back, a split is one concatenation; an index would be zeros as large as all layers.
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    return [treedef.unflatten(leaf[0] for leaf in layer) for layer in zip(*split, strict=True)]


def run_blocks(
    blocks,
    x,
    config,
    execution,
    *,
    attend_with,
    positions,
    dropout_key=None,
    capture=(),
    patch=None,
):
    """x through all blocks, by scan or unrolled; returns (y, captured), captured stacked by layer.

    attend_with(tap) makes the `attend` of a layer. Dropout keys are split per layer here and
    scanned over: a key drawn inside a scan body would be the same in each layer.
    """
    keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    patch = {name: _per_layer(entry, config.num_layers) for name, entry in (patch or {}).items()}

    def step(x, layer):
        weights, key, patch = layer
        tap = Tap(capture, patch)
        x, _ = block(
            weights,
            x,
            config,
            attend=attend_with(tap),
            positions=positions,
            dropout_key=key,
            tap=tap,
        )
        return x, tap.captured

    step = _REMAT[execution.remat](step)
    if execution.layers == "scan":
        return jax.lax.scan(step, x, (blocks, keys, patch))
    captured = []
    for layer in unstack((blocks, keys, patch), config.num_layers):
        x, values = step(x, layer)
        captured.append(values)
    return x, jax.tree.map(lambda *values: jnp.stack(values), *captured)


def _per_layer(patch: Patch, num_layers: int) -> Patch:
    return Patch(*(jnp.broadcast_to(x, (num_layers, *jnp.shape(x)[1:])) for x in patch))


# What the backward pass finds in memory: everything; matrix products only; block inputs only.
_REMAT = {
    "none": lambda step: step,
    "dots": lambda step: jax.checkpoint(
        step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "full": jax.checkpoint,
}
REMAT = tuple(_REMAT)
LAYERS = ("scan", "unrolled")
