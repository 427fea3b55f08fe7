"""GPT-2 (Radford et al. 2019)."""

from jaxformer.artifacts.table import table
from jaxformer.hub.family import Family, Field, required
from jaxformer.models.config import DecoderConfig

ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
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

GPT2 = Family(
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
    repeated={"n_ctx": "n_positions"},
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    base="transformer.",
)
FAMILIES = (GPT2,)
