"""Gemma 1, 2 and 3 (text): norms that store γ − 1, embeddings times √d, a gated GELU; from 2 on
norms before and after, and windows in most layers; in 2 caps, in 3 norms on queries and keys."""

from jaxformer.artifacts.options import Options
from jaxformer.artifacts.table import table
from jaxformer.hub.families.llama import ATTENTION_BIAS, MAPS, ROTARY, family, length
from jaxformer.hub.family import Field, Part
from jaxformer.hub.layers import GLOBAL, LOCAL, layers_part

GATES = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"}
FOUR_NORMS = table("""
    blocks/attention_norm          model.layers.*.input_layernorm
    blocks/attention_output_norm   model.layers.*.post_attention_layernorm
    blocks/feedforward_norm        model.layers.*.pre_feedforward_layernorm
    blocks/feedforward_output_norm model.layers.*.post_feedforward_layernorm
""")
# Files of Gemma 1 say "gelu" and mean the other one.
OLDER_GATES = {"gelu": "geglu_tanh", "silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
GATE = Field("activation", "gelu_pytorch_tanh", GATES)
RENAMED = {
    "head_dim": Field("head_dim", 256),
    "tie_word_embeddings": Field("tie_embeddings", True),
    **ATTENTION_BIAS,
    **length(8192),
}
FIXED = {"norm": "rms_one_plus", "scale_embeddings": True}
DEMANDED = {"use_bidirectional_attention": False, "hidden_act": "gelu_pytorch_tanh"}


def read_scale(options: Options) -> dict:
    return {"attention_scale": options.number("query_pre_attn_scalar", 256.0) ** -0.5}


def write_scale(config) -> dict:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    is_whole = abs(scalar - round(scalar)) < 1e-6  # their class wants a whole one
    return {"query_pre_attn_scalar": round(scalar) if is_whole else scalar}


def caps_part(attention: float | None, logits: float | None) -> Part:
    """Soft caps; the two are their defaults where the file says nothing, and null is none."""
    names = {"attn_logit_softcapping": "attention_cap", "final_logit_softcapping": "logits_cap"}
    defaults = dict(zip(names, (attention, logits), strict=True))

    def read(options: Options) -> dict:
        absent = {x for x in names if x not in options.options}
        return {
            ours: defaults[x] if x in absent else options.number(x, None)
            for x, ours in names.items()
        }

    return Part(read, lambda config: {x: getattr(config, ours) for x, ours in names.items()})


def read_nothing(options: Options) -> dict:
    options.take("hidden_activation", None)  # their class of Gemma 1 takes no notice of it
    return {}


def every(period: int):
    """Every so many-th layer is global."""

    def type_of(options: Options, layer: int) -> str:
        own = options.whole("_sliding_window_pattern", period, least=1)
        own = options.whole("sliding_window_pattern", own, least=1)
        return LOCAL if (layer + 1) % own else GLOBAL

    return type_of


GEMMA2 = layers_part(every(2), default_window=4096)
TURNS = {LOCAL: 10_000.0, GLOBAL: 1_000_000.0}
GEMMA3 = layers_part(every(6), TURNS, default_window=4096)
SCALE = Part(read_scale, write_scale)
BOTH = {"hidden_activation": GATE} | RENAMED
FAMILIES = (
    family(
        "gemma",
        "Gemma",
        (ROTARY, Part(read_nothing, lambda config: {})),
        renamed=RENAMED | {"hidden_act": Field("activation", "gelu_pytorch_tanh", OLDER_GATES)},
        fixed=FIXED,
        demanded={"use_bidirectional_attention": False},
    ),
    family(
        "gemma2",
        "Gemma2",
        (SCALE, GEMMA2, caps_part(50.0, 30.0)),
        FOUR_NORMS + MAPS,
        renamed=BOTH,
        fixed=FIXED | {"norm_position": "both"},
        demanded=DEMANDED,
    ),
    family(
        "gemma3_text",
        "Gemma3",
        (SCALE, GEMMA3, caps_part(None, None)),
        FOUR_NORMS + MAPS,
        renamed=BOTH | length(131_072),
        fixed=FIXED | {"norm_position": "both", "query_key_norm": "head"},
        demanded=DEMANDED,
    ),
)
