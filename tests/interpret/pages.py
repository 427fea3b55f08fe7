"""Decoder configs that together cover every option of the page's forward pass, and their pages."""

from functools import cache

import numpy as np

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.interpret import explanation
from jaxformer.interpret.encoded_text import EncodedText
from jaxformer.interpret.page_data import all_logits
from jaxformer.interpret.page_weights import packed_weights, unpacked_weights
from tests.properties import tiny

TEXT = "def f(x):\n    return x"
SIZES = {
    "vocab_size": 300,
    "max_length": 48,
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 4,
    "mlp_dim": 24,
}
OPTIONS = {
    "gpt2": {},
    "llama": {
        "norm": "rms",
        "positions": "rotary",
        "activation": "swiglu",
        "use_bias": False,
        "num_kv_heads": 2,
        "tie_embeddings": False,
    },
    "gemma": {
        "norm": "rms_one_plus",
        "norm_position": "sandwich",
        "positions": "rotary",
        "activation": "geglu_tanh",
        "attention_softcap": 2.0,
        "logits_softcap": 3.0,
        "scale_embeddings": True,
        "head_dim": 6,
        "query_key_norm": "head",
        "window": (3, None),
    },
    "post-norm": {
        "norm_position": "post",
        "positions": "sinusoidal",
        "activation": "relu",
        "embedding_norm": True,
        "head_bias": True,
        "tie_embeddings": False,
    },
    "olmo": {
        "norm_position": "post_sublayer",
        "query_key_norm": "all",
        "activation": "geglu",
        "positions": "rotary",
        "rotary_fraction": 0.5,
        "rotary_interleaved": True,
        "norm": "rms",
    },
    "parallel with two norms": {
        "parallel_block": "separate_norms",
        "positions": "alibi",
        "activation": "silu",
        "norm_bias": False,
    },
    "parallel with one norm": {
        "parallel_block": "shared_norm",
        "positions": "sinusoidal_halves",
        "activation": "gelu",
        "attention_output_bias": False,
    },
    "relative": {
        "positions": "relative",
        "relative_buckets": 4,
        "relative_distance": 5,
        "activation": "squared_relu",
        "output_scale": 0.4,
        "attention_scale": 0.7,
        "head_bias": True,
    },
    "without norm": {
        "norm": "none",
        "residual": False,
        "output_activation": True,
        "positions": "none",
    },
    "prefix": {
        "prefix": 3,
        "positions": "rotary",
        "rotary_base": (50.0, None),
        "rotary_scaling": jf.RotaryScaling("yarn", factor=4.0, original_length=16),
    },
    "offset": {"position_offset": 2, "first_attention_norm": False},
}
# The tabs of a live page of a decoder, in their order.
VIEWS = ("model", "attention", "inside", "lens", "norm", "dependency", "decoding", "heads")
NO_MATRIX = {
    "effects": explanation.pack(np.ones((1, 1)), "float32"),
    "matrix": [[1]],
    "rule": [[1]],
    "witnesses": ["change"],
    "holds": True,
    "summary": "0 spurious edges; 0 missing edges",
    "remarks": [],
}


def tokenizer(text=TEXT):
    """A tokenizer with the bytes and a few merges."""
    return ByteTokenizer.train([text * 3], 270)


def model_of(**options):
    """Returns a model and drawn variables, in which every weight affects the logits."""
    model = jf.Decoder(jf.DecoderConfig(**{**SIZES, **options}))
    return model, drawn_weights(model)


@cache
def drawn_weights(model):
    """Returns random variables of a model. Tests share them and must not change them."""
    return tiny.weights(model, 0)


def jax_logits(model, params, tokens, source=None):
    """Returns JAX's logits, with the program that wrote the page if its text has this length."""
    return all_logits(model, params, EncodedText(tokens, source))


def rounded_params(params):
    """Returns the parameters that a page computes with."""
    return unpacked_weights(packed_weights(params))
