"""Llama (Touvron et al. 2023), Mistral, Qwen 2 and 3, OLMo 2 and 3, SmolLM 3 and Phi-3."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jaxformer.hub.checkpoint_format import USUAL, CheckpointFormat, Field, Part, unused
from jaxformer.hub.options import Options, pattern, per_layer
from jaxformer.hub.positions import (
    GLOBAL,
    LOCAL,
    Rotary,
    RotaryByType,
    Window,
    every_nth_global,
    layers_part,
    usual_window,
)
from jaxformer.hub.table import Row, table
from jaxformer.models.config import DecoderConfig

OTHERS = table("""
    embedding/tokens              model.embed_tokens.weight
    blocks/attention/output       model.layers.*.self_attn.o_proj
    final_norm                    model.norm
    head/kernel                   lm_head.weight
""")
ATTENTION = table("""
    blocks/attention/query        model.layers.*.self_attn.q_proj
    blocks/attention/key          model.layers.*.self_attn.k_proj
    blocks/attention/value        model.layers.*.self_attn.v_proj
    blocks/attention/query_norm   model.layers.*.self_attn.q_norm
    blocks/attention/key_norm     model.layers.*.self_attn.k_norm
""")
DENSE = table("""
    blocks/feedforward/gate       model.layers.*.mlp.gate_proj
    blocks/feedforward/up         model.layers.*.mlp.up_proj
    blocks/feedforward/down       model.layers.*.mlp.down_proj
""")
MAPS = ATTENTION + DENSE
FUSED = table("""
    blocks/attention/query+key+value model.layers.*.self_attn.qkv_proj fused
    blocks/feedforward/gate+up    model.layers.*.mlp.gate_up_proj      fused
    blocks/feedforward/down       model.layers.*.mlp.down_proj
""")
NORMS = table("""
    blocks/attention_norm         model.layers.*.input_layernorm
    blocks/feedforward_norm       model.layers.*.post_attention_layernorm
""")
OLMO2_NORMS = table("""
    blocks/attention_norm         model.layers.*.post_attention_layernorm
    blocks/feedforward_norm       model.layers.*.post_feedforward_layernorm
""")
SIZES = {
    **USUAL,
    "head_dim": Field("head_dim", None),
    "max_position_embeddings": Field("max_length", 2048),
    "num_key_value_heads": Field("num_kv_heads", None, null_is_none=True),
    "rms_norm_eps": Field("norm_epsilon", 1e-6),
    "tie_word_embeddings": Field("tie_embeddings", False),
}
TIED = {"tie_word_embeddings": Field("tie_embeddings", True)}
ATTENTION_BIAS = {"attention_bias": Field("query_key_value_bias+attention_output_bias", False)}
BIASES = ATTENTION_BIAS | {"mlp_bias": Field("feedforward_bias", False)}
FIXED = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "use_bias": False}
IGNORED = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def kv_heads(default: int | None) -> dict[str, Field]:
    """Returns the option for the number of key/value heads; null means num_attention_heads."""
    return {"num_key_value_heads": Field("num_kv_heads", default, null_is_none=True)}


def length(default: int) -> dict[str, Field]:
    """Returns the option for the maximum length, with its default."""
    return {"max_position_embeddings": Field("max_length", default)}


def head_dim(default: int | None) -> dict[str, Field]:
    """Returns the option for the width of a head, with its default."""
    return {"head_dim": Field("head_dim", default)}


def epsilon(default: float) -> dict[str, Field]:
    """Returns the option for the epsilon of the norms, with its default."""
    return {"rms_norm_eps": Field("norm_epsilon", default)}


def llama_like(
    model_type: str,
    model: str,
    parts: Iterable[Part],
    rows: tuple[Row, ...] = NORMS + MAPS,
    ignored: tuple[str, ...] = (),
    **changes: dict[str, Any],
) -> CheckpointFormat:
    """Returns the checkpoint format of a family that resembles Llama.

    Args:
        model_type: The model_type in config.json.
        model: The prefix of the class names in transformers, such as "Llama".
        parts: Readers and writers of the options that `Field` cannot express.
        rows: Rows of the table of tensors, in addition to the rows in `OTHERS`.
        ignored: Patterns for the names of additional tensors that the class does not read.
        changes: Values of fields of `CheckpointFormat`. The entries of `renamed` and `fixed` are
            added to Llama's entries. The value of `demanded` replaces Llama's dictionary.
    """
    return CheckpointFormat(
        model_type,
        DecoderConfig,
        {f"{model}ForCausalLM": {}},
        SIZES | changes.get("renamed", {}),
        lambda config: rows + OTHERS,
        FIXED | changes.get("fixed", {}),
        changes.get("demanded", {"hidden_act": "silu"}),
        tuple(parts),
        ignored=(*IGNORED, *ignored),
        base="model.",
        not_implemented=(),
    )


# ---- windows: in all layers (Mistral, Phi-3), or, if a flag is set, from a certain layer on (Qwen)


EVERYWHERE = unused("layer_types", because="all layers have the same window")


def window(default: int | None) -> dict[str, Field]:
    """Returns the option for a window in all layers, with its default; null means no window."""
    return {"sliding_window": Field("window", default, null_is_none=True)}


def window_if_used(default: int | None) -> Window:
    """Returns a `Window` that applies `sliding_window` only if `use_sliding_window` is true."""

    def read(options: Options) -> int | None:
        if options.flag("use_sliding_window", False):
            return usual_window(default).read(options)
        because = "use_sliding_window is false"
        options.ignore("sliding_window", "max_window_layers", because=because)
        return None

    def write(length: int | None) -> dict[str, Any]:
        return {"use_sliding_window": length is not None, "sliding_window": length}

    return Window(read, write)


def qwen_types(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the layer types of Qwen, whose layers from `max_window_layers` on are local."""
    first = options.whole("max_window_layers", 28)
    return [
        LOCAL if window is not None and layer >= first else GLOBAL for layer in range(num_layers)
    ]


