"""The models that every property of an autoregressive model is asked of, one of each kind."""

import pytest

import jaxformer as jf

RNN, CNN = jf.RecurrentConfig, jf.ConvolutionalConfig
PAIR, RNN_PAIR = jf.EncoderDecoderConfig, jf.RecurrentEncoderDecoderConfig
MODELS = {
    "decoder": {"num_layers": 1},
    "llama": {
        "positions": "rotary",
        "norm": "rms",
        "activation": "swiglu",
        "tie_embeddings": False,
        "window": 3,
    },
    "post-norm": {"positions": "sinusoidal", "norm_position": "post", "num_layers": 1},
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
    "encoder-decoder": {"kind": PAIR, "num_layers": 1, "scale_embeddings": True},
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
    "lstm encoder-decoder": {"kind": RNN_PAIR, "attends": False, "hidden_dim": 8},
    "attention lstm": {"kind": RNN_PAIR, "share_embeddings": False, "source_vocab_size": 7},
}


def each_model_but(*elsewhere):
    """Every model; those of which other tests ask as much only with -m slow."""
    names = [pytest.param(n, marks=pytest.mark.slow if n in elsewhere else ()) for n in MODELS]
    return pytest.mark.parametrize("name", names)
