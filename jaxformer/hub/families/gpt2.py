"""GPT-2 (Radford et al. 2019), GPT-NeoX (Black et al. 2022) and StarCoder 2 (Lozhkov et al. 2024).

In GPT-NeoX and Pythia, attention and the feed-forward layer are parallel and have separate norms;
rotary positions apply to a part of each head. StarCoder 2 is GPT-2 with rotary positions and
windows.
"""

from jaxformer.hub.checkpoint_format import USUAL, CheckpointFormat, Field, required, unused
from jaxformer.hub.families.llama import (
    ATTENTION,
    EVERYWHERE,
    IGNORED,
    NORMS,
    OTHERS,
    ROTARY,
    TIED,
    head_dim,
    kv_heads,
    length,
    window,
)
from jaxformer.hub.positions import Rotary
from jaxformer.hub.table import table
from jaxformer.models.config import DecoderConfig

ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
    "relu2": "squared_relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}

ROWS = table("""
    embedding/tokens            transformer.wte.weight
    embedding/positions         transformer.wpe.weight
    blocks/attention_norm       transformer.h.*.ln_1
    blocks/attention/query+key+value transformer.h.*.attn.c_attn fused-as-ours
    blocks/attention/output     transformer.h.*.attn.c_proj      as-ours
    blocks/feedforward_norm     transformer.h.*.ln_2
    blocks/feedforward/up       transformer.h.*.mlp.c_fc         as-ours
    blocks/feedforward/down     transformer.h.*.mlp.c_proj       as-ours
    final_norm                  transformer.ln_f
    head/kernel                 lm_head.weight
""")

GPT2 = CheckpointFormat(
    "gpt2",
    DecoderConfig,
    {"GPT2LMHeadModel": {}, "GPT2Model": {"tie_embeddings": True}},
    {
        "vocab_size": Field("vocab_size"),
        "n_positions": Field("max_length", 1024),
        **required(n_embd="embed_dim", n_layer="num_layers", n_head="num_heads"),
        "n_inner": Field("mlp_dim", None),
        "layer_norm_epsilon": Field("norm_epsilon", 1e-5),
        "tie_word_embeddings": Field("tie_embeddings", True),
        "activation_function": Field("activation", "gelu_new", ACTIVATIONS),
        "scale_attn_weights": Field("attention_scale", True, {True: None, False: 1.0}),
    },
    rows=lambda config: ROWS,
    demanded={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    base="transformer.",
    not_implemented=(),
)

NEOX_ROWS = table("""
    embedding/tokens            gpt_neox.embed_in.weight
    blocks/attention_norm       gpt_neox.layers.*.input_layernorm
    blocks/attention/query+key+value gpt_neox.layers.*.attention.query_key_value fused-by-head
    blocks/attention/output     gpt_neox.layers.*.attention.dense
    blocks/feedforward_norm     gpt_neox.layers.*.post_attention_layernorm
    blocks/feedforward/up       gpt_neox.layers.*.mlp.dense_h_to_4h
    blocks/feedforward/down     gpt_neox.layers.*.mlp.dense_4h_to_h
    final_norm                  gpt_neox.final_layer_norm
    head/kernel                 embed_out.weight
""")


NEOX = CheckpointFormat(
    "gpt_neox",
    DecoderConfig,
    {"GPTNeoXForCausalLM": {}},
    {
        **USUAL,
        "max_position_embeddings": Field("max_length", 2048),
        "layer_norm_eps": Field("norm_epsilon", 1e-5),
        "tie_word_embeddings": Field("tie_embeddings", False),
        "hidden_act": Field("activation", "gelu", ACTIVATIONS),
        "use_parallel_residual": Field(
            "parallel_block", True, {True: "separate_norms", False: "none"}
        ),
        "attention_bias": Field("query_key_value_bias+attention_output_bias", True),
    },
    lambda config: NEOX_ROWS,
    fixed={"positions": "rotary"},
    demanded={"is_decoder": False},
    parts=(Rotary(10_000.0, 0.25, "rotary_emb_base", "rotary_pct").part,),
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    base="gpt_neox.",
    not_implemented=(),
)

STARCODER2_ROWS = table("""
    blocks/feedforward/up         model.layers.*.mlp.c_fc
    blocks/feedforward/down       model.layers.*.mlp.c_proj
""")
STARCODER2 = CheckpointFormat(
    "starcoder2",
    DecoderConfig,
    {"Starcoder2ForCausalLM": {}},
    {
        **USUAL,
        **(kv_heads(2) | head_dim(None) | length(4096) | window(None) | TIED),
        "norm_epsilon": Field("norm_epsilon", 1e-5),
        "hidden_act": Field("activation", "gelu_pytorch_tanh", ACTIVATIONS),
        "use_bias": Field("query_key_value_bias+attention_output_bias+feedforward_bias", True),
    },
    lambda config: NORMS + ATTENTION + STARCODER2_ROWS + OTHERS,
    fixed={"positions": "rotary"},
    parts=(
        *(ROTARY, EVERYWHERE),
        unused(
            "mlp_type",
            "norm_type",
            "rms_norm_eps",
            because="transformers does not read this option",
        ),
        unused("residual_dropout", because="dropout is used only in training"),
    ),
    ignored=IGNORED,
    base="model.",
    not_implemented=(),
)
FAMILIES = (GPT2, NEOX, STARCODER2)