# ---- SmolLM 3, in which every fourth layer lacks positions


def rotated_layers(options: Options, num_layers: int) -> list[int]:
    """Returns one number per layer: 1 if the layer has rotary positions, otherwise 0."""
    interval = options.whole("no_rope_layer_interval", 4, least=1)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    return options.take_list("no_rope_layers", num_layers, int, default)


def smollm3_types(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the layer types; only layers without rotary positions have a window."""
    rotated = rotated_layers(options, num_layers)
    return [LOCAL if window is not None and not x else GLOBAL for x in rotated]


def read_smollm3(options: Options) -> dict:
    """Reads windows and rotary positions; a layer without positions has the base None."""
    options.ignore("max_window_layers", because="the class in transformers has no such option")
    rotated = rotated_layers(options, options.whole("num_hidden_layers", least=1))
    own = SMOLLM3.read(options)
    base = own["rotary_base"]
    return {**own, "rotary_base": pattern([base if x else None for x in rotated])}


def write_smollm3(config: DecoderConfig) -> dict:
    """Converts a config to the options that `read_smollm3` reads."""
    bases = per_layer(config.rotary_base, config.num_layers)
    rotated = [layer for layer, base in enumerate(bases) if base is not None] or [0]
    scalings = per_layer(config.rotary_scaling, config.num_layers)
    first = {"rotary_base": bases[rotated[0]] or 10_000.0, "rotary_scaling": scalings[rotated[0]]}
    written = SMOLLM3.write(replace(config, **first))
    return {**written, "no_rope_layers": [int(base is not None) for base in bases]}


def read_divisible(options: Options) -> dict:
    """Checks that num_attention_heads divides hidden_size; the class in transformers needs this."""
    num_heads = options.whole("num_attention_heads", least=1)
    if options.whole("hidden_size") % num_heads:
        raise options.error(
            "hidden_size", f"it must be divisible by num_attention_heads ({num_heads})"
        )
    return {}


DIVISIBLE = Part(read_divisible)
ROTARY = Rotary().part
QWEN = layers_part(qwen_types, Rotary(), window_if_used(4096))
SMOLLM3 = layers_part(smollm3_types, Rotary(2_000_000.0), window_if_used(None))
OLMO2 = {"norm_position": "post_sublayer", "query_key_norm": "all"}
OLMO3_BASES = dict.fromkeys((LOCAL, GLOBAL), 500_000.0)
OLMO3_ROTARY = RotaryByType(OLMO3_BASES, dict.fromkeys(OLMO3_BASES, "rope_theta"), (GLOBAL,))
# In transformers, the only rotary scaling that Phi-3 accepts is longrope.
PHI3_ROTARY = Rotary(fraction=1.0, kinds=("default",)).part
FAMILIES = (
    llama_like("llama", "Llama", (ROTARY, DIVISIBLE), renamed=BIASES),
    llama_like(
        "mistral",
        "Mistral",
        (ROTARY, EVERYWHERE),
        renamed=kv_heads(8) | length(131_072) | window(4096),
    ),
    llama_like(
        "qwen2",
        "Qwen2",
        (QWEN,),
        renamed=kv_heads(32) | length(32_768),
        fixed={"query_key_value_bias": True},
    ),
    llama_like(
        "qwen3",
        "Qwen3",
        (QWEN,),
        renamed=kv_heads(32) | length(32_768) | head_dim(128) | ATTENTION_BIAS,
        fixed={"query_key_norm": "head"},
    ),
    llama_like(
        "olmo2",
        "Olmo2",
        (ROTARY,),
        OLMO2_NORMS + MAPS,
        renamed=ATTENTION_BIAS | epsilon(1e-5),
        fixed=OLMO2,
    ),
    llama_like(
        "olmo3",
        "Olmo3",
        (layers_part(every_nth_global(4), OLMO3_ROTARY, usual_window(4096)),),
        OLMO2_NORMS + MAPS,
        renamed=ATTENTION_BIAS | epsilon(1e-5),
        fixed=OLMO2,
    ),
    llama_like(
        "smollm3",
        "SmolLM3",
        (Part(read_smollm3, write_smollm3),),
        renamed=kv_heads(4) | length(32_768) | TIED | BIASES,
    ),
    llama_like(
        "phi3",
        "Phi3",
        (PHI3_ROTARY, EVERYWHERE),
        NORMS + FUSED,
        renamed=length(4096) | epsilon(1e-5) | window(None),
    ),
)
