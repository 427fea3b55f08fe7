"""ModernBERT (Warner et al. 2024): rotary positions, and two-sided windows in most layers."""

from jaxformer.hub.families.bert import BARE, MASKED
from jaxformer.hub.family import USUAL, Family, Field, Part
from jaxformer.hub.layers import layers_part
from jaxformer.hub.options import Options
from jaxformer.hub.rotary import GLOBAL, LOCAL, RotaryByType
from jaxformer.hub.table import table
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


def types(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the types of the layers: by default every third one is global."""
    period = options.whole("global_attn_every_n_layers", 3, least=1)
    return [LOCAL if layer % period else GLOBAL for layer in range(num_layers)]


def read_window(options: Options) -> int:
    """Reads the window. Their option counts both sides together, our field one side."""
    return options.whole("local_attention", 128) // 2


def write_window(window: int | None) -> dict:
    """Returns the option that `read_window` reads."""
    return {"local_attention": 128 if window is None else 2 * window}


def read_head(options: Options) -> dict:
    """Checks that the head's activation is that of the layers. Both have the same default."""
    own = options.choice("classifier_activation", GATES, "gelu")
    if own != options.choice("hidden_activation", GATES, "gelu"):
        raise options.error("classifier_activation", "it must be hidden_activation")
    return {}


def write_head(config: EncoderConfig) -> dict:
    """Returns the option that `read_head` checks."""
    return {"classifier_activation": GATE.write(config)}


GATE = Field("activation", "gelu", GATES)
BASES = {GLOBAL: 160_000.0, LOCAL: 10_000.0}
BASE_OPTIONS = {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}
ROTARY = RotaryByType(BASES, BASE_OPTIONS, scaled=(GLOBAL, LOCAL))
LAYERS = layers_part(types, ROTARY, read_window, write_window)
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
    base="model.",
)
FAMILIES = (MODERNBERT,)
