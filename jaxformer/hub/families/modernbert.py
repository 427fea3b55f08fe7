"""ModernBERT (Warner et al. 2024): rotary positions, a window on either side in most layers."""

from jaxformer.artifacts.options import Options
from jaxformer.artifacts.table import table
from jaxformer.hub.families.bert import BARE, MASKED
from jaxformer.hub.family import USUAL, Family, Field, Part
from jaxformer.hub.layers import GLOBAL, LOCAL, layers_part
from jaxformer.models.config import EncoderConfig

GATES = {"gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "silu": "swiglu"}
ROWS = table("""
    embedding/tokens            model.embeddings.tok_embeddings.weight
    embedding_norm              model.embeddings.norm
    blocks/attention_norm       model.layers.*.attn_norm      after-first
    blocks/attention/query+key+value model.layers.*.attn.Wqkv fused
    blocks/attention/output     model.layers.*.attn.Wo
    blocks/feedforward_norm     model.layers.*.mlp_norm
    blocks/feedforward/gate+up  model.layers.*.mlp.Wi         fused
    blocks/feedforward/down     model.layers.*.mlp.Wo
    final_norm                  model.final_norm
    transform                   head.dense
    transform_norm              head.norm
    head/bias                   decoder.bias
""")


def type_of(options: Options, layer: int) -> str:
    return LOCAL if layer % options.whole("global_attn_every_n_layers", 3, least=1) else GLOBAL


def read_head(options: Options) -> dict:
    options.require({"classifier_activation": options.take("hidden_activation", "gelu")})
    return {}


def write_head(config) -> dict:
    return {"classifier_activation": GATE.write(config)}


GATE = Field("activation", "gelu", GATES)
TURNS = {GLOBAL: 160_000.0, LOCAL: 10_000.0}
LAYERS = layers_part(type_of, TURNS, window="local_attention", default_window=128, times=2)
MODERNBERT = Family(
    "modernbert",
    EncoderConfig,
    {"ModernBertForMaskedLM": MASKED, "ModernBertModel": BARE | {"pooler": False}},
    {
        **USUAL,
        "max_position_embeddings": Field("max_length", 8192),
        "norm_eps": Field("norm_epsilon", 1e-5),
        "norm_bias": Field("norm_bias", False),
        "hidden_activation": GATE,
        "attention_bias": Field("query_key_value_bias+attention_output_bias", False),
        "mlp_bias": Field("feedforward_bias", False),
    },
    lambda config: ROWS,
    fixed={
        "positions": "rotary",
        "embedding_norm": True,
        "first_attention_norm": False,
        "tie_embeddings": True,
        "use_bias": False,
    },
    demanded={"tie_word_embeddings": True, "classifier_bias": False, "decoder_bias": True},
    parts=(LAYERS, Part(read_head, write_head)),
    repeated={"layer_norm_eps": "norm_eps"},
    base="model.",
)
FAMILIES = (MODERNBERT,)
