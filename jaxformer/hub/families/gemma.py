"""Gemma 1, 2 and 3 (text).

Gemma 1, 2 and 3 store γ − 1 for a norm with scale γ, multiply embeddings by √d and have a gated
GELU. Gemma 2 and 3 have norms before and after each sub-layer, and windows in some layers. Gemma 2
caps attention scores and logits. Gemma 3 normalizes queries and keys.
"""

from jaxformer.hub.checkpoint_format import Field, Part, unused
from jaxformer.hub.families.llama import (
    ATTENTION_BIAS,
    DIVISIBLE,
    MAPS,
    ROTARY,
    TIED,
    head_dim,
    kv_heads,
    length,
    llama_like,
)
from jaxformer.hub.options import Options
from jaxformer.hub.positions import (
    GLOBAL,
    LOCAL,
    Rotary,
    RotaryByType,
    every_nth_global,
    layers_part,
    usual_window,
)
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig

GATES = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"}
FOUR_NORMS = table("""
    blocks/attention_norm          model.layers.*.input_layernorm
    blocks/attention_output_norm   model.layers.*.post_attention_layernorm
    blocks/feedforward_norm        model.layers.*.pre_feedforward_layernorm
    blocks/feedforward_output_norm model.layers.*.post_feedforward_layernorm
""")
# Files of Gemma 1 specify "gelu", but the model uses the tanh approximation of GELU.
OLDER_GATES = {"gelu": "geglu_tanh", "silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
GATE = Field("activation", "gelu_pytorch_tanh", GATES)
OLDER_GATE = Field("activation", "gelu_pytorch_tanh", OLDER_GATES)
RENAMED = head_dim(256) | TIED | ATTENTION_BIAS | length(8192) | kv_heads(4)
FIXED = {"norm": "rms_one_plus", "scale_embeddings": True}
DEMANDED = {"use_bidirectional_attention": False}


def read_scale(options: Options) -> dict:
    """Reads the scale of attention scores."""
    return {"attention_scale": options.whole("query_pre_attn_scalar", 256, least=1) ** -0.5}


def write_scale(config: DecoderConfig) -> dict:
    """Converts a config to the option that `read_scale` reads."""
    # pyrefly: ignore[unsupported-operation] (a resolved config has head_dim)
    scale = config.attention_scale or config.head_dim**-0.5
    return {"query_pre_attn_scalar": max(1, round(scale**-2))}  # transformers requires an integer.


SCALE = Part(read_scale, write_scale)
WINDOW = usual_window(4096)
GEMMA2 = layers_part(every_nth_global(2), Rotary(), WINDOW)
BASES = {LOCAL: 10_000.0, GLOBAL: 1_000_000.0}
BASE_OPTIONS = {LOCAL: "rope_local_base_freq", GLOBAL: "rope_theta"}
GEMMA3 = layers_part(
    every_nth_global(6, "sliding_window_pattern"),
    RotaryByType(BASES, BASE_OPTIONS, (GLOBAL,)),
    WINDOW,
)
BOTH = {"hidden_activation": GATE} | RENAMED
CAP = {"final_logit_softcapping": Field("logits_softcap", None, null_is_none=True)}
CAPS = {
    "attn_logit_softcapping": Field("attention_softcap", 50.0, null_is_none=True),
    "final_logit_softcapping": Field("logits_softcap", 30.0, null_is_none=True),
}
FAMILIES = (
    llama_like(
        "gemma",
        "Gemma",
        (ROTARY, unused("hidden_activation", because="transformers reads hidden_act")),
        renamed=RENAMED | kv_heads(16) | {"hidden_act": OLDER_GATE},
        fixed=FIXED,
        demanded=DEMANDED,
    ),
    llama_like(
        "gemma2",
        "Gemma2",
        (
            *(SCALE, GEMMA2, DIVISIBLE),
            unused(
                *("sliding_window_pattern", "_sliding_window_pattern"),
                because="transformers alternates local and global layers if layer_types is not set",
            ),
        ),
        FOUR_NORMS + MAPS,
        renamed=BOTH | CAPS,
        fixed=FIXED | {"norm_position": "sandwich"},
        demanded=DEMANDED,
    ),
    llama_like(
        "gemma3_text",
        "Gemma3",
        (
            *(SCALE, GEMMA3, DIVISIBLE),
            unused("attn_logit_softcapping", because="transformers does not cap these scores"),
            unused("_sliding_window_pattern", because="transformers reads sliding_window_pattern"),
        ),
        FOUR_NORMS + MAPS,
        renamed=BOTH | CAP | length(131_072),
        fixed=FIXED | {"norm_position": "sandwich", "query_key_norm": "head"},
        demanded=DEMANDED,
    ),
)
