"""Operations of a model, by formula: a multiplication and an addition are two.

    forward:  2 · Σ (elements of a matrix) · (tokens that it is applied to)
            + 4 · heads · head_dim · (queries) · (keys that each is compared with)
    training: three times that, since the gradient is two products for each one

(Kaplan et al. 2020, §2.1; Chowdhery et al. 2022, appendix B, which counts attention whole, causal
or not: "model FLOPs utilization" is what a step needs by this formula, by what the devices could
have done. What is computed a second time to save memory is not counted.) Norms, activations,
softmax and lookups are left out; they are no matrix products.
"""

import jax

from jaxformer.models.build import build, shape_tree
from jaxformer.models.config.encoder_decoder import ReadsSource
from jaxformer.models.config.transformer import TransformerConfig


def forward_flops(config, length: int, source_length: int | None = None) -> int:
    """Of one row of so many tokens, logits of all of them included. source_length: tokens of what a
    row's model reads first; None: as many."""
    config = config.resolved
    source_length = length if source_length is None else source_length
    total = 0
    leaves = jax.tree_util.tree_leaves_with_path(shape_tree(build(config)))
    for path, leaf in leaves:
        names = [key.key for key in path]
        if names[-1] == "kernel" or (names == ["embedding", "tokens"] and config.tie_embeddings):
            total += 2 * leaf.size * _tokens(names, length, source_length)
    return total + _attention(config, length, source_length)


def training_flops(config, length: int, source_length: int | None = None) -> int:
    """Of one row of so many tokens, with its gradient."""
    return 3 * forward_flops(config, length, source_length)


def flops_per_token(config, length: int, source_length: int | None = None) -> float:
    """What training needs for each token of rows of that length: times tokens per second, by what
    the devices could do in a second, it is the utilisation of these."""
    return training_flops(config, length, source_length) / length


def _tokens(names: list[str], length: int, source_length: int) -> int:
    """Tokens of a row to which a matrix is applied."""
    if "pooler" in names:
        return 1
    of_source = "encoder" in names or (
        names[-2] in ("key", "value") and ("cross_attention" in names or names[0] == "attention")
    )
    return source_length if of_source else length


def _attention(config, length: int, source_length: int) -> int:
    """Scores and weighted sums, a window of keys at most where there is one."""
    if isinstance(config, TransformerConfig):
        own = sum(
            4 * layer.num_heads * layer.head_dim * length * _keys(layer, length)
            for layer in config.layers
        )
        if not isinstance(config, ReadsSource):
            return own
        cross = 4 * config.num_heads * config.head_dim * length * source_length * config.num_layers
        return own + cross + _attention(config.encoder, source_length, 0)
    if isinstance(config, ReadsSource) and config.attends:
        return 4 * config.hidden_dim * length * source_length
    return 0


def _keys(layer, length: int) -> int:
    window = getattr(layer, "window", None)
    return length if window is None else min(window, length)
