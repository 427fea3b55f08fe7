"""Builds the value of a Transformer from its config."""

from dataclasses import replace
from functools import cache

from jaxformer.functional.attention.masks import Causal, Mask, Near, Packed, Prefix, Window
from jaxformer.functional.attention.scores import Alibi, RelativePositions
from jaxformer.functional.embedding import (
    Embedding,
    LearnedPositions,
    SinusoidalPositions,
    embedding_stddev,
)
from jaxformer.functional.layers.attention import Attention, Rotary
from jaxformer.functional.layers.cross_attention import CrossAttention
from jaxformer.functional.layers.experts import Experts
from jaxformer.functional.layers.feedforward import FeedForward
from jaxformer.functional.layers.gated_delta import GatedDelta
from jaxformer.functional.layers.layer import Layer, Parallel, Residual
from jaxformer.functional.layers.norms import Norm, Unapplied
from jaxformer.functional.layers.short_convolution import ShortConvolution
from jaxformer.functional.layers.sublayer import Initial, SubLayer
from jaxformer.functional.model import Model
from jaxformer.functional.outputs import Pooler, Transform
from jaxformer.functional.stack import Stack
from jaxformer.models.builders.parts import head_of, norm_of
from jaxformer.models.config import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from jaxformer.models.config.transformer import TransformerConfig


@cache
def decoder_of(config: DecoderConfig, mask: Mask | None = None) -> Model:
    """Returns the decoder that a resolved config describes.

    Args:
        config: the config.
        mask: the mask of self-attention within documents; None: the config's.
    """
    head = head_of(config, config.embed_dim)
    return Model(embedding_of(config), stack_of(config, mask), head)


@cache
def encoder_of(config: EncoderConfig, mask: Mask | None = None) -> Model:
    """Returns the encoder that a resolved config describes; see `decoder_of`."""
    transform = Transform(config.activation, norm_of(config), config.use_bias)
    return Model(
        embedding_of(config),
        stack_of(config, mask),
        head_of(config, config.embed_dim),
        generates=False,
        transform=transform if config.transform else None,
        pooler=Pooler(config.use_bias, config.num_labels) if config.pooler else None,
    )


@cache
def encoder_decoder_of(config: EncoderDecoderConfig, mask: Mask | None = None) -> Model:
    """Returns the encoder–decoder that a resolved config describes; see `decoder_of`.

    Args:
        config: the config.
        mask: the mask of the decoder's self-attention within documents; None: the config's.
    """
    encoder = config.encoder
    return Model(
        embedding_of(config),
        stack_of(config, mask, reads_source=True),
        head_of(config, config.embed_dim),
        encoder=Model(embedding_of(encoder), stack_of(encoder), generates=False),
        shares_embedding=config.share_embeddings,
    )


def embedding_of(config: TransformerConfig) -> Embedding:
    """Returns the embedding that a resolved config describes."""
    positions = None
    if config.positions == "learned":
        positions = LearnedPositions(config.max_length, config.position_offset)
    elif config.positions.startswith("sinusoidal"):
        positions = SinusoidalPositions(halves=config.positions == "sinusoidal_halves")
    return Embedding(
        config.vocab_size,
        config.embed_dim,
        config.max_length,
        positions,
        config.num_token_types,
        norm_of(config) if config.embedding_norm else None,
        config.scale_embeddings,
        _token_stddev(config),
        config.dtype,
        config.dropout,
    )


def stack_of(
    config: TransformerConfig, mask: Mask | None = None, *, reads_source: bool = False
) -> Stack:
    """Returns the layers that a resolved config describes.

    Args:
        config: the config.
        mask: the mask of self-attention within documents; None: the config's.
        reads_source: whether the layers have cross-attention.
    """
    norm, relative = norm_of(config), None
    if config.positions == "relative":
        relative = RelativePositions(
            config.relative_buckets,
            config.num_heads,
            config.relative_distance,
            config.bidirectional,
        )
    layers = {x: _layer(x, mask, relative, reads_source) for x in dict.fromkeys(config.layers)}
    num_layers = config.num_layers if config.residual else None
    return Stack(
        tuple(layers[x] for x in config.layers),
        config.embed_dim,
        None if config.norm_position == "post" else norm,
        config.output_scale,
        relative,
        Initial(num_layers, norm is not None, _first_input_stddev(config)),
    )


def _layer(
    config: TransformerConfig,
    mask: Mask | None,
    relative: RelativePositions | None,
    reads_source: bool,
) -> Layer:
    """Returns the layer that the settings of one layer describe."""
    attention = mixer_of(config, mask, relative)
    feed_forward, norm = feed_forward_of(config), norm_of(config)
    if config.parallel != "no":
        shares_norm = config.parallel == "one_norm"
        crossed = (_cross_attention(config),) if reads_source else ()
        sublayers = (attention, *crossed, feed_forward)
        return (Parallel(sublayers, norm, shares_norm, config.dropout, crossed),)
    first = norm
    precedes = config.norm_position in ("pre", "both")
    if norm is not None and precedes and not config.first_attention_norm:
        first = Unapplied(norm) if config.num_layers > 1 else None
    parts = [_residual(attention, first, config), _residual(feed_forward, norm, config)]
    if reads_source:
        parts.insert(1, _residual(_cross_attention(config), norm, config))
    return tuple(parts)


