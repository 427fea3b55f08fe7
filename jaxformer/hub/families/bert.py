"""BERT (Devlin et al. 2019), RoBERTa, XLM-R and DistilBERT: post-norm encoders."""

from jaxformer.hub.families.gpt2 import ACTIVATIONS
from jaxformer.hub.family import USUAL, Family, Field, Part, required
from jaxformer.hub.options import Options
from jaxformer.hub.table import Row, table
from jaxformer.models.config import EncoderConfig

FIXED = {"norm_position": "post", "embedding_norm": True, "tie_embeddings": True}
# Names of a norm's parameters in files from before 2019.
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


def read_labels(options: Options) -> dict:
    """Reads the number of token types and, for a classifier, the number of labels."""
    token_types = options.whole("type_vocab_size", 2, least=1)
    named = options.options.get("id2label")
    labels = len(named) if isinstance(named, dict) else options.whole("num_labels", 2)
    named = options.take("architectures", None) or [""]
    name = named[0] if isinstance(named, list) else named
    is_classifier = str(name).endswith("ForSequenceClassification")
    return {"num_token_types": token_types} | ({"num_labels": labels} if is_classifier else {})


def write_labels(config: EncoderConfig) -> dict:
    """Returns generic label names for a classifier."""
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
    """Returns the table of BERT. BertForPreTraining names its classifier differently."""
    labels = "cls.seq_relationship" if config.transform else "classifier"
    return table(EMBEDDINGS + LAYERS + BERT_HEADS, BASE="bert", LABELS=labels)


BERT = Family(
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
)

# ---- RoBERTa and XLM-R: the first position is 2

ROBERTA_HEADS = """
    pooler                      POOLER
    transform                   lm_head.dense
    transform_norm              lm_head.layer_norm
    head/bias                   lm_head.bias
    classifier                  classifier.out_proj
"""


def roberta_rows(config: EncoderConfig) -> tuple[Row, ...]:
    """Returns the table of RoBERTa. A classifier names its pooler differently."""
    pooler = "classifier.dense" if config.num_labels else "roberta.pooler.dense"
    return table(EMBEDDINGS + LAYERS + ROBERTA_HEADS, BASE="roberta", POOLER=pooler)


def read_roberta(options: Options) -> dict:
    """Reads the positions: the first one is `pad_token_id + 1`."""
    offset = options.whole("pad_token_id", 1) + 1
    length = options.whole("max_position_embeddings", 512) - offset
    if length < 1:
        raise options.error("max_position_embeddings", f"it must be above {offset}")
    return {"max_length": length, "position_offset": offset}


def write_roberta(config: EncoderConfig) -> dict:
    """Returns the options that `read_roberta` reads."""
    rows = config.max_length + config.position_offset
    return {"pad_token_id": config.position_offset - 1, "max_position_embeddings": rows}


def read_roberta_head(options: Options) -> dict:
    """Checks that the blocks apply GELU, which the masked-token head always applies."""
    activation = options.choice("hidden_act", ACTIVATIONS, "gelu")
    named = options.options.get("architectures") or "ForMaskedLM"
    name = named if isinstance(named, str) else str(named[0])
    if name.endswith("ForMaskedLM") and activation != "gelu":
        raise options.error(
            "hidden_act", "its head for masked tokens has 'gelu', so it must be that"
        )
    return {}


def roberta(model_type: str, model: str) -> Family:
    """Returns RoBERTa or a family with the same layout."""
    return Family(
        model_type,
        EncoderConfig,
        {
            f"{model}ForMaskedLM": MASKED,
            f"{model}Model": BARE,
            f"{model}ForSequenceClassification": LABELLED,
        },
        SIZES,
        roberta_rows,
        fixed=FIXED,
        demanded=DEMANDED,
        parts=(
            LABELS,
            Part(read_roberta, write_roberta),
            Part(read_roberta_head, lambda config: {}),
        ),
        ignored=(r"(roberta\.)?(embeddings\.position_ids|pooler\.dense\.\w+)",),
        copies={"lm_head.decoder.bias": "lm_head.bias"},
        base="roberta.",
        older=OLDER,
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


DISTIL = Family(
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
)
FAMILIES = (BERT, roberta("roberta", "Roberta"), roberta("xlm-roberta", "XLMRoberta"), DISTIL)
