"""The models on which properties of autoregressive models are tested, at least one per kind."""

from dataclasses import replace

import pytest

import jaxformer as jf
from jaxformer.functional import Convolution, LayerNorm, Residual
from tests.properties import tiny
from tests.slow import mostly_slow

RNN, CNN = jf.RecurrentConfig, jf.ConvolutionalConfig
PAIR, RNN_PAIR = jf.EncoderDecoderConfig, jf.RecurrentEncoderDecoderConfig
MODELS = {
    "decoder": {"num_layers": 1},
    "llama": {
        "positions": "rotary",
        "norm": "rms",
        "activation": "swiglu",
        "tie_embeddings": False,
        "window": (3, 2),
        "rotary_base": (50.0, None),
        "query_key_norm": "head",
    },
    "post-norm": {
        "positions": "alibi",
        "norm_position": "post",
        "num_layers": 1,
        "attention_softcap": 2.0,
        "logits_softcap": 3.0,
    },
    "experts": {  # of gpt-oss
        "positions": "rotary",
        "norm": "rms",
        "activation": "clipped_swiglu",
        "num_experts": 4,
        "expert_dim": 6,
        "router_bias": True,
        "attention_sinks": True,
        "window": 3,
        "num_layers": 1,
    },
    "mixed experts": {
        "positions": "rotary",
        "norm": "rms",
        "activation": "swiglu",
        "num_experts": (0, 3),
        "shared_expert_dim": 6,
        "shared_expert_gate": True,
        "attention_sinks": True,
        "num_layers": 4,
    },
    "short convolution": {
        "layer_types": ("short_convolution", "attention"),
        "convolution_bias": True,
        "positions": "rotary",
        "norm": "rms",
        "activation": "swiglu",
    },
    "gated delta": {
        "layer_types": ("gated_delta", "attention"),
        "delta_key_heads": 2,
        "delta_value_heads": 4,
        "delta_key_dim": 12,
        "delta_value_dim": 3,
        "attention_gate": True,
        "positions": "rotary",
        "rotary_fraction": 0.5,
        "norm": "rms_one_plus",
        "norm_epsilon": 0.1,  # so that the norm of small heads does not enlarge rounding errors
        "query_key_norm": "head",
        "activation": "swiglu",
    },
    "rnn": {"kind": RNN, "cell": "rnn", "hidden_dim": 6, "tie_embeddings": False},
    "lstm": {"kind": RNN, "cell": "lstm"},
    "cnn": {"kind": CNN, "kernel_size": 3, "activation": "gelu"},
    "dilated cnn": {
        "kind": CNN,
        "kernel_size": 2,
        "dilation_growth": 2,
        "activation": "silu",
        "residual": False,
        "norm": "none",
    },
    "encoder-decoder": {
        "kind": PAIR,
        "num_layers": 1,
        "scale_embeddings": True,
        "positions": "relative",
        "relative_buckets": 4,
        "relative_distance": 5,
        "output_scale": 0.4,
    },
    "post-norm encoder-decoder": {
        "kind": PAIR,
        "positions": "sinusoidal",
        "norm_position": "post",
        "embedding_norm": True,
        "share_embeddings": False,
        "source_vocab_size": 7,
        "num_layers": 1,
        "num_encoder_layers": 2,
    },
    "frames": {
        "kind": PAIR,
        "source_features": 3,
        "num_layers": 1,
        "positions": "sinusoidal",
        "embedding_norm": True,
        "scale_embeddings": True,
    },
    "lstm encoder-decoder": {"kind": RNN_PAIR, "attends": False, "hidden_dim": 8},
    "attention lstm": {"kind": RNN_PAIR, "share_embeddings": False, "source_vocab_size": 7},
}


def centred():
    """Returns a model whose convolutions also read the next token: lecture 11's counter-example."""
    model = tiny.build(kind=CNN)
    layer = (Residual(Convolution((-1, 0, 1), "gelu"), LayerNorm()),)
    return replace(model, layers=(layer,) * model.config.num_layers)


# One model for each kind of cache.
KINDS = ("llama", "lstm", "dilated cnn", "encoder-decoder")
HYBRID = ("short convolution", "gated delta")


def each_model(*quick):
    """Parametrizes a test over all models.

    Models that are not in `quick` are rare, but for one model of each kind, one with experts and
    one hybrid, which are slow.
    """
    slow = (*KINDS, "gated delta", "mixed experts")
    return pytest.mark.parametrize("name", mostly_slow(MODELS, *quick, slow=slow))
