"""Builds Transformer architectures from their configs."""

from dataclasses import replace
from functools import cache

from jaxformer.functional.attention.masks import Causal, Mask, Near, Packed, Prefix, Window
from jaxformer.functional.attention.scores import Alibi, RelativePositions
from jaxformer.functional.embedding import Embedding, InputVectors, TokenVectors, embedding_stddev
from jaxformer.functional.layers.attention import Attention, Rotary
from jaxformer.functional.layers.cross_attention import CrossAttention
from jaxformer.functional.layers.experts import Experts
from jaxformer.functional.layers.feedforward import Activation, FeedForward
from jaxformer.functional.layers.gated_delta import GatedDelta
from jaxformer.functional.layers.layer import Layer, Parallel, Residual
from jaxformer.functional.layers.norms import Norm, Unapplied
from jaxformer.functional.layers.plain import ActivatedFeedForward, MatchedAttention, Plain
from jaxformer.functional.layers.short_convolution import ShortConvolution
from jaxformer.functional.layers.sublayer import SubLayer
from jaxformer.functional.model import Model
from jaxformer.functional.outputs import Pooler, Transform
from jaxformer.functional.position_vectors import (
    LearnedPositions,
    PositionVectors,
    SinusoidalPositions,
)
from jaxformer.functional.stack import Stack
from jaxformer.models.builders.own import NO_OWN_PARTS, OwnParts, check_own_positions
from jaxformer.models.builders.parts import build_head, build_norm, build_source_vectors
from jaxformer.models.config import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from jaxformer.models.config.transformer import TransformerConfig


@cache
def build_decoder(config: DecoderConfig, own: OwnParts = NO_OWN_PARTS) -> Model:
    """Builds the decoder of a config from `ModelConfig.resolved`.

    Args:
        config: the config.
        own: the user's parts of the model, which replace parts of the config.
    """
    head = build_head(config, config.embed_dim)
    return Model(build_token_embedding(config, own), build_stack(config, own), head)


@cache
def build_encoder(config: EncoderConfig, own: OwnParts = NO_OWN_PARTS) -> Model:
    """Builds the encoder of a config from `ModelConfig.resolved`; see `build_decoder`."""
    activation = own.activation or config.activation
    transform = Transform(activation, build_norm(config), config.use_bias)
    return Model(
        build_token_embedding(config, own),
        build_stack(config, own),
        build_head(config, config.embed_dim),
        generates=False,
        transform=transform if config.transform else None,
        pooler=Pooler(config.use_bias, config.num_labels) if config.pooler else None,
    )


@cache
def build_encoder_decoder(config: EncoderDecoderConfig, own: OwnParts = NO_OWN_PARTS) -> Model:
    """Builds the encoder-decoder of a config from `ModelConfig.resolved`; see `build_decoder`.

    Args:
        config: the config.
        own: the user's parts of the model, which replace parts of the config. Only the decoder uses
            the mask. The encoder also uses the activation and the positions.
    """
    encoder, of_encoder = config.encoder, own._replace(mask=None)
    return Model(
        build_token_embedding(config, own),
        build_stack(config, own, reads_source=True),
        build_head(config, config.embed_dim),
        encoder=Model(
            build_embedding(encoder, build_source_vectors(config), of_encoder),
            build_stack(encoder, of_encoder),
            generates=False,
        ),
        shares_embedding=config.shares_table,
    )


def build_token_embedding(config: TransformerConfig, own: OwnParts) -> Embedding:
    """Builds the token embedding of a config from `ModelConfig.resolved`."""
    return build_embedding(config, TokenVectors(config.vocab_size), own)


def build_embedding(config: TransformerConfig, vectors: InputVectors, own: OwnParts) -> Embedding:
    """Builds an embedding, in which `vectors` converts token ids or features to vectors."""
    positions: PositionVectors | None = own.positions
    if positions is not None:
        check_own_positions(positions, config)
    elif config.positions == "learned":
        positions = LearnedPositions(config.max_length, config.position_offset)
    elif config.positions.startswith("sinusoidal"):
        positions = SinusoidalPositions(halves=config.positions == "sinusoidal_halves")
    return Embedding(
        vectors,
        config.embed_dim,
        config.max_length,
        positions,
        config.num_token_types,
        build_norm(config) if config.embedding_norm else None,
        config.scale_embeddings,
        _token_stddev(config),
        config.dtype,
        config.dropout,
    )


def build_stack(
    config: TransformerConfig, own: OwnParts = NO_OWN_PARTS, *, reads_source: bool = False
) -> Stack:
    """Builds the stack of layers of a config from `ModelConfig.resolved`.

    Args:
        config: the config.
        own: the user's parts of the model, which replace parts of the config.
        reads_source: whether the layers have cross-attention.
    """
    norm, relative = build_norm(config), None
    if config.positions == "relative":
        relative = RelativePositions(
            config.relative_buckets,
            config.num_heads,
            config.relative_distance,
            config.bidirectional,
        )
    layers = {x: _layer(x, own, relative, reads_source) for x in dict.fromkeys(config.layers)}
    return Stack(
        tuple(layers[x] for x in config.layers),
        config.embed_dim,
        None if config.norm_position == "post" else norm,
        config.output_scale,
        relative,
        _first_input_stddev(config),
    )


