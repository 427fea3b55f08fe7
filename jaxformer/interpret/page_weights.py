"""Weights of a decoder for the page, whose JavaScript computes the forward pass."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxformer.functional.attention.scores import alibi_slopes, relative_buckets
from jaxformer.functional.positions import rotary_frequencies
from jaxformer.interpret.page_arrays import pack, pack_int8, quantize
from jaxformer.models.config import DecoderConfig, kind_of
from jaxformer.models.config.check import entries
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import Decoder
from jaxformer.models.language_model import LanguageModel

MOST_PARAMETERS = 5_000_000
MOST_EXACT = 1_500_000  # up to this number float16 is stored: about 2.7 bytes of text each

# The values that `page/model.js` implements. A page of another value shows captured data.
_KNOWN = {
    "activation": "relu gelu gelu_tanh silu squared_relu swiglu geglu geglu_tanh",
    "norm": "layer rms rms_one_plus none",
    "norm_position": "pre post output both",
    "parallel": "no two_norms one_norm",
    "positions": "learned sinusoidal sinusoidal_halves rotary relative alibi none",
    "query_key_norm": "none head all",
}
_FIELDS = """vocab_size max_length num_layers embed_dim num_heads num_kv_heads head_dim activation
    output_activation norm norm_position parallel norm_epsilon embedding_norm residual positions
    position_offset query_key_norm attention_scale attention_cap output_scale logits_cap
    tie_embeddings scale_embeddings prefix""".split()


def live_reason(model: LanguageModel, variables: Any) -> str | None:
    """Returns why the page cannot compute this model itself; None if it can."""
    config = model.config
    if not isinstance(config, DecoderConfig):
        return f"the page computes decoders only, and this model is of kind {kind_of(config)}"
    if type(model) is not Decoder:
        return f"the page computes a Decoder, and this model is of the class {type(model).__name__}"
    leaves = jax.tree.leaves(variables["params"])
    size = sum(leaf.size for leaf in leaves)
    if size > MOST_PARAMETERS:
        return f"the model has {size:,} parameters, and a page holds at most {MOST_PARAMETERS:,}"
    for name, known in _KNOWN.items():
        if getattr(config, name) not in known.split():
            return f"the page does not implement {name} {getattr(config, name)!r}"
    if config.has_experts:
        return "the page does not implement experts"
    if config.attention_sinks:
        return "the page does not implement attention sinks"
    if config.attention_gate:
        return "the page does not implement attention gates"
    if set(entries(config.layer_types)) != {"attention"}:
        return f"the page does not implement layer_types {config.layer_types!r}"
    for name, own in (("mask", model.mask), ("layers", model.layers)):
        if own is not None:
            return f"the model has its own {name}, which is Python code"
    if config.dtype != "float32":
        return f"the model computes in {config.dtype}, which JavaScript does not have"
    return None


def named_weights(params: Any) -> dict[str, Float[np.ndarray, "..."]]:
    """Returns {path such as "blocks/attention/query/kernel": float32 array}."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {_path(path): np.asarray(leaf, np.float32) for path, leaf in found}


def packed_weights(params: Any) -> dict[str, dict]:
    """Returns the rounded weights as JSON; see `rounded` for the rounding."""
    weights = named_weights(params)
    eight_bits = _is_large(weights.values())
    return {name: _packed(name, x, eight_bits) for name, x in weights.items()}


def rounded(params: Any) -> Any:
    """Returns the weights that the page computes with.

    Up to `MOST_EXACT` parameters, matrices are rounded to float16. In a larger model they are
    rounded to 8 bits with one scale for each output feature of a kernel and for each token vector.
    Vectors (biases and scales of norms) are not rounded.
    """
    eight_bits = _is_large(jax.tree.leaves(params))

    def at(path: tuple, leaf: Any) -> Float[np.ndarray, "..."]:
        array = np.asarray(leaf, np.float32)
        axis = _shared_axis(_path(path))
        if axis is None:
            return array
        if not eight_bits:
            return array.astype(np.float16).astype(np.float32)
        codes, scales = quantize(array, axis)
        return codes * scales

    return jax.tree_util.tree_map_with_path(at, params)


def page_config(config: TransformerConfig, params: Any) -> dict[str, Any]:
    """Returns the fields that the page's forward pass reads.

    Frequencies, slopes and buckets of positions are computed here, so that the page needs no second
    copy of these formulas.
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
    """Returns the fields that may differ between layers."""
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


def _packed(name: str, array: Float[np.ndarray, "..."], eight_bits: bool) -> dict[str, Any]:
    axis = _shared_axis(name)
    if axis is None:
        return pack(array, "float32")
    return pack_int8(array, axis) if eight_bits else pack(array, "float16")


def _shared_axis(name: str) -> int | None:
    """Returns the axis along which numbers share a scale; None for vectors, which stay float32."""
    if name.endswith("/kernel"):
        return -2
    return -1 if name.startswith("embedding/") else None


def _is_large(leaves: Any) -> bool:
    return sum(leaf.size for leaf in leaves) > MOST_EXACT


def _path(path: tuple) -> str:
    return "/".join(str(key.key) for key in path)
