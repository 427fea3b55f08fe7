"""LFM2 and Qwen3-Next, in which other sub-layers replace attention in some layers.

LFM2 (Liquid AI 2025, arXiv:2511.23404) uses gated short convolutions. Qwen3-Next (Qwen team 2025)
uses the gated delta rule, gated attention and mixtures of experts.
"""

from collections.abc import Callable

from jaxformer.hub.checkpoint_format import USUAL, CheckpointFormat, Field, Part
from jaxformer.hub.families.experts import EXPERTS, SHARED, chosen, qwen_part, widths
from jaxformer.hub.families.llama import (
    ATTENTION_BIAS,
    DENSE,
    FIXED,
    NORMS,
    head_dim,
    kv_heads,
    length,
    llama_like,
)
from jaxformer.hub.options import Options, pattern, per_layer
from jaxformer.hub.positions import GLOBAL, Rotary
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig


def layer_types_part(usual: Callable[[Options, int], list[str]], names: dict[str, str]) -> Part:
    """Returns the `Part` for the option `layer_types`.

    Args:
        usual: Function of the options and the number of layers, which returns the type of each
            layer for a file without `layer_types`.
        names: {layer type in transformers: layer type in jaxformer}.
    """
    of_ours = {ours: theirs for theirs, ours in names.items()}

    def read(options: Options) -> dict:
        num_layers = options.whole("num_hidden_layers", least=1)
        types = options.take_list("layer_types", num_layers, str, usual(options, num_layers))
        if not set(types) <= names.keys():
            raise options.error("layer_types", f"its entries must be {' or '.join(names)}")
        return {"layer_types": pattern([names[x] for x in types])}

    def write(config: DecoderConfig) -> dict:
        types = per_layer(config.layer_types, config.num_layers)
        # A layer type that the class in transformers lacks is written with jaxformer's name.
        return {"layer_types": [of_ours.get(x, x) for x in types]}

    return Part(read, write)


# ---- LFM2

CONVOLUTION = "conv"
LFM2 = table("""
    blocks/attention_norm                      model.layers.*.operator_norm
    blocks/attention/query                     model.layers.*.self_attn.q_proj
    blocks/attention/key                       model.layers.*.self_attn.k_proj
    blocks/attention/value                     model.layers.*.self_attn.v_proj
    blocks/attention/query_norm                model.layers.*.self_attn.q_layernorm
    blocks/attention/key_norm                  model.layers.*.self_attn.k_layernorm
    blocks/attention/output                    model.layers.*.self_attn.out_proj
    blocks/short_convolution_norm              model.layers.*.operator_norm
    blocks/short_convolution/input_gate+output_gate+value model.layers.*.conv.in_proj fused
    blocks/short_convolution/convolution/filter model.layers.*.conv.conv.weight filter
    blocks/short_convolution/convolution/bias  model.layers.*.conv.conv.bias
    blocks/short_convolution/output            model.layers.*.conv.out_proj
    blocks/feedforward_norm                    model.layers.*.ffn_norm
    blocks/feedforward/gate                    model.layers.*.feed_forward.w1
    blocks/feedforward/up                      model.layers.*.feed_forward.w3
    blocks/feedforward/down                    model.layers.*.feed_forward.w2
    embedding/tokens                           model.embed_tokens.weight
    final_norm                                 model.embedding_norm
    head/kernel                                lm_head.weight
""")


def lfm2_types(options: Options, num_layers: int) -> list[str]:
    """Returns the layer types of LFM2; older files list the indices of attention layers."""
    if "layer_types" in options:
        options.ignore("full_attn_idxs", because="layer_types replaces it")
    numbers = options.take("full_attn_idxs", list(range(num_layers)))
    if not isinstance(numbers, list) or not all(type(x) is int for x in numbers):
        raise options.error("full_attn_idxs", "it must be a list of layer indices")
    return [GLOBAL if layer in numbers else CONVOLUTION for layer in range(num_layers)]


