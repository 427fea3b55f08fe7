"""Initial weights of a stack of blocks.

With a residual, kernels are drawn from N(0, 0.02²). The standard deviation of kernels that write
into the residual stream is 0.02/√(2 · num_layers), so that its variance does not grow with depth
(GPT-2, Radford et al. 2019).

Without a residual such kernels multiply the signal by less than 1 in each layer, and after four
layers the gradients are 1e-14. Every kernel therefore preserves the variance of its input: W ~ N(0,
1 / fan_in), times 1 / E[act(z)²] after an activation (He et al. 2015). Key kernels equal query
kernels at first, so that each token attends mostly to itself and the tokens remain distinct (He et
al. 2023, arXiv:2302.10322).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.embedding import init_embedding
from jaxformer.functional.family import Weights
from jaxformer.functional.layers.feedforward import activation_power, init_feed_forward
from jaxformer.functional.layers.norms import init_norm
from jaxformer.functional.linear.affine import init_linear

# A gate squares the size of its input, so without norm and residual no size is stable. Four layers
# of 64 features grew to 440 with E[u²] = 1; with 1.5 they end between 0.02 and 10.
_GATE = 1.5


def map_stddev(config: Any, fan_in: int) -> float:
    """Returns the standard deviation of a kernel that reads features of variance 1."""
    return 0.02 if config.residual else fan_in**-0.5


def output_stddev(config: Any, fan_in: int, power: float = 1.0) -> float:
    """Returns the standard deviation of a kernel that computes the output of a sub-layer.

    Args:
        config: a Transformer's config.
        fan_in: the number of features that the kernel reads.
        power: the mean square of these features.
    """
    return 0.02 / (2 * config.num_layers) ** 0.5 if config.residual else (power * fan_in) ** -0.5


def embedding_stddev(config: Any) -> float:
    """Returns the standard deviation of token vectors.

    0.02 suits vectors that are normalized or added to a residual. Otherwise, and if the vectors are
    multiplied by √embed_dim, it is 1/√embed_dim, which gives logits of size 1.
    """
    scaled = config.scale_embeddings
    passes_on = not config.residual and config.norm == "none"
    return config.embed_dim**-0.5 if scaled or passes_on else 0.02


def first_input_stddev(config: Any) -> float:
    """Returns the standard deviation of the input of the first attention: 1 after a norm."""
    normed = config.norm != "none"
    if normed and (config.embedding_norm or _is_normed_before(config)):
        return 1.0
    tokens = embedding_stddev(config) * (config.embed_dim**0.5 if config.scale_embeddings else 1.0)
    positions = {"learned": 0.02}.get(config.positions, 0.0)
    if config.positions.startswith("sinusoidal"):
        positions = 0.5**0.5
    return (tokens**2 + positions**2) ** 0.5


def _is_normed_before(config: Any) -> bool:
    return config.norm_position in ("pre", "both") and config.first_attention_norm


def keys_of(
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


def init_multi_head_attention(
    key: PRNGKeyArray, config: Any, reads_itself: bool = True
) -> dict[str, Any]:
    """Returns the four maps of `self_attention` or `cross_attention`.

    Args:
        key: a random key.
        config: as in `block`.
        reads_itself: True for self-attention: queries, keys and values come from the same rows.
    """
    keys = jax.random.split(key, 4)
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    dim = config.embed_dim
    reading = partial(
        init_linear, use_bias=config.query_key_value_bias, stddev=map_stddev(config, dim)
    )
    stddev, use_bias = output_stddev(config, heads), config.attention_output_bias
    weights = {
        "query": reading(keys[0], dim, heads),
        "key": reading(keys[1], dim, kv_heads),
        "value": reading(keys[2], dim, kv_heads),
        "output": init_linear(keys[3], heads, dim, use_bias=use_bias, stddev=stddev),
    }
    if reads_itself and not config.residual:
        query = weights["query"]["kernel"]
        weights["key"]["kernel"] = keys_of(query, config.num_heads, config.num_kv_heads)
    return weights


def init_query_key_norms(config: Any) -> dict:
    """Returns the norms of `self_attention`'s queries and keys; cross-attention has none."""
    if config.query_key_norm == "none":
        return {}
    heads = {"query_norm": config.num_heads, "key_norm": config.num_kv_heads}
    return {
        name: init_norm(
            config.norm,
            config.head_dim * (num if config.query_key_norm == "all" else 1),
            use_bias=config.norm_bias,
        )
        for name, num in heads.items()
    }


