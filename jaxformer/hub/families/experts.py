"""Mixture-of-experts variants of Llama: Mixtral, OLMoE, Qwen 2 and 3 MoE, and gpt-oss.

gpt-oss (OpenAI 2025, arXiv:2508.10925) also has attention sinks, and windows in every other layer.
"""

from jaxformer.hub.checkpoint_format import Field, Part
from jaxformer.hub.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    EVERYWHERE,
    MAPS,
    NORMS,
    ROTARY,
    epsilon,
    head_dim,
    kv_heads,
    length,
    llama_like,
    window,
    window_if_used,
)
from jaxformer.hub.options import Options, pattern, per_layer
from jaxformer.hub.positions import GLOBAL, LOCAL, Rotary, Window, every_nth_global, layers_part
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig
from jaxformer.models.config.check import entries

MIXTRAL = table("""
    blocks/feedforward/router     model.layers.*.block_sparse_moe.gate
    blocks/feedforward/gate       model.layers.*.block_sparse_moe.experts.*.w1
    blocks/feedforward/up         model.layers.*.block_sparse_moe.experts.*.w3
    blocks/feedforward/down       model.layers.*.block_sparse_moe.experts.*.w2
""")
EXPERTS = table("""
    blocks/feedforward/router     model.layers.*.mlp.gate
    blocks/feedforward/gate       model.layers.*.mlp.experts.*.gate_proj
    blocks/feedforward/up         model.layers.*.mlp.experts.*.up_proj
    blocks/feedforward/down       model.layers.*.mlp.experts.*.down_proj
""")
SHARED = table("""
    blocks/feedforward/shared/gate model.layers.*.mlp.shared_expert.gate_proj
    blocks/feedforward/shared/up   model.layers.*.mlp.shared_expert.up_proj
    blocks/feedforward/shared/down model.layers.*.mlp.shared_expert.down_proj
    blocks/feedforward/shared_gate model.layers.*.mlp.shared_expert_gate
""")
GPT_OSS = table("""
    blocks/attention/sink           model.layers.*.self_attn.sinks
    blocks/feedforward/router       model.layers.*.mlp.router
    blocks/feedforward/gate+up/kernel EXPERTS.gate_up_proj      interleaved-as-ours
    blocks/feedforward/gate+up/bias EXPERTS.gate_up_proj_bias   interleaved-as-ours
    blocks/feedforward/down/kernel  EXPERTS.down_proj           as-ours
    blocks/feedforward/down/bias    EXPERTS.down_proj_bias
""", EXPERTS="model.layers.*.mlp.experts")  # fmt: skip


def experts_part(option: str, other: str, default: int) -> Part:
    """Returns the `Part` for the number of experts, for which files use two option names.

    Args:
        option: The option name that export writes.
        other: The alternative option name.
        default: The number of experts if config.json sets neither option.
    """

    def read(options: Options) -> dict:
        options.ignore(
            *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
            because="these options are used only in training",
        )
        number = options.whole(other, options.whole(option, default, least=1), least=1)
        if options.whole(option, number) != number:
            raise options.error(option, f"{other} is {number}; the two options must be equal")
        return {"num_experts": number}

    def write(config: DecoderConfig) -> dict:
        if not config.has_experts:
            raise ValueError(
                f"num_experts is 0 in jaxformer, but {default} in transformers, where mlp_dim "
                f"({config.mlp_dim}) has no effect"
            )
        return {option: max(entries(config.num_experts))}

    return Part(read, write)


