"""Gemma 1, 2 and 3 (text): norms that store γ − 1, embeddings times √d, a gated GELU; from 2 on
norms before and after, and windows in most layers; in 2 caps, in 3 norms on queries and keys."""

from jaxformer.hub.families.llama import (
    ATTENTION_BIAS,
    MAPS,
    ROTARY,
    family,
    layer_kinds,
    length,
    write_window,
)
from jaxformer.hub.family import Field, Part
from jaxformer.hub.options import Options, pattern, spread
from jaxformer.hub.rotary import GLOBAL, LOCAL, patterns, read_rotary_by_kind, write_rotary
from jaxformer.hub.table import table

GATES = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"}
FOUR_NORMS = table("""
    blocks/attention_norm          model.layers.*.input_layernorm
    blocks/attention_output_norm   model.layers.*.post_attention_layernorm
    blocks/feedforward_norm        model.layers.*.pre_feedforward_layernorm
    blocks/feedforward_output_norm model.layers.*.post_feedforward_layernorm
""")
GATE = Field("activation", "gelu_pytorch_tanh", GATES)
RENAMED = {
    "head_dim": Field("head_dim", 256),
    "tie_word_embeddings": Field("tie_embeddings", True),
    **ATTENTION_BIAS,
    **length(8192),
}
CAPS = {
    "attn_logit_softcapping": Field("attention_cap", None),
    "final_logit_softcapping": Field("logits_cap", None),
}
FIXED = {"norm": "rms_one_plus", "scale_embeddings": True}
DEMANDED = {"use_bidirectional_attention": False, "hidden_act": "gelu_pytorch_tanh"}


def read_scale(options: Options) -> dict:
    return {"attention_scale": options.number("query_pre_attn_scalar", 256.0) ** -0.5}


def write_scale(config) -> dict:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    is_whole = abs(scalar - round(scalar)) < 1e-6  # their class wants a whole one
    return {"query_pre_attn_scalar": round(scalar) if is_whole else scalar}


def read_layers(options: Options, period: int) -> list:
    """The kind of each layer; without `layer_types` every so many-th is global."""
    num_layers = options.whole("num_hidden_layers")
    by_period = [GLOBAL if (n + 1) % period == 0 else LOCAL for n in range(num_layers)]
    return layer_kinds(options) or by_period


def read_gemma2(options: Options) -> dict:
    window, kinds = options.whole("sliding_window", 4096), read_layers(options, 2)
    return {"window": pattern([window if kind == LOCAL else None for kind in kinds])}


def read_gemma3(options: Options) -> dict:
    period = options.whole("sliding_window_pattern", options.whole("_sliding_window_pattern", 6))
    window, kinds = options.whole("sliding_window", 4096), read_layers(options, period)
    if "rope_parameters" in options:
        turns = read_rotary_by_kind(options, {LOCAL: 10_000.0, GLOBAL: 1_000_000.0})
    else:
        turns = _older_rotary(options)
    settings = [(window if kind == LOCAL else None, *turns[kind]) for kind in kinds]
    return patterns(settings)


def _older_rotary(options: Options) -> dict:
    older = options.mapping("rope_scaling")
    both = {
        LOCAL: {"rope_theta": options.number("rope_local_base_freq", 10_000.0)},
        GLOBAL: {"rope_theta": options.number("rope_theta", 1_000_000.0), **older},
    }
    return read_rotary_by_kind(Options({"rope_parameters": both}, options.file), both)


def write_gemma3(config) -> dict:
    num_layers = config.num_layers
    names = ("rotary_base", "rotary_scaling")
    bases, scalings = (spread(getattr(config, name), num_layers) for name in names)
    written = write_window(config)
    turns = {
        kind: write_rotary(base, scaling)
        for kind, base, scaling in zip(written["layer_types"], bases, scalings, strict=True)
    }
    return {**written, "rope_parameters": turns}


SCALE = Part(read_scale, write_scale)
BOTH = {"hidden_activation": GATE} | CAPS | RENAMED
FAMILIES = (
    family(
        "gemma",
        "Gemma",
        (ROTARY,),
        renamed=RENAMED | {"hidden_activation": GATE},
        fixed=FIXED,
        demanded=DEMANDED,
    ),
    family(
        "gemma2",
        "Gemma2",
        (ROTARY, SCALE, Part(read_gemma2, write_window)),
        FOUR_NORMS + MAPS,
        renamed=BOTH,
        fixed=FIXED | {"norm_position": "both"},
        demanded=DEMANDED,
    ),
    family(
        "gemma3_text",
        "Gemma3",
        (SCALE, Part(read_gemma3, write_gemma3)),
        FOUR_NORMS + MAPS,
        renamed=BOTH | length(131_072),
        fixed=FIXED | {"norm_position": "both", "query_key_norm": "head"},
        demanded=DEMANDED,
    ),
)
