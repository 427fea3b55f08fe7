"""Llama (Touvron et al. 2023) and its relatives: Mistral, Qwen 2 and 3, OLMo 2, SmolLM 3, Phi-3."""

from dataclasses import replace

from jaxformer.artifacts.options import Options, pattern, spread
from jaxformer.artifacts.table import table
from jaxformer.hub.family import USUAL, Family, Field, Part
from jaxformer.hub.layers import GLOBAL, LOCAL, layers_part, rotary_part
from jaxformer.models.config import DecoderConfig

OTHERS = table("""
    embedding/tokens              model.embed_tokens.weight
    blocks/attention/output       model.layers.*.self_attn.o_proj
    blocks/feedforward/down       model.layers.*.mlp.down_proj
    final_norm                    model.norm
    head/kernel                   lm_head.weight
""")
MAPS = table("""
    blocks/attention/query        model.layers.*.self_attn.q_proj
    blocks/attention/key          model.layers.*.self_attn.k_proj
    blocks/attention/value        model.layers.*.self_attn.v_proj
    blocks/attention/query_norm   model.layers.*.self_attn.q_norm
    blocks/attention/key_norm     model.layers.*.self_attn.k_norm
    blocks/feedforward/gate       model.layers.*.mlp.gate_proj
    blocks/feedforward/up         model.layers.*.mlp.up_proj
""")
FUSED = table("""
    blocks/attention/query+key+value model.layers.*.self_attn.qkv_proj fused
    blocks/feedforward/gate+up    model.layers.*.mlp.gate_up_proj      fused
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
    "num_key_value_heads": Field("num_kv_heads", None),
    "head_dim": Field("head_dim", None),
    "max_position_embeddings": Field("max_length", 2048),
    "rms_norm_eps": Field("norm_epsilon", 1e-6),
    "tie_word_embeddings": Field("tie_embeddings", False),
}
ATTENTION_BIAS = {"attention_bias": Field("query_key_value_bias+attention_output_bias", False)}
BIASES = ATTENTION_BIAS | {"mlp_bias": Field("feedforward_bias", False)}
FIXED = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "use_bias": False}
IGNORED = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def family(model_type: str, model: str, parts, rows=NORMS + MAPS, **changes) -> Family:
    """A relative of Llama. changes: renamed options, fixed fields, demanded options besides."""
    return Family(
        model_type,
        DecoderConfig,
        {f"{model}ForCausalLM": {}},
        SIZES | changes.get("renamed", {}),
        lambda config: rows + OTHERS,
        FIXED | changes.get("fixed", {}),
        changes.get("demanded", {"hidden_act": "silu"}),
        parts,
        ignored=IGNORED,
        base="model.",
        repeated={"sliding_window_size": "sliding_window"},
    )


def length(default: int) -> dict:
    return {"max_position_embeddings": Field("max_length", default)}


# ---- windows: in all layers (Mistral, Phi-3), or from one of them on where it says so (Qwen)


def everywhere(default: int | None) -> Part:
    """A window in all layers or in none; default: where the file says nothing, and null is none."""

    def read(options: Options) -> dict:
        options.take("layer_types", None)  # their classes take no notice of it
        absent = "sliding_window" not in options.options
        return {"window": default if absent else options.whole("sliding_window", None)}

    return Part(read, lambda config: {"sliding_window": config.window})


def from_some_on(options: Options, layer: int) -> str:
    uses = options.flag("use_sliding_window", False)
    return LOCAL if uses and layer >= options.whole("max_window_layers", 28) else GLOBAL


def where_used(part: Part) -> Part:
    """The part, of a family that has a window only where `use_sliding_window` says so."""

    def read(options: Options) -> dict:
        options.flag("use_sliding_window", False)
        options.whole("max_window_layers", 28)
        return part.read(options)

    def write(config) -> dict:
        written = part.write(config)
        return {"use_sliding_window": written["sliding_window"] is not None, **written}

    return Part(read, write)


# ---- SmolLM 3: every fourth layer without positions


def read_smollm3(options: Options) -> dict:
    num_layers = options.whole("num_hidden_layers")
    interval = options.whole("no_rope_layer_interval", 4, least=1)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    turns = options.list_of("no_rope_layers", num_layers, int, default)
    if options.flag("use_sliding_window", False) and "layer_types" not in options:
        raise options.error("use_sliding_window", "with it layer_types must be there")
    own = SMOLLM3.read(options)
    return {**own, "rotary_base": pattern([own["rotary_base"] if x else None for x in turns])}


def write_smollm3(config) -> dict:
    bases = spread(config.rotary_base, config.num_layers)
    turning = [base for base in bases if base is not None] or [10_000.0]
    written = SMOLLM3.write(replace(config, rotary_base=turning[0]))
    return {**written, "no_rope_layers": [int(base is not None) for base in bases]}


ROTARY = rotary_part(10_000.0)
QWEN = where_used(layers_part(from_some_on))
SMOLLM3 = where_used(layers_part(lambda options, layer: GLOBAL, 2_000_000.0))
FAMILIES = (
    family("llama", "Llama", (ROTARY,), renamed=BIASES),
    family("mistral", "Mistral", (ROTARY, everywhere(4096)), renamed=length(131_072)),
    family(
        "qwen2",
        "Qwen2",
        (QWEN,),
        renamed=length(32_768),
        fixed={"query_key_value_bias": True},
    ),
    family(
        "qwen3",
        "Qwen3",
        (QWEN,),
        renamed=length(32_768) | ATTENTION_BIAS | {"head_dim": Field("head_dim", 128)},
        fixed={"query_key_norm": "head"},
    ),
    family(
        "olmo2",
        "Olmo2",
        (ROTARY,),
        OLMO2_NORMS + MAPS,
        renamed=ATTENTION_BIAS | {"rms_norm_eps": Field("norm_epsilon", 1e-5)},
        fixed={"norm_position": "output", "query_key_norm": "all"},
    ),
    family(
        "smollm3",
        "SmolLM3",
        (Part(read_smollm3, write_smollm3),),
        renamed=length(32_768) | BIASES | {"tie_word_embeddings": Field("tie_embeddings", True)},
    ),
    family(
        "phi3",
        "Phi3",
        (rotary_part(10_000.0, may_be_part=True), everywhere(None)),
        NORMS + FUSED,
        renamed=length(4096) | {"rms_norm_eps": Field("norm_epsilon", 1e-5)},
    ),
)