def _layer(
    config: TransformerConfig,
    own: OwnParts,
    relative: RelativePositions | None,
    reads_source: bool,
) -> Layer:
    """Builds a layer from its config, an element of `config.layers`."""
    attention = build_mixer(config, own.mask, relative)
    activation = own.activation or config.activation
    feed_forward, norm = build_feed_forward(config, activation), build_norm(config)
    if config.parallel_block != "none":
        shares_norm = config.parallel_block == "shared_norm"
        crossed = (_cross_attention(config),) if reads_source else ()
        sublayers = (attention, *crossed, feed_forward)
        return (Parallel(sublayers, norm, shares_norm, config.dropout, crossed),)
    first = norm
    precedes = config.norm_position in ("pre", "sandwich")
    if norm is not None and precedes and not config.first_attention_norm:
        first = Unapplied(norm) if config.num_layers > 1 else None
    parts = [_residual(attention, first, config), _residual(feed_forward, norm, config)]
    if reads_source:
        parts.insert(1, _residual(_cross_attention(config), norm, config))
    return tuple(parts)


def build_mixer(
    config: TransformerConfig,
    mask: Mask | None = None,
    relative: RelativePositions | None = None,
) -> SubLayer:
    """Builds a layer's sub-layer that combines tokens, such as self-attention."""
    if isinstance(config, DecoderConfig):
        if config.layer_types == "short_convolution":
            return ShortConvolution(config.convolution_kernel_size, config.convolution_bias)
        if config.layer_types == "gated_delta":
            return _build_gated_delta(config)
    return build_attention(config, mask, relative)


def _build_gated_delta(config: DecoderConfig) -> GatedDelta:
    """Builds the gated delta rule from the settings of one layer."""
    kernel_size, epsilon = config.convolution_kernel_size, config.norm_epsilon
    return GatedDelta(*config.delta_sizes, kernel_size, epsilon)


def build_feed_forward(config: TransformerConfig, activation: Activation) -> FeedForward | Experts:
    """Builds the feed-forward layer, or the experts, from the settings of one layer."""
    sizes = config.sizes
    num_experts = config.num_experts
    if isinstance(num_experts, tuple):
        raise ValueError(
            "num_experts has one value per layer; pass the config of one layer, from config.layers"
        )
    width = sizes.expert_dim if num_experts else sizes.mlp_dim
    kind = ActivatedFeedForward if config.output_activation else FeedForward
    layer = kind(width, activation, sizes.feedforward_bias)
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
    """Adds norms, dropout and, if the config has them, residual connections to a sub-layer."""
    position = config.norm_position
    return (Residual if config.residual else Plain)(
        sublayer,
        norm,
        "pre" if position == "sandwich" else position,
        build_norm(config) if position == "sandwich" else None,
        config.dropout,
    )


def build_attention(
    config: TransformerConfig,
    mask: Mask | None = None,
    relative: RelativePositions | None = None,
) -> Attention:
    """Builds self-attention from the settings of one layer."""
    sizes, base = config.sizes, config.rotary_base
    scaling = config.rotary_scaling
    if isinstance(base, tuple) or isinstance(scaling, tuple):
        raise ValueError(
            "rotary_base or rotary_scaling has one value per layer; pass the config of one layer, "
            "from config.layers"
        )
    rotary = Rotary(
        base,
        config.rotary_fraction,
        config.rotary_interleaved,
        scaling,
    )
    return (Attention if config.residual else MatchedAttention)(
        config.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        self_attention_mask(config, mask),
        rotary if config.positions == "rotary" else None,
        None if config.query_key_norm == "none" else build_norm(config),
        config.query_key_norm == "all",
        config.attention_scale,
        config.attention_softcap,
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
        config.attention_softcap,
        sizes.query_key_value_bias,
        sizes.attention_output_bias,
    )


def self_attention_mask(config: TransformerConfig, mask: Mask | None = None) -> Mask:
    """Returns the mask of self-attention in a layer, within each document.

    A given `mask` replaces the config's mask. Otherwise, the mask of a decoder is causal or has a
    prefix, the mask of an encoder allows all tokens, and both are limited to the config's window.
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
    """Returns the standard deviation of the first attention's input, which is 1 after a norm."""
    is_normed_before = config.norm_position in ("pre", "sandwich") and config.first_attention_norm
    if config.norm != "none" and (config.embedding_norm or is_normed_before):
        return 1.0
    tokens = _token_stddev(config) * (config.embed_dim**0.5 if config.scale_embeddings else 1.0)
    positions = {"learned": 0.02}.get(config.positions, 0.0)
    if config.positions.startswith("sinusoidal"):
        positions = 0.5**0.5
    return (tokens**2 + positions**2) ** 0.5
