"""Number of operations of a model by formula; a multiplication and an addition count as two.

    forward:  2 · Σ (elements of a matrix) · (tokens that it is applied to)
            + 4 · heads · head_dim · (queries) · (keys that each query is compared with)
    training: three times that, since the gradient needs two products for each product

The formula is that of Kaplan et al. 2020, §2.1, and Chowdhery et al. 2022, appendix B, which counts
attention in full, causal or not. "Model FLOPs utilization" is the number of operations of a step by
this formula, divided by the number that the devices could have done in its time. Operations that
are repeated to save memory do not count. Norms, activations, softmax and lookups are not counted
either, because they are no matrix products.
"""

from typing import Any

import jax

from jaxformer.models.config.model import ModelConfig
from jaxformer.models.kinds import build
from jaxformer.models.parameters import shape_tree


def forward_flops(config: ModelConfig, length: int, source_length: int | None = None) -> int:
    """Returns the operations of a forward pass over one row, including the logits of all tokens.

    Args:
        config: a config of any kind.
        length: number of tokens of the row.
        source_length: number of tokens of the row's source; None: `length`.
    """
    config = config.resolved
    source_length = length if source_length is None else source_length
    total = 0
    leaves = jax.tree_util.tree_leaves_with_path(shape_tree(build(config)))
    for path, leaf in leaves:
        names = [key.key for key in path]
        if names[-1] == "kernel" or (names == ["embedding", "tokens"] and config.tie_embeddings):
            total += 2 * leaf.size * _tokens(names, length, source_length)
    return total + _attention(config, length, source_length)


def training_flops(config: ModelConfig, length: int, source_length: int | None = None) -> int:
    """Returns the operations of a forward and backward pass over one row; see `forward_flops`."""
    return 3 * forward_flops(config, length, source_length)


def flops_per_token(config: ModelConfig, length: int, source_length: int | None = None) -> float:
    """Returns the operations of training per token, in rows of `length` tokens.

    Times tokens per second, divided by the operations per second that the devices can do, it is the
    model FLOPs utilization.
    """
    return training_flops(config, length, source_length) / length


def _tokens(names: list[str], length: int, source_length: int) -> int:
    """Returns the number of tokens of a row to which a matrix is applied."""
    if "pooler" in names:
        return 1
    of_source = "encoder" in names or (
        names[-2] in ("key", "value") and ("cross_attention" in names or names[0] == "attention")
    )
    return source_length if of_source else length


def _attention(config: Any, length: int, source_length: int) -> int:
    """Returns the operations of scores and weighted sums; a window limits the number of keys."""
    if config.heads:
        self_attention = sum(
            4 * layer.num_heads * layer.head_dim * length * _keys(layer, length)
            for layer in config.layers
        )
        if not config.reads_source:
            return self_attention
        cross = 4 * config.num_heads * config.head_dim * length * source_length * config.num_layers
        return self_attention + cross + _attention(config.encoder, source_length, 0)
    if config.reads_source and config.attends:
        return 4 * config.hidden_dim * length * source_length
    return 0


def _keys(layer: Any, length: int) -> int:
    return length if layer.window is None else min(layer.window, length)
