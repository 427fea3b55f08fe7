"""Gemma 1, 2 and 3 (text).

All store γ − 1 for a norm with scale γ, multiply embeddings by √d and have a gated GELU. Gemma 2
and 3 have norms before and after each sub-layer, and windows in some layers. Gemma 2 caps attention
scores and logits. Gemma 3 normalizes queries and keys.
"""

from jaxformer.hub.families.llama import (
    ATTENTION_BIAS,
    DIVISIBLE,
    MAPS,
    ROTARY,
    family,
    length,
)
from jaxformer.hub.family import Field, Part
from jaxformer.hub.layers import layers_part, window_of
from jaxformer.hub.options import Options
from jaxformer.hub.rotary import GLOBAL, LOCAL, Rotary, RotaryByType
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig

GATES = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"}
FOUR_NORMS = table("""
    blocks/attention_norm          model.layers.*.input_layernorm
    blocks/attention_output_norm   model.layers.*.post_attention_layernorm
    blocks/feedforward_norm        model.layers.*.pre_feedforward_layernorm
    blocks/feedforward_output_norm model.layers.*.post_feedforward_layernorm
""")
# Files of Gemma 1 say "gelu", but the model uses its tanh approximation.
OLDER_GATES = {"gelu": "geglu_tanh", "silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
GATE = Field("activation", "gelu_pytorch_tanh", GATES)
RENAMED = {
    "head_dim": Field("head_dim", 256),
    "tie_word_embeddings": Field("tie_embeddings", True),
    **ATTENTION_BIAS,
    **length(8192),
}
FIXED = {"norm": "rms_one_plus", "scale_embeddings": True}
DEMANDED = {"use_bidirectional_attention": False}


def read_scale(options: Options) -> dict:
    """Reads the scale of attention scores."""
    return {"attention_scale": options.whole("query_pre_attn_scalar", 256, least=1) ** -0.5}


def write_scale(config: DecoderConfig) -> dict:
    """Returns the option that `read_scale` reads."""
    # pyrefly: ignore[unsupported-operation] (a resolved config has head_dim)
    scale = config.attention_scale or config.head_dim**-0.5
    return {"query_pre_attn_scalar": max(1, round(scale**-2))}  # the class requires an integer


def cap(theirs: str, ours: str, default: float | None) -> Part:
    """Returns the part for a soft cap.

    Args:
        theirs: Their option. null means no cap.
        ours: Our field.
        default: The cap if the option is missing.
    """

    def read(options: Options) -> dict:
        return {ours: None if options.is_null(theirs) else options.number(theirs, default)}

    return Part(read, lambda config: {theirs: getattr(config, ours)})


def read_gemma1(options: Options) -> dict:
    """Ignores the option that Gemma 1 does not use."""
    options.ignore("hidden_activation", because="the class reads hidden_act")
    return {}


def read_gemma2(options: Options) -> dict:
    """Ignores the options that Gemma 2 does not use."""
    because = "the class has local and global layers in turn, or layer_types"
    options.ignore("sliding_window_pattern", "_sliding_window_pattern", because=because)
    return {}


def read_gemma3(options: Options) -> dict:
    """Ignores the options that Gemma 3 does not use."""
    options.ignore("attn_logit_softcapping", because="the class does not cap scores")
    options.ignore("_sliding_window_pattern", because="the class reads sliding_window_pattern")
    return {}


def nothing(config: DecoderConfig) -> dict:
    """Returns no options."""
    return {}


def alternating(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the types of the layers: local and global ones in turn."""
    return [LOCAL if (layer + 1) % 2 else GLOBAL for layer in range(num_layers)]


def every_sixth_global(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the types of the layers: by default every sixth one is global."""
    period = options.whole("sliding_window_pattern", 6, least=1)
    return [LOCAL if (layer + 1) % period else GLOBAL for layer in range(num_layers)]


def write_window(window: int | None) -> dict:
    """Returns the option for the window."""
    return {"sliding_window": 4096 if window is None else window}


WINDOW = (window_of("sliding_window", 4096), write_window)
GEMMA2 = layers_part(alternating, Rotary(), *WINDOW)
BASES = {LOCAL: 10_000.0, GLOBAL: 1_000_000.0}
BASE_OPTIONS = {LOCAL: "rope_local_base_freq", GLOBAL: "rope_theta"}
GEMMA3 = layers_part(
    every_sixth_global, RotaryByType(BASES, BASE_OPTIONS, scaled=(GLOBAL,)), *WINDOW
)
FINAL_CAP = "final_logit_softcapping"
CAPS2 = (
    cap("attn_logit_softcapping", "attention_cap", 50.0),
    cap(FINAL_CAP, "logits_cap", 30.0),
)
CAPS3 = (cap(FINAL_CAP, "logits_cap", None),)
SCALE = Part(read_scale, write_scale)
BOTH = {"hidden_activation": GATE} | RENAMED
FAMILIES = (
    family(
        "gemma",
        "Gemma",
        (ROTARY, Part(read_gemma1, nothing)),
        kv_heads=16,
        renamed=RENAMED | {"hidden_act": Field("activation", "gelu_pytorch_tanh", OLDER_GATES)},
        fixed=FIXED,
        demanded={"use_bidirectional_attention": False},
    ),
    family(
        "gemma2",
        "Gemma2",
        (SCALE, GEMMA2, DIVISIBLE, Part(read_gemma2, nothing), *CAPS2),
        FOUR_NORMS + MAPS,
        kv_heads=4,
        renamed=BOTH,
        fixed=FIXED | {"norm_position": "both"},
        demanded=DEMANDED,
    ),
    family(
        "gemma3_text",
        "Gemma3",
        (SCALE, GEMMA3, DIVISIBLE, Part(read_gemma3, nothing), *CAPS3),
        FOUR_NORMS + MAPS,
        kv_heads=4,
        renamed=BOTH | length(131_072),
        fixed=FIXED | {"norm_position": "both", "query_key_norm": "head"},
        demanded=DEMANDED,
    ),
)
