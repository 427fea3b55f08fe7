"""The mathematics: pure functions of arrays that take their weights as an argument."""

from jaxformer.functional.attention.dot_product import dot_product_attention
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
from jaxformer.functional.layers.recurrent import Lstm, Recurrent, Rnn
from jaxformer.functional.layers.short_convolution import ShortConvolution
from jaxformer.functional.layers.sublayer import At, Initial, Output, Start, SubLayer
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.losses.chunked import chunked_cross_entropy
from jaxformer.functional.losses.cross_entropy import cross_entropy
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
    "cross_entropy",
    "dot_product_attention",
    "feed_forward",
    "init_linear",
    "layer_norm",
    "linear",
    "rms_norm",
    "rotary",
    "sinusoidal_positions",
]