def init_block(key: PRNGKeyArray, config: Any) -> dict[str, Any]:
    """Returns the weights of `block`, with the standard deviations of `initial`."""
    attention, feed = jax.random.split(key)
    dim = config.embed_dim
    power = activation_power(config.activation, _GATE if config.norm == "none" else 1.0)
    written = output_stddev(config, config.mlp_dim, power)
    if config.output_activation and not config.residual:
        written /= power**0.5
    names = ["attention_norm"] if config.parallel == "one_norm" else _NORMS
    return init_norms(config, *names) | {
        "attention": init_multi_head_attention(attention, config) | init_query_key_norms(config),
        "feedforward": init_feed_forward(
            feed,
            dim,
            config.mlp_dim,
            config.activation,
            use_bias=config.feedforward_bias,
            stddev=map_stddev(config, dim),
            output_stddev=written,
        ),
    }


_NORMS = ("attention_norm", "feedforward_norm")


def init_norms(config: Any, *names: str) -> dict[str, Any]:
    """Returns the norms of these sub-layers; with norm_position "both", two of each."""
    if config.norm_position == "both":
        names = (*names, *(name.removesuffix("_norm") + "_output_norm" for name in names))
    return {
        name: init_norm(config.norm, config.embed_dim, use_bias=config.norm_bias)
        for name in names
        if name != "attention_norm" or _has_attention_norm(config)
    }


def _has_attention_norm(config: Any) -> bool:
    """Returns whether any layer applies the norm "attention_norm".

    Stacked layers have weights of equal shapes. With several layers the first one therefore stores
    this norm even if it does not apply it.
    """
    is_before = config.norm_position in ("pre", "both")
    return not is_before or config.first_attention_norm or config.num_layers > 1


def init_cross_block(key: PRNGKeyArray, config: Any) -> dict[str, Any]:
    """Returns the weights of a `block` that reads a source, with cross-attention."""
    self_key, cross = jax.random.split(key)
    norms = init_norms(config, "cross_attention_norm")
    attention = init_multi_head_attention(cross, config, reads_itself=False)
    return init_block(self_key, config) | norms | {"cross_attention": attention}


def init_blocks(
    key: PRNGKeyArray, config: Any, init: Callable[[PRNGKeyArray, Any], dict[str, Any]] = init_block
) -> dict[str, Any]:
    """Returns num_layers blocks as one tree, each leaf with the layer as its first axis."""
    keys = jax.random.split(key, config.num_layers)
    blocks = jax.vmap(lambda key: init(key, config))(keys)
    stddev = first_input_stddev(config)
    if not config.residual and stddev != 1.0:  # the input of the first attention has another size
        for name in ("query", "key", "value"):
            kernel = blocks["attention"][name]["kernel"]
            blocks["attention"][name]["kernel"] = kernel.at[0].divide(stddev)
    return blocks


def stack_initializers(
    config: Any, init_block: Callable[[PRNGKeyArray, Any], dict[str, Any]] = init_block
) -> dict:
    """Returns {name: initializer of the stack's weights}, each a pure function of a key."""
    dim, vocab_size = config.embed_dim, config.vocab_size
    length = config.max_length + config.position_offset
    tables = partial(
        init_embedding,
        vocab_size=vocab_size,
        dim=dim,
        stddev=embedding_stddev(config),
        learned_positions=length if config.positions == "learned" else 0,
        token_types=config.num_token_types,
    )

    def norm(key: PRNGKeyArray) -> Weights:
        return init_norm(config.norm, dim, use_bias=config.norm_bias)

    parts = {
        "embedding": tables,
        "blocks": lambda key: init_blocks(key, config, init_block),
    }
    if config.embedding_norm:
        parts["embedding_norm"] = norm
    if config.norm_position != "post" and config.norm != "none":
        parts["final_norm"] = norm
    if config.positions == "relative":
        sizes = (config.relative_buckets, config.num_heads)
        parts["relative_bias"] = lambda key: {
            "table": 0.02 * jax.random.normal(key, sizes, jnp.float32)
        }
    return parts
