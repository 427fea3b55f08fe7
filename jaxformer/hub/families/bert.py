"""BERT (Devlin et al. 2019), RoBERTa, XLM-R, DistilBERT and ModernBERT.

ModernBERT (Warner et al. 2024) has rotary positions, and two-sided windows in most layers. BERT,
RoBERTa, XLM-R and DistilBERT are post-norm.
"""

from dataclasses import replace

from jaxformer.hub.checkpoint_format import USUAL, CheckpointFormat, Field, Part, required
from jaxformer.hub.families.gpt2 import ACTIVATIONS
from jaxformer.hub.options import Options
from jaxformer.hub.positions import GLOBAL, LOCAL, RotaryByType, Window, layers_part
from jaxformer.hub.table import Row, table
from jaxformer.models.config import EncoderConfig

FIXED = {"norm_position": "post", "embedding_norm": True, "tie_embeddings": True}
# Files from before 2019 use these names for the parameters of a norm.
OLDER = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
MASKED = {"transform": True, "head_bias": True, "pooler": False, "num_labels": 0}
BARE = {"transform": False, "head_bias": False, "pooler": True, "num_labels": 0}


EMBEDDINGS = """
    embedding/tokens            BASE.embeddings.word_embeddings.weight
    embedding/positions         BASE.embeddings.position_embeddings.weight
    embedding/token_types       BASE.embeddings.token_type_embeddings.weight
    embedding_norm              BASE.embeddings.LayerNorm
"""
LAYERS = """
    blocks/attention/query      BASE.encoder.layer.*.attention.self.query
    blocks/attention/key        BASE.encoder.layer.*.attention.self.key
    blocks/attention/value      BASE.encoder.layer.*.attention.self.value
    blocks/attention/output     BASE.encoder.layer.*.attention.output.dense
    blocks/attention_norm       BASE.encoder.layer.*.attention.output.LayerNorm
    blocks/feedforward/up       BASE.encoder.layer.*.intermediate.dense
    blocks/feedforward/down     BASE.encoder.layer.*.output.dense
    blocks/feedforward_norm     BASE.encoder.layer.*.output.LayerNorm
"""
LABELLED = {"transform": False, "head_bias": False, "pooler": True}
SIZES = {
    **USUAL,
    "type_vocab_size": Field("num_token_types", 2),
    "layer_norm_eps": Field("norm_epsilon", 1e-12),
    "hidden_act": Field("activation", "gelu", ACTIVATIONS),
}
DEMANDED = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}


def named_class(options: Options) -> str:
    """Returns the class name in the file, or "" if the file has no class name."""
    named = options.options.get("architectures") or ""
    return str(named[0] if isinstance(named, list) else named)


def read_labels(options: Options) -> dict:
    """Reads the number of token types and, for a classifier, the number of labels."""
    types = options.whole("type_vocab_size", 2, least=1)
    named = options.options.get("id2label")
    labels = len(named) if isinstance(named, dict) else options.whole("num_labels", 2)
    is_classifier = named_class(options).endswith("ForSequenceClassification")
    return {"num_token_types": types} | ({"num_labels": labels} if is_classifier else {})


def write_labels(config: EncoderConfig) -> dict:
    """Returns generic label names for a classifier, such as LABEL_0."""
    if not config.num_labels or config.transform:
        return {}
    names = {str(n): f"LABEL_{n}" for n in range(config.num_labels)}
    return {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}


LABELS = Part(read_labels, write_labels)

# ---- BERT

BERT_HEADS = """
    pooler                      bert.pooler.dense
    transform                   cls.predictions.transform.dense
    transform_norm              cls.predictions.transform.LayerNorm
    head/bias                   cls.predictions.bias
    classifier                  LABELS
"""


def bert_rows(config: EncoderConfig) -> tuple[Row, ...]:
    """Returns the table of BERT; the classifier's name depends on the class."""
    labels = "cls.seq_relationship" if config.transform else "classifier"
    return table(EMBEDDINGS + LAYERS + BERT_HEADS, BASE="bert", LABELS=labels)


BERT = CheckpointFormat(
    "bert",
    EncoderConfig,
    {
        "BertForMaskedLM": MASKED,
        "BertForPreTraining": MASKED | {"pooler": True, "num_labels": 2},
        "BertModel": BARE,
        "BertForSequenceClassification": LABELLED,
    },
    SIZES | {"max_position_embeddings": Field("max_length", 512)},
    bert_rows,
    fixed=FIXED,
    demanded=DEMANDED,
    parts=(LABELS,),
    ignored=(
        r"(bert\.)?(embeddings\.position_ids|pooler\.dense\.\w+)",
        r"cls\.seq_relationship\.\w+",
    ),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    base="bert.",
    older=OLDER,
    not_implemented=("embedding_size",),
)

# ---- RoBERTa and XLM-R, whose positions start at 2

ROBERTA_HEADS = """
    pooler                      POOLER
    transform                   lm_head.dense
    transform_norm              lm_head.layer_norm
    head/bias                   lm_head.bias
    classifier                  classifier.out_proj
"""


def roberta_rows(config: EncoderConfig) -> tuple[Row, ...]:
    """Returns the table of RoBERTa; the pooler's name depends on the class."""
    pooler = "classifier.dense" if config.num_labels else "roberta.pooler.dense"
    return table(EMBEDDINGS + LAYERS + ROBERTA_HEADS, BASE="roberta", POOLER=pooler)


