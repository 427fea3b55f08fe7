"""ModernBERT (Warner et al. 2024): rotary positions, a window on either side in most layers."""

from jaxformer.hub.families.bert import BARE, MASKED
from jaxformer.hub.families.llama import layer_kinds
from jaxformer.hub.family import Family, Field, Part
from jaxformer.hub.options import Options, spread
from jaxformer.hub.rotary import GLOBAL, LOCAL, patterns, read_rotary_by_kind, write_rotary
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


def read(options: Options) -> dict:
    num_layers = options.whole("num_hidden_layers")
    every = options.whole("global_attn_every_n_layers", 3, least=1)
    by_period = [LOCAL if n % every else GLOBAL for n in range(num_layers)]
    kinds = layer_kinds(options) or by_period
    window = options.whole("local_attention", 128) // 2
    activation = options.take("hidden_activation", "gelu")
    options.require({"classifier_activation": activation})
    bases = {
        GLOBAL: options.number("global_rope_theta", 160_000.0),
        LOCAL: options.number("local_rope_theta", 10_000.0),
    }
    turns = read_rotary_by_kind(options, bases)
    settings = [(window if kind == LOCAL else None, *turns[kind]) for kind in kinds]
    return patterns(settings)


def write(config) -> dict:
    num_layers = config.num_layers
    windows, bases, scalings = (
        spread(getattr(config, name), num_layers)
        for name in ("window", "rotary_base", "rotary_scaling")
    )
    kinds = [GLOBAL if window is None else LOCAL for window in windows]
    turns = {
        kind: write_rotary(base, scaling)
        for kind, base, scaling in zip(kinds, bases, scalings, strict=True)
    }
    lengths = [window for window in windows if window is not None]
    names = {ours: theirs for theirs, ours in GATES.items()}
    return {
        "layer_types": kinds,
        "local_attention": 2 * lengths[0] if lengths else 128,
        "rope_parameters": {LOCAL: write_rotary(10_000.0, None), **turns},
        "classifier_activation": names.get(config.activation),
    }


MODERNBERT = Family(
    "modernbert",
    EncoderConfig,
    {"ModernBertForMaskedLM": MASKED, "ModernBertModel": BARE | {"pooler": False}},
    {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("embed_dim"),
        "intermediate_size": Field("mlp_dim"),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_heads"),
        "max_position_embeddings": Field("max_length", 8192),
        "norm_eps": Field("norm_epsilon", 1e-5),
        "norm_bias": Field("norm_bias", False),
        "hidden_activation": Field("activation", "gelu", GATES),
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
    demanded={
        "tie_word_embeddings": True,
        "classifier_bias": False,
        "decoder_bias": True,
        "position_embedding_type": "absolute",
    },
    parts=(Part(read, write),),
    ignored=(r"decoder\.weight",),
    base="model.",
)
FAMILIES = (MODERNBERT,)