def qwen_part(default: int) -> Part:
    """Returns the `Part` for the number of experts of each layer; 0 for a layer without experts.

    Args:
        default: The number of experts if the option is missing.
    """
    usual = experts_part("num_experts", "num_local_experts", default)

    def read(options: Options) -> dict:
        number = usual.read(options)["num_experts"]
        step = options.whole("decoder_sparse_step", 1, least=1)
        dense = options.take("mlp_only_layers", [])
        if not isinstance(dense, list) or not all(type(x) is int for x in dense):
            raise options.error("mlp_only_layers", "it must be a list of layer indices")
        layers = range(options.whole("num_hidden_layers", least=1))
        experts = [number if (x + 1) % step == 0 and x not in dense else 0 for x in layers]
        return {"num_experts": pattern(experts)}

    def write(config: DecoderConfig) -> dict:
        numbers = per_layer(config.num_experts, config.num_layers)
        dense = [layer for layer, number in enumerate(numbers) if not number]
        return {**usual.write(config), "decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Part(read, write)


def qwen2_types(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the layer types of Qwen 2 MoE: local for even indices below `max_window_layers`."""
    last = options.whole("max_window_layers", 28)
    num_local = 0 if window is None else last
    return [GLOBAL if layer % 2 or layer >= num_local else LOCAL for layer in range(num_layers)]


def read_head_dim(options: Options) -> dict:
    """Checks that head_dim times num_attention_heads is hidden_size, for the norms of OLMoE."""
    num_heads = options.whole("num_attention_heads", least=1)
    width = options.whole("hidden_size", least=1)
    if options.whole("head_dim", width // num_heads, least=1) * num_heads != width:
        raise options.error(
            "head_dim",
            f"head_dim times num_attention_heads ({num_heads}) must be hidden_size ({width})",
        )
    return {}


def widths(expert: int, shared: int | None = None) -> dict[str, Field]:
    """Returns the options for the widths of the experts and of an optional shared expert."""
    own = {"moe_intermediate_size": Field("expert_dim", expert)}
    shared_own = {"shared_expert_intermediate_size": Field("shared_expert_dim", shared)}
    return own if shared is None else own | shared_own


def chosen(default: int) -> dict[str, Field]:
    """Returns the option for the number of experts per token, with its default."""
    return {"num_experts_per_tok": Field("experts_per_token", default)}


# ---- gpt-oss

GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
METHOD = "mxfp4"


def read_window(options: Options) -> int:
    """Reads the window, which the class requires even if all layers are global."""
    if options.is_null("sliding_window"):
        raise options.error("sliding_window", "it must be a whole number")
    return options.whole("sliding_window", 128, least=1)


def read_quantization(options: Options) -> dict:
    """Checks that quantized weights have the format MXFP4; see `hub.mxfp4`."""
    given = options.mapping("quantization_config")
    if given and given.get("quant_method") != METHOD:
        raise options.error("quantization_config", f"its quant_method must be {METHOD!r}")
    # The names of the tensors show which tensors are quantized.
    known = ("quant_method", "modules_to_not_convert", "dequantize")
    options.unread += [f"quantization_config.{x}" for x in given if x not in known]
    options.ignore("hidden_act", because="the class in transformers has a fixed activation")
    return {}


WIDTH = {"intermediate_size": Field("expert_dim")}
NORMALIZES = {"norm_topk_prob": Field("normalize_router", False)}
QWEN_WINDOW = window_if_used(4096)
FAMILIES = (
    llama_like(
        "mixtral",
        "Mixtral",
        (Rotary(1_000_000.0).part, EVERYWHERE, experts_part("num_local_experts", "num_experts", 8)),
        NORMS + ATTENTION + MIXTRAL,
        renamed=kv_heads(8) | length(131_072) | epsilon(1e-5) | WIDTH | chosen(2) | window(None),
        fixed={"normalize_router": True},
    ),
    llama_like(
        "olmoe",
        "Olmoe",
        (ROTARY, Part(read_head_dim), experts_part("num_experts", "num_local_experts", 64)),
        NORMS + ATTENTION + EXPERTS,
        renamed=length(4096) | epsilon(1e-5) | ATTENTION_BIAS | NORMALIZES | WIDTH | chosen(8),
        fixed={"query_key_norm": "all"},
        demanded={"hidden_act": "silu", "clip_qkv": None},
    ),
    llama_like(
        "qwen2_moe",
        "Qwen2Moe",
        (layers_part(qwen2_types, Rotary(), QWEN_WINDOW), qwen_part(60)),
        NORMS + MAPS + EXPERTS + SHARED,
        renamed={
            **(kv_heads(16) | length(32_768) | widths(1408, 5632) | NORMALIZES | chosen(4)),
            "qkv_bias": Field("query_key_value_bias", True),
        },
        fixed={"shared_expert_gate": True},
    ),
    llama_like(
        "qwen3_moe",
        "Qwen3Moe",
        (
            ROTARY,
            Part(  # All layers of this family have the same window size.
                lambda options: {"window": QWEN_WINDOW.read(options)},
                lambda config: QWEN_WINDOW.write(config.window),
            ),
            qwen_part(128),
        ),
        NORMS + MAPS + EXPERTS,
        renamed={
            **(kv_heads(4) | length(32_768) | widths(768) | NORMALIZES | chosen(8)),
            **ATTENTION_BIAS,
        },
        fixed={"query_key_norm": "head"},
    ),
    llama_like(
        "gpt_oss",
        "GptOss",
        (
            layers_part(
                every_nth_global(2),
                Rotary(150_000.0, usual=GPT_OSS_SCALING),
                Window(read_window, lambda window: {"sliding_window": window or 128}),
            ),
            experts_part("num_local_experts", "num_experts", 128),
            Part(read_quantization),
        ),
        NORMS + ATTENTION + GPT_OSS,
        renamed={
            **(kv_heads(8) | length(131_072) | head_dim(64) | epsilon(1e-5) | WIDTH | chosen(4)),
            "attention_bias": Field("query_key_value_bias+attention_output_bias", True),
        },
        fixed={
            "activation": "clipped_swiglu",
            "attention_sinks": True,
            "router_bias": True,
            "feedforward_bias": True,
        },
        demanded={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
)
