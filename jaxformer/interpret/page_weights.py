"""Weights of a model for a page that runs the model in JavaScript."""

from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from jaxformer.functional.trees import Weights
from jaxformer.interpret.page_file import pack, pack_int8, unpack
from jaxformer.models import kinds
from jaxformer.models.config.check import entries
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel

# A page with this number of parameters has about 37 MB. Its first forward pass over 32 tokens took
# 0.6 s in Chromium on two idle cores, so the page does not need WebAssembly, which its content
# security policy forbids.
MOST_PARAMETERS = 30_000_000
# A model with at most this number of parameters is stored in float16, which takes about 2.7
# characters of the page per parameter.
MOST_EXACT = 1_500_000

# The config values that `page/model.js` and `page/convolution.js` implement. For other models, the
# page shows numbers that JAX computed.
_KNOWN = {
    "activation": ("relu gelu gelu_tanh silu squared_relu sigmoid tanh swiglu geglu geglu_tanh"),
    "norm": "layer rms rms_one_plus none",
    "norm_position": "pre post post_sublayer sandwich",
    "parallel_block": "none separate_norms shared_norm",
    "positions": "learned sinusoidal sinusoidal_halves rotary relative alibi none",
    "query_key_norm": "none head all",
}
# The classes of models whose forward pass is in `page/`; see `page/kinds.js`.
_CLASSES = (
    kinds.Decoder,
    kinds.Encoder,
    kinds.EncoderDecoder,
    kinds.Recurrent,
    kinds.RecurrentEncoderDecoder,
    kinds.Convolutional,
)
# Parts of an encoder that its logits do not use.
_UNUSED = ("pooler", "classifier")


def live_reason(model: LanguageModel, variables: Any) -> str | None:
    """Returns the reason why a page cannot run the model; None if it can."""
    config = model.config
    if type(model) not in _CLASSES:
        names = ", ".join(x.__name__ for x in _CLASSES)
        return f"the page can run only the classes {names}, not {type(model).__name__}"
    size = num_parameters(variables["params"])
    if size > MOST_PARAMETERS:
        return f"the model has {size:,} parameters, and a page can hold at most {MOST_PARAMETERS:,}"
    for name, known in _KNOWN.items():
        if getattr(config, name, None) not in (None, *known.split()):
            return f"the page does not implement {name} {getattr(config, name)!r}"
    if isinstance(config, TransformerConfig):
        types = entries(getattr(config, "layer_types", "attention"))
        unknown = {
            "experts": config.has_experts,
            "attention sinks": config.attention_sinks,
            "attention gates": config.attention_gate,
            f"layer_types {types!r}": set(types) != {"attention"},
        }
        for name, is_used in unknown.items():
            if is_used:
                return f"the page does not implement {name}"
    for name in ("mask", "layers", "activation", "positions"):
        if getattr(model, name) is not None:
            return f"the model has a user-defined {name}, which is Python code"
    if config.dtype != "float32":
        return f"the model computes in {config.dtype}, which JavaScript does not have"
    return None


def num_parameters(params: Weights) -> int:
    """Returns the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def has_8_bits(params: Weights) -> bool:
    """Returns whether a page rounds the matrices of the model to 8 bits."""
    return num_parameters(params) > MOST_EXACT


def for_page(packed: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the packed weights without those parts of an encoder that its logits do not use."""
    return {name: x for name, x in packed.items() if name.split("/")[0] not in _UNUSED}


def packed_weights(params: Weights) -> dict[str, dict[str, Any]]:
    """Returns the rounded weights as JSON objects by path, such as "blocks/attention/query/kernel".

    If the model has at most `MOST_EXACT` parameters, matrices are rounded to float16. In a larger
    model, matrices are rounded to 8 bits with one scale for each output feature of a kernel and for
    each token vector. Vectors (biases and scales of norms) are not rounded.
    """
    leaves = flatten_dict(params, sep="/")
    eight_bits = has_8_bits(params)

    def packed(name: str, array: Float[np.ndarray, "..."]) -> dict[str, Any]:
        if name.endswith("/kernel"):
            axis = -2
        elif "embedding" in name.split("/"):
            axis = -1
        else:
            return pack(array, "float32")
        return pack_int8(array, axis) if eight_bits else pack(array, "float16")

    return {name: packed(name, np.asarray(leaf, np.float32)) for name, leaf in leaves.items()}


def unpacked_weights(packed: dict[str, dict[str, Any]]) -> Weights:
    """Converts packed weights, which are rounded, to a tree of float32 arrays."""
    leaves = {name: unpack(array).astype(np.float32) for name, array in packed.items()}
    return unflatten_dict(leaves, sep="/")
