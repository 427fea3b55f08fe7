"""Weights of a decoder for a page that runs the model in JavaScript."""

from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from jaxformer.functional.attention.scores import alibi_slopes, relative_buckets
from jaxformer.functional.positions import rotary_frequencies
from jaxformer.functional.trees import Weights
from jaxformer.interpret.page_file import pack, pack_int8, unpack
from jaxformer.models.config import DecoderConfig, architecture_name
from jaxformer.models.config.check import entries
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import Decoder
from jaxformer.models.language_model import LanguageModel

MOST_PARAMETERS = 5_000_000
# A model with at most this number of parameters is stored in float16, which takes about 2.7
# characters of the page per parameter.
MOST_EXACT = 1_500_000

# The config values that `page/model.js` implements. For other models, the page shows numbers that
# JAX computed.
_KNOWN = {
    "activation": ("relu gelu gelu_tanh silu squared_relu sigmoid tanh swiglu geglu geglu_tanh"),
    "norm": "layer rms rms_one_plus none",
    "norm_position": "pre post post_sublayer sandwich",
    "parallel_block": "none separate_norms shared_norm",
    "positions": "learned sinusoidal sinusoidal_halves rotary relative alibi none",
    "query_key_norm": "none head all",
}
_FIELDS = """vocab_size max_length num_layers embed_dim num_heads num_kv_heads head_dim activation
    output_activation norm norm_position parallel_block norm_epsilon embedding_norm residual
    positions position_offset query_key_norm attention_scale attention_softcap output_scale
    logits_softcap tie_embeddings scale_embeddings prefix""".split()


def live_reason(model: LanguageModel, variables: Any) -> str | None:
    """Returns the reason why a page cannot run the model; None if it can."""
    config = model.config
    if not isinstance(config, DecoderConfig):
        return (
            f"the page can run only decoders, and this model is of type {architecture_name(config)}"
        )
    if type(model) is not Decoder:
        return f"the page can run only the class Decoder, not {type(model).__name__}"
    leaves = jax.tree.leaves(variables["params"])
    size = sum(leaf.size for leaf in leaves)
    if size > MOST_PARAMETERS:
        return f"the model has {size:,} parameters, and a page can hold at most {MOST_PARAMETERS:,}"
    for name, known in _KNOWN.items():
        if getattr(config, name) not in known.split():
            return f"the page does not implement {name} {getattr(config, name)!r}"
    unknown = {
        "experts": config.has_experts,
        "attention sinks": config.attention_sinks,
        "attention gates": config.attention_gate,
        f"layer_types {config.layer_types!r}": set(entries(config.layer_types)) != {"attention"},
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


def packed_weights(params: Weights) -> dict[str, dict[str, Any]]:
    """Returns the rounded weights as JSON objects by path, such as "blocks/attention/query/kernel".

    If the model has at most `MOST_EXACT` parameters, matrices are rounded to float16. In a larger
    model, matrices are rounded to 8 bits with one scale for each output feature of a kernel and for
    each token vector. Vectors (biases and scales of norms) are not rounded.
    """
    leaves = flatten_dict(params, sep="/")
    eight_bits = sum(leaf.size for leaf in jax.tree.leaves(params)) > MOST_EXACT

    def packed(name: str, array: Float[np.ndarray, "..."]) -> dict[str, Any]:
        if name.endswith("/kernel"):
            axis = -2
        elif name.startswith("embedding/"):
            axis = -1
        else:
            return pack(array, "float32")
        return pack_int8(array, axis) if eight_bits else pack(array, "float16")

    return {name: packed(name, np.asarray(leaf, np.float32)) for name, leaf in leaves.items()}


def unpacked_weights(packed: dict[str, dict[str, Any]]) -> Weights:
    """Converts packed weights, which are rounded, to a tree of float32 arrays."""
    leaves = {name: unpack(array).astype(np.float32) for name, array in packed.items()}
    return unflatten_dict(leaves, sep="/")


def page_config(config: TransformerConfig, params: Any) -> dict[str, Any]:
    """Returns the config fields for the page's forward pass.

    Rotary frequencies, ALiBi slopes and relative position buckets are computed here, so that
    JavaScript does not duplicate these formulas.
    """
    fields: dict[str, Any] = {name: getattr(config, name) for name in _FIELDS}
    fields["layers"] = [_layer(layer) for layer in config.layers]
    if config.positions == "alibi":
        fields["slopes"] = alibi_slopes(config.num_heads)
    if config.positions == "relative":
        table = np.asarray(params["relative_bias"]["table"], np.float32)
        buckets = relative_buckets(len(table), config.relative_distance, False)
        fields["relative"] = {"distance": config.relative_distance, "bias": table[buckets].tolist()}
    return fields


def _layer(layer: Any) -> dict[str, Any]:
    """Returns those config fields of a layer that may differ between layers."""
    rotary = None
    if layer.positions == "rotary":
        dim = int(layer.head_dim * layer.rotary_fraction)
        frequencies, factor = rotary_frequencies(dim, layer.rotary_base, layer.rotary_scaling)
        rotary = {"frequencies": frequencies.tolist(), "factor": factor}
        rotary["interleaved"] = layer.rotary_interleaved
    return {
        "window": layer.window,
        "rotary": rotary,
        "first_attention_norm": layer.first_attention_norm,
    }
