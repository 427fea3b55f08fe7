"""StarCoder 2 (Lozhkov et al. 2024): rotary positions and windows, with GPT-2's other layers."""

from jaxformer.hub.families.gpt2 import ACTIVATIONS
from jaxformer.hub.families.llama import IGNORED, NORMS, everywhere, kv_heads_part, length
from jaxformer.hub.family import USUAL, Family, Field, Part
from jaxformer.hub.options import Options
from jaxformer.hub.rotary import rotary_part
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig

ROWS = table("""
    embedding/tokens              model.embed_tokens.weight
    blocks/attention/query        model.layers.*.self_attn.q_proj
    blocks/attention/key          model.layers.*.self_attn.k_proj
    blocks/attention/value        model.layers.*.self_attn.v_proj
    blocks/attention/output       model.layers.*.self_attn.o_proj
    blocks/feedforward/up         model.layers.*.mlp.c_fc
    blocks/feedforward/down       model.layers.*.mlp.c_proj
    final_norm                    model.norm
    head/kernel                   lm_head.weight
""")


def read_unused(options: Options) -> dict:
    """Accepts the options of published checkpoints that do not change the model."""
    options.ignore("mlp_type", "norm_type", "rms_norm_eps", because="the class does not read it")
    options.ignore("residual_dropout", because="dropout acts in training only")
    return {}


FAMILIES = (
    Family(
        "starcoder2",
        DecoderConfig,
        {"Starcoder2ForCausalLM": {}},
        {
            **USUAL,
            **length(4096),
            "head_dim": Field("head_dim", None),
            "norm_epsilon": Field("norm_epsilon", 1e-5),
            "tie_word_embeddings": Field("tie_embeddings", True),
            "hidden_act": Field("activation", "gelu_pytorch_tanh", ACTIVATIONS),
            "use_bias": Field("query_key_value_bias+attention_output_bias+feedforward_bias", True),
        },
        lambda config: NORMS + ROWS,
        fixed={"positions": "rotary"},
        parts=(
            rotary_part(10_000.0),
            kv_heads_part(2),
            everywhere(None),
            Part(read_unused, lambda config: {}),
        ),
        ignored=IGNORED,
        base="model.",
    ),
)
