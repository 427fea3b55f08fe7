"""T5 (Raffel et al. 2020; v1.0 and v1.1), Flan-T5 and mT5, with relative position biases."""

from collections.abc import Callable

from jaxformer.hub.checkpoint_format import CheckpointFormat, Field, Part, required
from jaxformer.hub.options import Options
from jaxformer.hub.table import Row, table
from jaxformer.models.config import EncoderDecoderConfig

# All published checkpoints with "gated-gelu" use gelu_new, which is "gelu_tanh" in jaxformer.
ACTIVATIONS = {
    "relu": "relu",
    "gated-gelu": "geglu_tanh",
    "gated-silu": "swiglu",
    "gelu": "gelu",
}

HEAD = "lm_head.weight"
TABLES = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}

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


def rows(config: EncoderDecoderConfig) -> tuple[Row, ...]:
    """Returns the table of T5; a gated feed-forward layer has two kernels, wi_0 and wi_1."""
    up = "wi_1" if config.activation in ("geglu_tanh", "swiglu") else "wi"
    return (
        *OTHERS,
        *table(STACK, OURS="encoder/", STACK="encoder", LAST="1", UP=up),
        *table(STACK, OURS="", STACK="decoder", LAST="2", UP=up),
    )


def read(options: Options) -> dict:
    """Reads the options that T5 and mT5 share.

    In files of mT5, and in files that transformers 5 wrote, config.json does not say whether the
    head has its own kernel. The reader therefore looks for this kernel among the tensors. If the
    embeddings are tied, a file may contain them only under the name of the head.

    In transformers, T5 accepts texts of any length, because its positions are relative. jaxformer
    limits texts to `jaxformer_max_length` or, if this is missing, to the training length
    `n_positions`.
    """
    layers = options.whole("num_layers")
    is_tied = options.flag("tie_word_embeddings", True)
    is_head_the_table = is_tied and TABLES.isdisjoint(options.tensors)
    if "jaxformer_max_length" in options:
        options.ignore("n_positions", because="jaxformer_max_length sets the maximum length")
        max_length = options.whole("jaxformer_max_length", least=1)
    else:
        max_length = options.whole("n_positions", 512, least=1)
    return {
        "num_layers": options.whole("num_decoder_layers", layers),
        "max_length": max_length,
        "tie_embeddings": HEAD not in options.tensors or is_head_the_table,
    }


def write(config: EncoderDecoderConfig) -> dict:
    """Converts a config to the options that `read` reads."""
    return {
        "num_decoder_layers": config.num_layers,
        "tie_word_embeddings": config.tie_embeddings,
        "jaxformer_max_length": config.max_length,
    }


def read_scale(options: Options) -> dict:
    """Reads the factor by which T5 v1.0 scales the input of the head; v1.1 does not scale it."""
    tied = options.flag("tie_word_embeddings", True)
    scaled = options.flag("scale_decoder_outputs", tied)
    return {"output_scale": options.whole("d_model") ** -0.5 if scaled else None}


def write_scale(config: EncoderDecoderConfig) -> dict:
    """Converts a config to the options that `read_scale` reads."""
    scaled = config.output_scale is not None
    return {"tie_word_embeddings": scaled, "scale_decoder_outputs": scaled}


def read_activation(default: str) -> Callable[[Options], dict]:
    """Returns a function that reads the activation from `feed_forward_proj`.

    The returned function raises ValueError unless `dense_act_fn` and `is_gated_act` agree with
    `feed_forward_proj`.

    Args:
        default: The value of `feed_forward_proj` if the option is missing.
    """

    def read(options: Options) -> dict:
        activation = options.choice("feed_forward_proj", ACTIVATIONS, default)
        options.require(derived_options(activation))
        return {"activation": activation}

    return read


def derived_options(activation: str) -> dict:
    """Returns the options `dense_act_fn` and `is_gated_act` that fit an activation of jaxformer."""
    dense = {"geglu_tanh": "gelu_new", "swiglu": "silu"}.get(activation, activation)
    return {"dense_act_fn": dense, "is_gated_act": dense != activation}


def write_activation(config: EncoderDecoderConfig) -> dict:
    """Converts a config to the options that `read_activation` reads."""
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    if config.activation not in names:
        return {}
    return {"feed_forward_proj": names[config.activation], **derived_options(config.activation)}


def t5(
    model_type: str,
    architectures: tuple[str, ...],
    activation: str,
    *parts: Part,
) -> CheckpointFormat:
    """Returns the checkpoint format of T5 or mT5.

    Args:
        model_type: "t5" or "mt5".
        architectures: The classes of the model in transformers.
        activation: The value of `feed_forward_proj` if the option is missing.
        *parts: Readers and writers of options that T5 and mT5 do not share.
    """
    return CheckpointFormat(
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
        parts=(Part(read, write), *parts, Part(read_activation(activation), write_activation)),
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        not_implemented=(),
    )


SCALE = Part(read_scale, write_scale)
FAMILIES = (
    t5("t5", ("T5ForConditionalGeneration", "T5WithLMHeadModel"), "relu", SCALE),
    t5("mt5", ("MT5ForConditionalGeneration",), "gated-gelu"),
)
