"""The decoder-only Transformer as pure functions of its weights.

    tokens → embedding + position → blocks → norm → logits            (seeds: lecture 11 §6)

Output i predicts token i + 1 and depends on tokens ≤ i, and on all of a prefix if there is one (the
first tokens of a document, which see one another both ways, are given and not predicted).
"""

from jaxformer.functional.blocks import BLOCK_POINTS
from jaxformer.functional.embedding import head, logits, with_head
from jaxformer.functional.masks import Causal, Mask, Packed, Prefix, Window
from jaxformer.functional.transformer import POINTS, forward, prepare, stack_initializers, start

__all__ = [
    "POINTS",
    "forward",
    "head",
    "initializers",
    "layer_points",
    "logits",
    "points",
    "prepare",
]
__all__ += ["self_attention_mask", "start"]


def initializers(config) -> dict:
    """The decoder's weights by name, each as a pure initialiser of one key."""
    return with_head(stack_initializers(config), config, config.embed_dim)


def points(config) -> tuple[str, ...]:
    """The names at which a pass can be looked into."""
    return POINTS


def layer_points(config) -> tuple[str, ...]:
    """Those of them that every layer has."""
    return BLOCK_POINTS


def self_attention_mask(config, mask: Mask | None = None) -> Mask:
    """Causal (or prefix) within a document, through a window if the config has one; or the caller's
    mask, within a document too."""
    if mask is not None:
        return mask & Packed()
    mask = Prefix(config.prefix) if config.prefix else Causal()
    if config.window is not None:
        mask = mask & Window(config.window)
    return mask & Packed()
