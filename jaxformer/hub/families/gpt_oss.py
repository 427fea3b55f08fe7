"""gpt-oss (OpenAI 2025, arXiv:2508.10925): experts, sinks, and windows in every other layer."""

from jaxformer.hub.families.experts import WIDTH, chosen, experts_part
from jaxformer.hub.families.llama import ATTENTION, NORMS, family, length
from jaxformer.hub.family import Field, Part
from jaxformer.hub.layers import layers_part
from jaxformer.hub.options import Options
from jaxformer.hub.rotary import GLOBAL, LOCAL, Rotary
from jaxformer.hub.table import table

ROWS = table("""
    blocks/attention/sink           model.layers.*.self_attn.sinks
    blocks/feedforward/router       model.layers.*.mlp.router
    blocks/feedforward/gate+up/kernel EXPERTS.gate_up_proj      interleaved-as-ours
    blocks/feedforward/gate+up/bias EXPERTS.gate_up_proj_bias   interleaved-as-ours
    blocks/feedforward/down/kernel  EXPERTS.down_proj           as-ours
    blocks/feedforward/down/bias    EXPERTS.down_proj_bias
""", EXPERTS="model.layers.*.mlp.experts")  # fmt: skip
WINDOW, METHOD = 128, "mxfp4"
SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def types_of(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the types of the layers: local and global in turn."""
    return [GLOBAL if layer % 2 else LOCAL for layer in range(num_layers)]


def read_window(options: Options) -> int:
    """Reads the window, which the class also demands if no layer uses it."""
    if options.is_null("sliding_window"):
        raise options.error("sliding_window", "it must be a whole number")
    return options.whole("sliding_window", WINDOW, least=1)


def write_window(window: int | None) -> dict:
    """Returns the option that `read_window` reads."""
    return {"sliding_window": window or WINDOW}


def read_quantization(options: Options) -> dict:
    """Checks that the weights are quantized as MXFP4, if at all; see `hub.mxfp4`."""
    given = options.mapping("quantization_config")
    if given and given.get("quant_method") != METHOD:
        raise options.error("quantization_config", f"its quant_method must be {METHOD!r}")
    # The names of the tensors say which of them are quantized.
    known = ("quant_method", "modules_to_not_convert", "dequantize")
    options.unread += [f"quantization_config.{x}" for x in given if x not in known]
    options.ignore("hidden_act", because="the class computes its own activation")
    return {}


FAMILIES = (
    family(
        "gpt_oss",
        "GptOss",
        (
            layers_part(
                types_of,
                Rotary(150_000.0, usual=SCALING),
                read_window,
                write_window,
            ),
            experts_part("num_local_experts", "num_experts", 128),
            Part(read_quantization, lambda config: {}),
        ),
        NORMS + ATTENTION + ROWS,
        kv_heads=8,
        renamed={
            **length(131_072),
            **WIDTH,
            **chosen(4),
            "head_dim": Field("head_dim", 64),
            "rms_norm_eps": Field("norm_epsilon", 1e-5),
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