def read_width(options: Options) -> dict:
    """Reads the width of the feed-forward layers, which LFM2 computes from several options."""
    stated = options.whole("intermediate_size", 12_288, least=1)
    # In older files, the name of the option is block_ff_dim.
    width = options.whole("block_ff_dim", stated, least=1)
    if not options.flag("block_auto_adjust_ff_dim", True):
        because = "block_auto_adjust_ff_dim is false"
        options.ignore("block_ffn_dim_multiplier", "block_multiple_of", because=because)
        return {"mlp_dim": width}
    width = int(2 * width / 3)
    multiple = options.whole("block_multiple_of", 256, least=1)
    if not options.is_null("block_ffn_dim_multiplier"):
        width = int(options.number("block_ffn_dim_multiplier", 1.0) * width)
        width = multiple * -(-width // multiple)
    return {"mlp_dim": width}


def write_width(config: DecoderConfig) -> dict:
    """Converts a config to the options that `read_width` reads."""
    return {"intermediate_size": config.mlp_dim, "block_auto_adjust_ff_dim": False}


def read_tied(options: Options) -> dict:
    """Reads whether the head is tied; the older option `tie_embedding` takes precedence."""
    stated = options.flag("tie_word_embeddings", True)
    return {"tie_embeddings": options.flag("tie_embedding", stated)}


# ---- Qwen3-Next

QWEN3_NEXT = table(
    """
    blocks/attention/query+gate   model.layers.*.self_attn.q_proj      fused-by-head
    blocks/attention/key          model.layers.*.self_attn.k_proj
    blocks/attention/value        model.layers.*.self_attn.v_proj
    blocks/attention/query_norm   model.layers.*.self_attn.q_norm
    blocks/attention/key_norm     model.layers.*.self_attn.k_norm
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
# {option for the heads of the delta rule: (config field, default of the class in transformers)}.
DELTA_SIZES = {
    "linear_num_key_heads": ("delta_key_heads", 16),
    "linear_num_value_heads": ("delta_value_heads", 32),
    "linear_key_head_dim": ("delta_key_dim", 128),
    "linear_value_head_dim": ("delta_value_dim", 128),
}


def qwen3_next_types(options: Options, num_layers: int) -> list[str]:
    """Returns the layer types of Qwen3-Next, in which every nth layer has attention."""
    if "layer_types" in options:
        options.ignore("full_attention_interval", because="layer_types replaces it")
    interval = options.whole("full_attention_interval", 4, least=1)
    return ["linear_attention" if (x + 1) % interval else GLOBAL for x in range(num_layers)]


def read_sizes(options: Options) -> dict:
    """Reads the sizes of the delta rule."""
    return {ours: options.whole(x, default, 1) for x, (ours, default) in DELTA_SIZES.items()}


def write_sizes(config: DecoderConfig) -> dict:
    """Converts a config to the options that `read_sizes` reads."""
    return {theirs: getattr(config.delta_sizes, ours) for theirs, (ours, _) in DELTA_SIZES.items()}


FAMILIES = (
    CheckpointFormat(
        "lfm2",
        DecoderConfig,
        {"Lfm2ForCausalLM": {}},
        {
            **{theirs: field for theirs, field in USUAL.items() if theirs != "intermediate_size"},
            **(kv_heads(8) | head_dim(None) | length(128_000)),
            "norm_eps": Field("norm_epsilon", 1e-5),
            "conv_L_cache": Field("convolution_kernel_size", 3),
            "conv_bias": Field("convolution_bias", False),
        },
        lambda config: LFM2,
        FIXED | {"query_key_norm": "head"},
        parts=(
            Rotary(1_000_000.0).part,
            layer_types_part(lfm2_types, {GLOBAL: "attention", CONVOLUTION: "short_convolution"}),
            Part(read_width, write_width),
            Part(read_tied, lambda config: {"tie_word_embeddings": config.tie_embeddings}),
        ),
        base="model.",
        not_implemented=(),
    ),
    llama_like(
        "qwen3_next",
        "Qwen3Next",
        (
            Rotary(fraction=0.25).part,
            layer_types_part(
                qwen3_next_types, {GLOBAL: "attention", "linear_attention": "gated_delta"}
            ),
            Part(read_sizes, write_sizes),
            qwen_part(512),
        ),
        NORMS + QWEN3_NEXT + DENSE + EXPERTS + SHARED,
        renamed={
            **(kv_heads(2) | length(32_768) | head_dim(256) | widths(512, 512) | chosen(10)),
            **ATTENTION_BIAS,
            "linear_conv_kernel_dim": Field("convolution_kernel_size", 4),
            "norm_topk_prob": Field("normalize_router", True),
        },
        fixed={
            "norm": "rms_one_plus",
            "query_key_norm": "head",
            "attention_gate": True,
            "shared_expert_gate": True,
        },
        # Layers for multi-token prediction, which the class in transformers lacks.
        ignored=(r"mtp\..*",),
    ),
)
