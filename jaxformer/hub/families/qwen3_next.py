"""Qwen3-Next (Qwen team 2025): gated delta rule, gated attention and mixtures of experts."""

from jaxformer.hub.families.experts import EXPERTS, SHARED, chosen, qwen_part
from jaxformer.hub.families.llama import ATTENTION_BIAS, DENSE, NORMS, family, length
from jaxformer.hub.family import Field, Part
from jaxformer.hub.layers import read_layer_types, write_layer_types
from jaxformer.hub.options import Options
from jaxformer.hub.rotary import GLOBAL, rotary_part
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig

TYPES = {GLOBAL: "attention", "linear_attention": "gated_delta"}
ATTENTION = table("""
    blocks/attention/query+gate   model.layers.*.self_attn.q_proj      fused-by-head
    blocks/attention/key          model.layers.*.self_attn.k_proj
    blocks/attention/value        model.layers.*.self_attn.v_proj
    blocks/attention/query_norm   model.layers.*.self_attn.q_norm
    blocks/attention/key_norm     model.layers.*.self_attn.k_norm
""")
DELTA = table(
    """
    blocks/gated_delta_norm                  model.layers.*.input_layernorm
    blocks/gated_delta/query+key+value+gate  LINEAR.in_proj_qkvz   fused-by-delta-key-head
    blocks/gated_delta/rate+decay            LINEAR.in_proj_ba     fused-by-delta-key-head
    blocks/gated_delta/decay/bias            LINEAR.dt_bias
    blocks/gated_delta/decay/log_scale       LINEAR.A_log
    blocks/gated_delta/convolution/filter    LINEAR.conv1d.weight  filter
    blocks/gated_delta/norm                  LINEAR.norm
    blocks/gated_delta/output                LINEAR.out_proj
""",
    LINEAR="model.layers.*.linear_attn",
)
# Their options for the sizes of the delta rule: our fields, and the defaults of the class.
SIZES = {
    "linear_num_key_heads": ("delta_key_heads", 16),
    "linear_num_value_heads": ("delta_value_heads", 32),
    "linear_key_head_dim": ("delta_key_dim", 128),
    "linear_value_head_dim": ("delta_value_dim", 128),
}


def read_layers(options: Options) -> dict:
    """Reads the type of each layer. Without `layer_types`, every nth layer has attention."""
    num_layers = options.whole("num_hidden_layers", least=1)
    if options.take("layer_types", None) is not None:
        options.ignore("full_attention_interval", because="layer_types replaces it")
    interval = options.whole("full_attention_interval", 4, least=1)
    usual = ["linear_attention" if (x + 1) % interval else GLOBAL for x in range(num_layers)]
    return read_layer_types(options, usual, TYPES)


def write_layers(config: DecoderConfig) -> dict:
    """Returns the options that `read_layers` reads."""
    return write_layer_types(config, TYPES)


def read_sizes(options: Options) -> dict:
    """Reads the sizes of the delta rule."""
    return {ours: options.whole(x, default, 1) for x, (ours, default) in SIZES.items()}


def write_sizes(config: DecoderConfig) -> dict:
    """Returns the options that `read_sizes` reads."""
    return {theirs: getattr(config.delta_sizes, ours) for theirs, (ours, _) in SIZES.items()}


FAMILIES = (
    family(
        "qwen3_next",
        "Qwen3Next",
        (
            rotary_part(10_000.0, 0.25),
            Part(read_layers, write_layers),
            Part(read_sizes, write_sizes),
            qwen_part(512),
        ),
        NORMS + ATTENTION + DELTA + DENSE + EXPERTS + SHARED,
        kv_heads=2,
        renamed={
            **length(32_768),
            **ATTENTION_BIAS,
            **chosen(10),
            "head_dim": Field("head_dim", 256),
            "linear_conv_kernel_dim": Field("convolution_kernel_size", 4),
            "moe_intermediate_size": Field("expert_dim", 512),
            "shared_expert_intermediate_size": Field("shared_expert_dim", 512),
            "norm_topk_prob": Field("normalize_router", True),
        },
        fixed={
            "norm": "rms_one_plus",
            "query_key_norm": "head",
            "attention_gate": True,
            "shared_expert_gate": True,
        },
        # Layers that predict further tokens, which the class in transformers does not have.
        ignored=(r"mtp\..*",),
    ),
)
