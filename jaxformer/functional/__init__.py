"""The mathematics: pure functions of arrays that take their weights as an argument."""

from jaxformer.functional.attention.dot_product import dot_product_attention
from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.attention.masks import Causal, Mask, Packed, Padding, Prefix, Window
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.layers.convolution import Convolution
from jaxformer.functional.layers.cross_attention import CrossAttention
from jaxformer.functional.layers.experts import Experts
from jaxformer.functional.layers.feedforward import FeedForward, feed_forward
from jaxformer.functional.layers.gated_delta import GatedDelta
from jaxformer.functional.layers.layer import Parallel, Residual, block
from jaxformer.functional.layers.norms import LayerNorm, RMSNorm, layer_norm, rms_norm
from jaxformer.functional.layers.plain import Plain
from jaxformer.functional.layers.recurrent import Lstm, Recurrent, Rnn
from jaxformer.functional.layers.short_convolution import ShortConvolution
from jaxformer.functional.layers.sublayer import At, Initial, Output, Start, SubLayer
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.losses.chunked import chunked_cross_entropy
from jaxformer.functional.losses.cross_entropy import cross_entropy
from jaxformer.functional.losses.preference import (
    clipped_policy_loss,
    dpo_loss,
    group_advantages,
    masked_mean,
    odds_ratio_loss,
    token_entropies,
    token_log_probs,
)
from jaxformer.functional.positions import rotary, sinusoidal_positions
from jaxformer.functional.stack import Stack
from jaxformer.functional.tokens import Tokens

__all__ = [
    "At",
    "Attention",
    "Causal",
    "Convolution",
    "CrossAttention",
    "Experts",
    "FeedForward",
    "GatedDelta",
    "Initial",
    "LayerNorm",
    "Lstm",
    "Mask",
    "Output",
    "Packed",
    "Padding",
    "Parallel",
    "Plain",
    "Prefix",
    "RMSNorm",
    "Recurrent",
    "Residual",
    "Rnn",
    "ShortConvolution",
    "Stack",
    "Start",
    "SubLayer",
    "TokenInfo",
    "Tokens",
    "Window",
    "block",
    "chunked_cross_entropy",
    "clipped_policy_loss",
    "cross_entropy",
    "dot_product_attention",
    "dpo_loss",
    "feed_forward",
    "group_advantages",
    "init_linear",
    "layer_norm",
    "linear",
    "masked_mean",
    "merge_heads",
    "odds_ratio_loss",
    "rms_norm",
    "rotary",
    "sinusoidal_positions",
    "split_heads",
    "token_entropies",
    "token_log_probs",
]


def __dir__() -> list[str]:
    """Returns the public names of this module."""
    return __all__
