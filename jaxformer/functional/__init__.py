"""The mathematics: pure functions of arrays that take their weights as an argument."""

from jaxformer.functional import blocks
from jaxformer.functional.arguments import check_block, checks_arguments
from jaxformer.functional.attention.dot_product import dot_product_attention
from jaxformer.functional.attention.masks import Causal, Mask, Packed, Padding, Prefix, Window
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.layers.feedforward import feed_forward
from jaxformer.functional.layers.norms import layer_norm, rms_norm
from jaxformer.functional.losses.chunked import chunked_cross_entropy
from jaxformer.functional.losses.cross_entropy import cross_entropy
from jaxformer.functional.positions import rotary, sinusoidal_positions

block = checks_arguments(check_block)(blocks.block)  # inside a model, `blocks.block` itself runs

__all__ = [
    "Causal",
    "Mask",
    "Packed",
    "Padding",
    "Prefix",
    "TokenInfo",
    "Window",
    "block",
    "chunked_cross_entropy",
    "cross_entropy",
    "dot_product_attention",
    "feed_forward",
    "layer_norm",
    "rms_norm",
    "rotary",
    "sinusoidal_positions",
]
