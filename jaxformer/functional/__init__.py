"""The mathematics: pure functions that take arrays and weights as arguments."""

from typing import Any

from jaxformer.functional.attention.dot_product import (
    dot_product_attention,
    scaled_dot_product_attention,
)
from jaxformer.functional.attention.formula import explicit_attention, softmax
from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.attention.masks import Causal, Mask, Packed, Padding, Prefix, Window
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.layers.convolution import (
    Convolution,
    causal_convolution,
    convolution,
)
from jaxformer.functional.layers.cross_attention import CrossAttention
from jaxformer.functional.layers.experts import Experts
from jaxformer.functional.layers.feedforward import (
    FeedForward,
    activate,
    feed_forward,
    init_feed_forward,
    sigmoid,
)
from jaxformer.functional.layers.gated_delta import GatedDelta
from jaxformer.functional.layers.layer import Parallel, Residual, block
from jaxformer.functional.layers.multi_head import (
    cross_attention,
    kv_cache,
    multi_head_attention,
    self_attention,
)
from jaxformer.functional.layers.norms import LayerNorm, RMSNorm, layer_norm, rms_norm
from jaxformer.functional.layers.plain import Plain
from jaxformer.functional.layers.recurrent import (
    Lstm,
    Recurrent,
    Rnn,
    init_recurrent_layer,
    lstm,
    lstm_cell,
    rnn,
    rnn_cell,
)
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
from jaxformer.functional.position_vectors import encode_positions
from jaxformer.functional.positions import rotary, sinusoidal_positions
from jaxformer.functional.stack import Stack
from jaxformer.functional.tables import embed
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.transformer import (
    add_residual,
    decoder,
    greedy_decode,
    init_transformer_block,
    norm_after,
    norm_before,
    transformer_block,
)
from jaxformer.terminal import did_you_mean

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
    "activate",
    "add_residual",
    "block",
    "causal_convolution",
    "chunked_cross_entropy",
    "clipped_policy_loss",
    "convolution",
    "cross_attention",
    "cross_entropy",
    "decoder",
    "dot_product_attention",
    "dpo_loss",
    "embed",
    "encode_positions",
    "explicit_attention",
    "feed_forward",
    "greedy_decode",
    "group_advantages",
    "init_feed_forward",
    "init_linear",
    "init_recurrent_layer",
    "init_transformer_block",
    "kv_cache",
    "layer_norm",
    "linear",
    "lstm",
    "lstm_cell",
    "masked_mean",
    "merge_heads",
    "multi_head_attention",
    "norm_after",
    "norm_before",
    "odds_ratio_loss",
    "rms_norm",
    "rnn",
    "rnn_cell",
    "rotary",
    "scaled_dot_product_attention",
    "self_attention",
    "sigmoid",
    "sinusoidal_positions",
    "softmax",
    "split_heads",
    "token_entropies",
    "token_log_probs",
    "transformer_block",
]

# {name of a function in the lecture notes: its name in this package}.
_OTHER_NAMES = {"ffn": "feed_forward", "multihead_attention": "multi_head_attention"}


def __getattr__(name: str) -> Any:
    """Returns the function that the lecture notes call `name`.

    Raises:
        AttributeError: No function has this name; the error suggests a similar name.
    """
    if name in _OTHER_NAMES:
        return globals()[_OTHER_NAMES[name]]
    raise AttributeError(
        f"jaxformer.functional has no {name!r}{did_you_mean(name, __all__)}", name=name
    )


def __dir__() -> list[str]:
    """Returns the public names of this module."""
    return __all__