def read_roberta(options: Options) -> dict:
    """Reads the number of positions; the first position is `pad_token_id + 1`."""
    offset = options.whole("pad_token_id", 1) + 1
    length = options.whole("max_position_embeddings", 512) - offset
    if length < 1:
        raise options.error("max_position_embeddings", f"it must be above {offset}")
    return {"max_length": length, "position_offset": offset}


def write_roberta(config: EncoderConfig) -> dict:
    """Converts a config to the options that `read_roberta` reads."""
    rows = config.max_length + config.position_offset
    return {"pad_token_id": config.position_offset - 1, "max_position_embeddings": rows}


def read_roberta_head(options: Options) -> dict:
    """Checks that the blocks apply GELU, which the masked-token head always applies."""
    activation = options.choice("hidden_act", ACTIVATIONS, "gelu")
    is_masked = (named_class(options) or "ForMaskedLM").endswith("ForMaskedLM")
    if is_masked and activation != "gelu":
        raise options.error(
            "hidden_act", "it must be 'gelu', the activation of the masked-token head"
        )
    return {}


def roberta(model_type: str, model: str) -> CheckpointFormat:
    """Returns the checkpoint format of RoBERTa or of a family with the same layout."""
    return replace(
        BERT,
        model_type=model_type,
        architectures={
            f"{model}ForMaskedLM": MASKED,
            f"{model}Model": BARE,
            f"{model}ForSequenceClassification": LABELLED,
        },
        renamed=SIZES,
        rows=roberta_rows,
        parts=(LABELS, Part(read_roberta, write_roberta), Part(read_roberta_head)),
        ignored=(r"(roberta\.)?(embeddings\.position_ids|pooler\.dense\.\w+)",),
        copies={"lm_head.decoder.bias": "lm_head.bias"},
        base="roberta.",
    )


# ---- DistilBERT

DISTILBERT = """
    blocks/attention/query      distilbert.transformer.layer.*.attention.q_lin
    blocks/attention/key        distilbert.transformer.layer.*.attention.k_lin
    blocks/attention/value      distilbert.transformer.layer.*.attention.v_lin
    blocks/attention/output     distilbert.transformer.layer.*.attention.out_lin
    blocks/attention_norm       distilbert.transformer.layer.*.sa_layer_norm
    blocks/feedforward/up       distilbert.transformer.layer.*.ffn.lin1
    blocks/feedforward/down     distilbert.transformer.layer.*.ffn.lin2
    blocks/feedforward_norm     distilbert.transformer.layer.*.output_layer_norm
    transform                   vocab_transform
    transform_norm              vocab_layer_norm
    head/bias                   vocab_projector.bias
"""


DISTIL = CheckpointFormat(
    "distilbert",
    EncoderConfig,
    {"DistilBertForMaskedLM": MASKED, "DistilBertModel": BARE | {"pooler": False}},
    {
        "vocab_size": Field("vocab_size"),
        "max_position_embeddings": Field("max_length", 512),
        **required(dim="embed_dim", n_layers="num_layers", n_heads="num_heads"),
        **required(hidden_dim="mlp_dim"),
        "activation": Field("activation", "gelu", ACTIVATIONS),
    },
    lambda config: table(EMBEDDINGS + DISTILBERT, BASE="distilbert"),
    fixed=FIXED | {"norm_epsilon": 1e-12},
    demanded={"tie_word_embeddings": True},
    ignored=(r"(distilbert\.)?embeddings\.position_ids",),
    base="distilbert.",
    older=OLDER,
    not_implemented=(),
)

# ---- ModernBERT

GATES = {"gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "silu": "swiglu"}
MODERN_ROWS = table("""
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
GATE = Field("activation", "gelu", GATES)


def modern_types(options: Options, num_layers: int, window: int | None) -> list[str]:
    """Returns the types of the layers; by default, every third layer is global."""
    period = options.whole("global_attn_every_n_layers", 3, least=1)
    return [LOCAL if layer % period else GLOBAL for layer in range(num_layers)]


def read_window(options: Options) -> int:
    """Returns the window size per side, which is half of the value of local_attention."""
    return options.whole("local_attention", 128) // 2


def write_window(window: int | None) -> dict:
    """Converts a window to the option that `read_window` reads."""
    return {"local_attention": 128 if window is None else 2 * window}


def read_head(options: Options) -> dict:
    """Checks that the head and the layers have the same activation function."""
    own = options.choice("classifier_activation", GATES, "gelu")
    if own != options.choice("hidden_activation", GATES, "gelu"):
        raise options.error("classifier_activation", "it must be equal to hidden_activation")
    return {}


BASES = {GLOBAL: 160_000.0, LOCAL: 10_000.0}
BASE_OPTIONS = {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}
MODERN_ROTARY = RotaryByType(BASES, BASE_OPTIONS, (GLOBAL, LOCAL))
MODERNBERT = CheckpointFormat(
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
    lambda config: MODERN_ROWS,
    fixed={
        "positions": "rotary",
        "embedding_norm": True,
        "first_attention_norm": False,
        "tie_embeddings": True,
        "use_bias": False,
    },
    demanded={"tie_word_embeddings": True, "classifier_bias": False, "decoder_bias": True},
    parts=(
        layers_part(modern_types, MODERN_ROTARY, Window(read_window, write_window)),
        Part(read_head, lambda config: {"classifier_activation": GATE.write(config)}),
    ),
    base="model.",
    not_implemented=(),
)
FAMILIES = (
    *(BERT, roberta("roberta", "Roberta"), roberta("xlm-roberta", "XLMRoberta")),
    *(DISTIL, MODERNBERT),
)
