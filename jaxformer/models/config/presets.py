"""Configs of published models."""

from typing import Literal, overload

from jaxformer.models.config.decoder import DecoderConfig
from jaxformer.models.config.encoder import EncoderDecoderConfig
from jaxformer.models.config.transformer import TransformerConfig


def _gpt2(num_layers: int, embed_dim: int, num_heads: int) -> DecoderConfig:
    return DecoderConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads)


PRESETS = {
    # Radford et al. 2019, table 2. The names contain the sizes of the published checkpoints.
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-350m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    # TinyLlama (Zhang et al. 2024): the architecture of Llama 2 with grouped-query attention.
    "llama-1.1b": DecoderConfig(
        vocab_size=32_000,
        max_length=2048,
        num_layers=22,
        embed_dim=2048,
        num_heads=32,
        num_kv_heads=4,
        mlp_dim=5632,
        activation="swiglu",
        norm="rms",
        positions="rotary",
        use_bias=False,
        tie_embeddings=False,
    ),
    # OLMoE (Muennighoff et al. 2024): each token uses 8 of 64 experts, and 1.3 B of 6.9 B
    # parameters.
    "olmoe-7b": DecoderConfig(
        vocab_size=50_304,
        max_length=4096,
        num_layers=16,
        embed_dim=2048,
        num_heads=16,
        activation="swiglu",
        norm="rms",
        positions="rotary",
        query_key_norm="all",
        num_experts=64,
        experts_per_token=8,
        expert_dim=1024,
        normalize_router=False,
        use_bias=False,
        tie_embeddings=False,
    ),
    # Vaswani et al. 2017, table 3, "base". Both languages share 37,000 tokens (§5.1). Positions are
    # encoded as in the authors' code (tensor2tensor), with all sines before all cosines.
    "transformer-base": EncoderDecoderConfig(
        vocab_size=37_000,
        max_length=512,
        num_layers=6,
        embed_dim=512,
        num_heads=8,
        mlp_dim=2048,
        activation="relu",
        norm_position="post",
        positions="sinusoidal_halves",
        scale_embeddings=True,
        dropout=0.1,
    ),
}


@overload
def preset(
    name: Literal["gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b", "llama-1.1b", "olmoe-7b"],
) -> DecoderConfig: ...
@overload
def preset(name: Literal["transformer-base"]) -> EncoderDecoderConfig: ...
@overload
def preset(name: str) -> TransformerConfig: ...
def preset(name: str) -> TransformerConfig:
    """Returns the published config with a given name.

    To change fields, pass the result to `dataclasses.replace`.

    Args:
        name: A key of `PRESETS`, such as "gpt2-124m".

    Raises:
        ValueError: The name is unknown.
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; it must be one of {', '.join(PRESETS)}")
    return PRESETS[name]
