"""Mixtures of experts with Llama's other layers: Mixtral, OLMoE and Qwen 3 MoE."""

from jaxformer.hub.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    NORMS,
    ROTARY,
    everywhere,
    family,
    length,
    window_if_used,
)
from jaxformer.hub.family import Field, Part
from jaxformer.hub.options import Options
from jaxformer.hub.rotary import rotary_part
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig

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
        if not config.num_experts:
            raise ValueError(
                f"num_experts is 0, there {default}; mlp_dim is {config.mlp_dim}, there unused"
            )
        return {option: config.num_experts}

    return Part(read, write)


def read_qwen3(options: Options) -> dict:
    """Reads the window, which all layers have, and checks that all layers have experts."""
    options.require({"decoder_sparse_step": 1, "mlp_only_layers": []})
    return {"window": window_if_used(4096)(options)}


def write_qwen3(config: DecoderConfig) -> dict:
    """Returns the options that `read_qwen3` reads."""
    return {"use_sliding_window": config.window is not None, "sliding_window": config.window}


def chosen(default: int) -> dict[str, Field]:
    """Returns the option for the number of experts of a token, with its default."""
    return {"num_experts_per_tok": Field("experts_per_token", default)}


WIDTH = {"intermediate_size": Field("expert_dim")}
NORMALIZES = {"norm_topk_prob": Field("normalize_router", False)}
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
        (ROTARY, experts_part("num_experts", "num_local_experts", 64)),
        NORMS + ATTENTION + EXPERTS,
        renamed=length(4096) | EPSILON | ATTENTION_BIAS | NORMALIZES | WIDTH | chosen(8),
        fixed={"query_key_norm": "all"},
        demanded={"hidden_act": "silu", "clip_qkv": None},
    ),
    family(
        "qwen3_moe",
        "Qwen3Moe",
        (
            ROTARY,
            Part(read_qwen3, write_qwen3),
            experts_part("num_experts", "num_local_experts", 128),
        ),
        NORMS + ATTENTION + EXPERTS,
        kv_heads=4,
        renamed=length(32_768) | ATTENTION_BIAS | NORMALIZES | QWEN3_WIDTH | chosen(8),
        fixed={"query_key_norm": "head"},
    ),
)