def mixer_of(
    config: TransformerConfig,
    mask: Mask | None = None,
    relative: RelativePositions | None = None,
) -> SubLayer:
    """Returns the sub-layer that reads other tokens in the layer of these settings."""
    if isinstance(config, DecoderConfig):
        if config.layer_types == "short_convolution":
            return ShortConvolution(config.convolution_kernel_size, config.convolution_bias)
        if config.layer_types == "gated_delta":
            return _gated_delta_of(config)
    return attention_of(config, mask, relative)


def _gated_delta_of(config: DecoderConfig) -> GatedDelta:
    """Returns the gated delta rule that the settings of one layer describe."""
    kernel_size, epsilon = config.convolution_kernel_size, config.norm_epsilon
    return GatedDelta(*config.delta_sizes, kernel_size, epsilon)


def feed_forward_of(config: TransformerConfig) -> FeedForward | Experts:
    """Returns the feed-forward layer, or the experts, that the settings of one layer describe."""
    sizes = config.sizes
    num_experts = config.num_experts
    if isinstance(num_experts, tuple):
        raise ValueError("num_experts is a pattern; these must be the settings of one layer")
    width = sizes.expert_dim if num_experts else sizes.mlp_dim
    layer = FeedForward(width, config.activation, config.output_activation, sizes.feedforward_bias)
    if not num_experts:
        return layer
    shared = config.shared_expert_dim
    return Experts(
        layer,
        num_experts,
        config.experts_per_token,
        config.normalize_router,
        None if shared is None else replace(layer, width=shared),
        config.shared_expert_gate,
        config.router_bias,
    )


def _residual(sublayer: SubLayer, norm: Norm | None, config: TransformerConfig) -> Residual:
    """Returns a sub-layer with its norms and its residual."""
    position = config.norm_position
    return Residual(
        sublayer,
        norm,
        "pre" if position == "both" else position,
        norm_of(config) if position == "both" else None,
        config.residual,
        config.dropout,
    )


def attention_of(
    config: TransformerConfig,
    mask: Mask | None = None,
    relative: RelativePositions | None = None,
) -> Attention:
    """Returns the self-attention that the settings of one layer describe."""
    sizes, base = config.sizes, config.rotary_base
    if isinstance(base, tuple):
        raise ValueError("rotary_base is a pattern; these must be the settings of one layer")
    rotary = Rotary(
        base,
        config.rotary_fraction,
        config.rotary_interleaved,
        config.rotary_scaling,
    )
    return Attention(
        config.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        self_attention_mask(config, mask),
        rotary if config.positions == "rotary" else None,
        None if config.query_key_norm == "none" else norm_of(config),
        config.query_key_norm == "all",
        config.attention_scale,
        config.attention_cap,
        Alibi(config.num_heads) if config.positions == "alibi" else relative,
        sizes.query_key_value_bias,
        sizes.attention_output_bias,
        config.attention_sinks,
        config.attention_gate,
    )


def _cross_attention(config: TransformerConfig) -> CrossAttention:
    sizes = config.sizes
    return CrossAttention(
        config.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        config.attention_scale,
        config.attention_cap,
        sizes.query_key_value_bias,
        sizes.attention_output_bias,
    )


def self_attention_mask(config: TransformerConfig, mask: Mask | None = None) -> Mask:
    """Returns the mask of self-attention in a layer, which holds within each document.

    It is `mask` if that is not None. Otherwise an encoder has the config's window or no
    restriction, and a decoder is causal, or has a prefix, with the config's window.
    """
    if mask is not None:
        return mask & Packed()
    if config.bidirectional:
        return Packed() if config.window is None else Near(config.window) & Packed()
    mask = Prefix(config.prefix) if config.prefix else Causal()
    return (mask if config.window is None else mask & Window(config.window)) & Packed()


def _token_stddev(config: TransformerConfig) -> float:
    """Returns the standard deviation of the token vectors."""
    passes_on = not config.residual and config.norm == "none"
    return embedding_stddev(
        config.embed_dim, is_scaled=config.scale_embeddings, passes_on=passes_on
    )


def _first_input_stddev(config: TransformerConfig) -> float:
    """Returns the standard deviation of the input of the first attention: 1 after a norm."""
    is_normed_before = config.norm_position in ("pre", "both") and config.first_attention_norm
    if config.norm != "none" and (config.embedding_norm or is_normed_before):
        return 1.0
    tokens = _token_stddev(config) * (config.embed_dim**0.5 if config.scale_embeddings else 1.0)
    positions = {"learned": 0.02}.get(config.positions, 0.0)
    if config.positions.startswith("sinusoidal"):
        positions = 0.5**0.5
    return (tokens**2 + positions**2) ** 0.5
