"""Number of operations of a model by formula; a multiplication and an addition count as two.

    forward:  2 · Σ (elements of a matrix, or of the filters of a convolution)
                · (tokens that it is applied to)
              of experts: those that a token is sent to
            + 4 · heads · head_dim · (queries) · (keys that each query is compared with), or what
                `SubLayer.flops` says of another sub-layer that reads other tokens
    training: three times that, since the gradient needs two products for each product

The formula is that of Kaplan et al. 2020, §2.1, and Chowdhery et al. 2022, appendix B, which counts
attention in full, causal or not. With `only_visible`, (queries) · (keys) becomes the number of
pairs that the mask allows. For a causal mask each query then has (length + 1) / 2 keys on average,
the average causal context. "Model FLOPs utilization" is the number of operations of a step by this
formula, divided by the number that the devices could have done in its time. Operations that are
repeated to save memory do not count. Norms, activations, softmax and lookups are not counted
either, because they are no matrix products.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxformer.models.builders.transformers import mixer_of
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.kinds import build
from jaxformer.models.parameters import shape_tree


def forward_flops(
    config: ModelConfig,
    length: int,
    source_length: int | None = None,
    *,
    only_visible: bool = False,
) -> int:
    """Returns the operations of a forward pass over one row, including the logits of all tokens.

    Args:
        config: a config of any kind.
        length: number of tokens of the row.
        source_length: number of tokens of the row's source; None: `length`.
        only_visible: whether to count only the keys that the mask lets each query see.
    """
    config = config.resolved
    source_length = length if source_length is None else source_length
    total = 0
    leaves = jax.tree_util.tree_leaves_with_path(shape_tree(build(config)))
    for path, leaf in leaves:
        names = [key.key for key in path]
        is_head = names == ["embedding", "tokens"] and config.tie_embeddings
        if names[-1] in ("kernel", "filter") or is_head:
            size = leaf.size * _share(config, names, leaf.shape)
            total += round(2 * size * _tokens(names, length, source_length))
    return total + _attention(
        config, length, source_length, visible_pairs if only_visible else _pairs
    )


def training_flops(
    config: ModelConfig,
    length: int,
    source_length: int | None = None,
    *,
    only_visible: bool = False,
) -> int:
    """Returns the operations of a forward and backward pass over one row; see `forward_flops`."""
    return 3 * forward_flops(config, length, source_length, only_visible=only_visible)


def flops_per_token(config: ModelConfig, length: int, source_length: int | None = None) -> float:
    """Returns the operations of training per token, in rows of `length` tokens.

    Times tokens per second, divided by the operations per second that the devices can do, it is the
    model FLOPs utilization.
    """
    return training_flops(config, length, source_length) / length


def _share(config: Any, names: list[str], shape: tuple[int, ...]) -> float:
    """Returns the share of a kernel that a token is multiplied by: that of its chosen experts.

    Kernels of experts are [layers, experts, in, out]. All other kernels have one axis less.
    """
    is_experts = "feedforward" in names and len(shape) == 4
    return config.experts_per_token / shape[1] if is_experts else 1.0


def _tokens(names: list[str], length: int, source_length: int) -> int:
    """Returns the number of tokens of a row to which a matrix is applied."""
    if "pooler" in names:
        return 1
    of_source = "encoder" in names or (
        names[-2] in ("key", "value") and ("cross_attention" in names or names[0] == "attention")
    )
    return source_length if of_source else length


def _attention(
    config: Any, length: int, source_length: int, pairs: Callable[[Any, int], int]
) -> int:
    """Returns the operations that are no products with weights, such as those of scores.

    Args:
        config: a resolved config.
        length: number of tokens of the row.
        source_length: number of tokens of the source.
        pairs: (settings of a layer, length) → the pairs of a query and a key that count.
    """
    if config.heads:
        mixers = ((mixer_of(layer), pairs(layer, length)) for layer in config.layers)
        own = sum(mixer.flops(length, num_pairs) for mixer, num_pairs in mixers)
        if not config.reads_source:
            return own
        cross = 4 * config.num_heads * config.head_dim * length * source_length * config.num_layers
        return own + cross + _attention(config.encoder, source_length, 0, pairs)
    if config.reads_source and config.attends:
        return 4 * config.hidden_dim * length * source_length
    return 0


def _pairs(layer: Any, length: int) -> int:
    """Returns the pairs without a mask; a window limits the number of keys."""
    return length * (length if layer.window is None else min(layer.window, length))


def visible_pairs(layer: Any, length: int) -> int:
    """Returns the pairs of a query and a key that the mask of a layer allows, in one document.

        causal              L (L + 1) / 2
        causal, window w    L (L + 1) / 2 − (L − w)(L − w + 1) / 2    for w < L
        a prefix of p       P (P − 1) / 2 more, P = min(p, L)
        in both directions  L², with a window w: L² − (L − w)(L − w − 1)    for w < L

    Args:
        layer: the settings of a layer of a Transformer.
        length: number of tokens of the row, L.
    """
    outside = 0 if layer.window is None else max(0, length - layer.window)
    if layer.bidirectional:
        return length**2 - outside * max(0, outside - 1)
    prefix = min(getattr(layer, "prefix", 0), length)
    return (length * (length + 1) - outside * (outside + 1) + prefix * (prefix - 1)) // 2
