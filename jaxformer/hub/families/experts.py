"""Mixtures of experts with Llama's other layers: Mixtral, OLMoE, Qwen 2 MoE and Qwen 3 MoE."""

from jaxformer.hub.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    MAPS,
    NORMS,
    ROTARY,
    everywhere,
    family,
    length,
    window_if_used,
    write_window_if_used,
)
from jaxformer.hub.family import Field, Part
from jaxformer.hub.layers import layers_part
from jaxformer.hub.options import Options, pattern, per_layer
from jaxformer.hub.rotary import GLOBAL, LOCAL, Rotary, rotary_part
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


def experts_part(option: str, other: str, default: int) -> Part:
    """Returns the part for the number of experts, which has two names in files.

    Args:
        option: The name to write.
        other: The other name.
        default: The number if both are missing.
    """

    def read(options: Options) -> dict:
        options.ignore(
            *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
            because="they act in training only",
        )
        number = options.whole(other, options.whole(option, default, least=1), least=1)
        if options.whole(option, number) != number:
            raise options.error(option, f"{other} is {number}; both must be equal")
        return {"num_experts": number}

    def write(config: DecoderConfig) -> dict:
        if not config.has_experts:
            raise ValueError(
                f"num_experts is 0, there {default}; mlp_dim is {config.mlp_dim}, there unused"
            )
        return {option: max(entries(config.num_experts))}

    return Part(read, write)


def qwen_part(default: int) -> Part:
    """Returns the part for the number of experts and for the layers that have none.

    Args:
        default: The number if it is missing.
    """
    usual = experts_part("num_experts", "num_local_experts", default)

    def read(options: Options) -> dict:
        number, step = (
            usual.read(options)["num_experts"],
            options.whole("decoder_sparse_step", 1, 1),
        )
        dense = options.take("mlp_only_layers", [])
        if not isinstance(dense, list) or not all(type(x) is int for x in dense):
            raise options.error("mlp_only_layers", "it must be a list of numbers of layers")
        layers = range(options.whole("num_hidden_layers", least=1))
        experts = [number if (x + 1) % step == 0 and x not in dense else 0 for x in layers]
        return {"num_experts": pattern(experts)}

    def write(config: DecoderConfig) -> dict:
        numbers = per_layer(config.num_experts, config.num_layers)
        dense = [layer for layer, number in enumerate(numbers) if not number]
        return {**usual.write(config), "decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Part(read, write)


def qwen2_types(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the types of Qwen 2 MoE's layers: local in turn, before `max_window_layers`."""
    if window is None:
        return [GLOBAL] * num_layers
    last = options.whole("max_window_layers", 28)
    return [GLOBAL if layer % 2 or layer >= last else LOCAL for layer in range(num_layers)]


def read_qwen3(options: Options) -> dict:
    """Reads the window, which all layers have."""
    return {"window": window_if_used(4096)(options)}


def write_qwen3(config: DecoderConfig) -> dict:
    """Returns the options that `read_qwen3` reads."""
    return {"use_sliding_window": config.window is not None, "sliding_window": config.window}


def read_head_dim(options: Options) -> dict:
    """Checks that OLMoE's heads are together as wide as the model, since its norms are."""
    num_heads = options.whole("num_attention_heads", least=1)
    width = options.whole("hidden_size", least=1)
    if options.whole("head_dim", width // num_heads, least=1) * num_heads != width:
        raise options.error(
            "head_dim", f"times num_attention_heads ({num_heads}) it must be hidden_size ({width})"
        )
    return {}


def chosen(default: int) -> dict[str, Field]:
    """Returns the option for the number of experts of a token, with its default."""
    return {"num_experts_per_tok": Field("experts_per_token", default)}


WIDTH = {"intermediate_size": Field("expert_dim")}
NORMALIZES = {"norm_topk_prob": Field("normalize_router", False)}
QWEN2_OWN = {
    "moe_intermediate_size": Field("expert_dim", 1408),
    "shared_expert_intermediate_size": Field("shared_expert_dim", 5632),
    "qkv_bias": Field("query_key_value_bias", True),
}
QWEN2 = layers_part(qwen2_types, Rotary(), window_if_used(4096), write_window_if_used)
QWEN3_WIDTH = {"moe_intermediate_size": Field("expert_dim", 768)}
EPSILON = {"rms_norm_eps": Field("norm_epsilon", 1e-5)}
FAMILIES = (
    family(
        "mixtral",
        "Mixtral",
        (
            rotary_part(1_000_000.0),
            everywhere(None),
            experts_part("num_local_experts", "num_experts", 8),
        ),
        NORMS + ATTENTION + MIXTRAL,
        kv_heads=8,
        renamed=length(131_072) | EPSILON | WIDTH | chosen(2),
        fixed={"normalize_router": True},
    ),
    family(
        "olmoe",
        "Olmoe",
        (
            ROTARY,
            Part(read_head_dim, lambda config: {}),
            experts_part("num_experts", "num_local_experts", 64),
        ),
        NORMS + ATTENTION + EXPERTS,
        renamed=length(4096) | EPSILON | ATTENTION_BIAS | NORMALIZES | WIDTH | chosen(8),
        fixed={"query_key_norm": "all"},
        demanded={"hidden_act": "silu", "clip_qkv": None},
    ),
    family(
        "qwen2_moe",
        "Qwen2Moe",
        (QWEN2, qwen_part(60)),
        NORMS + MAPS + EXPERTS + SHARED,
        kv_heads=16,
        renamed=length(32_768) | NORMALIZES | QWEN2_OWN | chosen(4),
        fixed={"shared_expert_gate": True},
    ),
    family(
        "qwen3_moe",
        "Qwen3Moe",
        (ROTARY, Part(read_qwen3, write_qwen3), qwen_part(128)),
        NORMS + MAPS + EXPERTS,
        kv_heads=4,
        renamed=length(32_768) | ATTENTION_BIAS | NORMALIZES | QWEN3_WIDTH | chosen(8),
        fixed={"query_key_norm": "head"},
    ),
)
