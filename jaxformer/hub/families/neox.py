"""GPT-NeoX (Black et al. 2022) and Pythia: attention and feed-forward layer in parallel, each with
a norm of its own; rotary positions on a part of each head."""

from jaxformer.artifacts.table import table
from jaxformer.hub.families.gpt2 import ACTIVATIONS
from jaxformer.hub.family import USUAL, Family, Field
from jaxformer.hub.layers import rotary_part
from jaxformer.models.config import DecoderConfig

ROWS = table("""
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


NEOX = Family(
    "gpt_neox",
    DecoderConfig,
    {"GPTNeoXForCausalLM": {}},
    {
        **USUAL,
        "max_position_embeddings": Field("max_length", 2048),
        "layer_norm_eps": Field("norm_epsilon", 1e-5),
        "tie_word_embeddings": Field("tie_embeddings", False),
        "hidden_act": Field("activation", "gelu", ACTIVATIONS),
        "use_parallel_residual": Field("parallel", True, {True: "two_norms", False: "no"}),
        "attention_bias": Field("query_key_value_bias+attention_output_bias", True),
    },
    lambda config: ROWS,
    fixed={"positions": "rotary"},
    demanded={"is_decoder": False},
    parts=(rotary_part(10_000.0, 0.25),),
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    base="gpt_neox.",
)
FAMILIES = (NEOX,)
