"""LFM2 (Liquid AI 2025, arXiv:2511.23404): gated short convolutions and attention."""

from jaxformer.hub.families.llama import FIXED, kv_heads_part
from jaxformer.hub.family import USUAL, Family, Field, Part
from jaxformer.hub.layers import read_layer_types, write_layer_types
from jaxformer.hub.options import Options
from jaxformer.hub.rotary import GLOBAL, rotary_part
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig

CONVOLUTION = "conv"
TYPES = {GLOBAL: "attention", CONVOLUTION: "short_convolution"}
ROWS = table("""
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


def read_layers(options: Options) -> dict:
    """Reads the type of each layer. Older files list the layers that have attention instead."""
    num_layers = options.whole("num_hidden_layers", least=1)
    if options.take("layer_types", None) is not None:
        options.ignore("full_attn_idxs", because="layer_types replaces it")
    numbers = options.take("full_attn_idxs", list(range(num_layers)))
    if not isinstance(numbers, list) or not all(type(x) is int for x in numbers):
        raise options.error("full_attn_idxs", "it must be a list of numbers of layers")
    usual = [GLOBAL if layer in numbers else CONVOLUTION for layer in range(num_layers)]
    return read_layer_types(options, usual, TYPES)


def write_layers(config: DecoderConfig) -> dict:
    """Returns the options that `read_layers` reads."""
    return write_layer_types(config, TYPES)


def read_width(options: Options) -> dict:
    """Reads the width of the feed-forward layers, which the class derives from a larger number."""
    stated = options.whole("intermediate_size", 12_288, least=1)
    width = options.whole("block_ff_dim", stated, least=1)  # the older name
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
    """Returns the options that `read_width` reads."""
    return {"intermediate_size": config.mlp_dim, "block_auto_adjust_ff_dim": False}


def read_tied(options: Options) -> dict:
    """Reads whether the head is tied; `tie_embedding`, the older name, overrides the other."""
    stated = options.flag("tie_word_embeddings", True)
    return {"tie_embeddings": options.flag("tie_embedding", stated)}


FAMILIES = (
    Family(
        "lfm2",
        DecoderConfig,
        {"Lfm2ForCausalLM": {}},
        {
            **{theirs: field for theirs, field in USUAL.items() if theirs != "intermediate_size"},
            "head_dim": Field("head_dim", None),
            "max_position_embeddings": Field("max_length", 128_000),
            "norm_eps": Field("norm_epsilon", 1e-5),
            "conv_L_cache": Field("convolution_kernel_size", 3),
            "conv_bias": Field("convolution_bias", False),
        },
        lambda config: ROWS,
        FIXED | {"query_key_norm": "head"},
        parts=(
            kv_heads_part(8),
            rotary_part(1_000_000.0),
            Part(read_layers, write_layers),
            Part(read_width, write_width),
            Part(read_tied, lambda config: {"tie_word_embeddings": config.tie_embeddings}),
        ),
        base="model.",
    ),
)
