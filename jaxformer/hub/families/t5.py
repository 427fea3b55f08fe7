"""T5 (Raffel et al. 2020), v1.0 and v1.1, Flan-T5 and mT5: a learned bias for each distance."""

from jaxformer.artifacts.options import Options
from jaxformer.artifacts.table import table
from jaxformer.hub.family import Family, Field, Part, required
from jaxformer.models.config import EncoderDecoderConfig

ACTIVATIONS = {
    "relu": "relu",
    "gated-gelu": "geglu_tanh",  # gelu_new, as in all checkpoints that were published
    "gated-silu": "swiglu",
    "gelu": "gelu",
}


STACK = """
    OURSrelative_bias/table STACK.block.0.layer.0.SelfAttention.relative_attention_bias.weight
    OURSblocks/attention/query      STACK.block.*.layer.0.SelfAttention.q
    OURSblocks/attention/key        STACK.block.*.layer.0.SelfAttention.k
    OURSblocks/attention/value      STACK.block.*.layer.0.SelfAttention.v
    OURSblocks/attention/output     STACK.block.*.layer.0.SelfAttention.o
    OURSblocks/attention_norm       STACK.block.*.layer.0.layer_norm
    OURSblocks/feedforward/gate     STACK.block.*.layer.LAST.DenseReluDense.wi_0
    OURSblocks/feedforward/up       STACK.block.*.layer.LAST.DenseReluDense.UP
    OURSblocks/feedforward/down     STACK.block.*.layer.LAST.DenseReluDense.wo
    OURSblocks/feedforward_norm     STACK.block.*.layer.LAST.layer_norm
    OURSfinal_norm                  STACK.final_layer_norm
"""
OTHERS = table("""
    embedding/tokens                shared.weight
    blocks/cross_attention/query    decoder.block.*.layer.1.EncDecAttention.q
    blocks/cross_attention/key      decoder.block.*.layer.1.EncDecAttention.k
    blocks/cross_attention/value    decoder.block.*.layer.1.EncDecAttention.v
    blocks/cross_attention/output   decoder.block.*.layer.1.EncDecAttention.o
    blocks/cross_attention_norm     decoder.block.*.layer.1.layer_norm
    head/kernel                     lm_head.weight
""")


def rows(config):
    up = "wi_1" if config.activation in ("geglu_tanh", "swiglu") else "wi"
    return (
        *OTHERS,
        *table(STACK, OURS="encoder/", STACK="encoder", LAST="1", UP=up),
        *table(STACK, OURS="", STACK="decoder", LAST="2", UP=up),
    )


def read(options: Options) -> dict:
    # Whether the head has a matrix of its own is said by the tensors alone: mT5's config.json and
    # transformers 5 are silent about it.
    for derived in ("dense_act_fn", "is_gated_act", "n_positions", "tie_word_embeddings"):
        options.take(derived, None)
    layers = options.whole("num_layers")
    return {
        "num_layers": options.whole("num_decoder_layers", layers),
        "max_length": options.whole("jaxformer_max_length", 4096),
        "tie_embeddings": "lm_head.weight" not in options.tensors,
    }


def read_t5(options: Options) -> dict:
    """T5 v1.0 scales what goes to the head; v1.1 does not, and says so by an untied head."""
    tied = options.flag("tie_word_embeddings", True)
    scaled = options.flag("scale_decoder_outputs", tied)
    return {**read(options), "output_scale": options.whole("d_model") ** -0.5 if scaled else None}


def write(config) -> dict:
    gated = {"geglu_tanh": "gelu_new", "swiglu": "silu"}
    return {
        "num_decoder_layers": config.num_layers,
        "tie_word_embeddings": config.tie_embeddings,
        "dense_act_fn": gated.get(config.activation, config.activation),
        "is_gated_act": config.activation in gated,
        "jaxformer_max_length": config.max_length,
    }


def write_t5(config) -> dict:
    scaled = config.output_scale is not None
    return {**write(config), "tie_word_embeddings": scaled, "scale_decoder_outputs": scaled}


def t5(model_type: str, architectures: tuple[str, ...], read, write) -> Family:
    return Family(
        model_type,
        EncoderDecoderConfig,
        {name: {} for name in architectures},
        {
            "vocab_size": Field("vocab_size"),
            "d_model": Field("embed_dim"),
            "d_kv": Field("head_dim", 64),
            **required(d_ff="mlp_dim", num_layers="num_encoder_layers", num_heads="num_heads"),
            "relative_attention_num_buckets": Field("relative_buckets", 32),
            "relative_attention_max_distance": Field("relative_distance", 128),
            "layer_norm_epsilon": Field("norm_epsilon", 1e-6),
            "feed_forward_proj": Field("activation", "relu", ACTIVATIONS),
        },
        rows,
        fixed={
            "positions": "relative",
            "norm": "rms",
            "use_bias": False,
            "attention_scale": 1.0,
            "share_embeddings": True,
        },
        demanded={"is_decoder": False},
        parts=(Part(read, write),),
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


FAMILIES = (
    t5("t5", ("T5ForConditionalGeneration", "T5WithLMHeadModel"), read_t5, write_t5),
    t5("mt5", ("MT5ForConditionalGeneration",), read, write),
)
