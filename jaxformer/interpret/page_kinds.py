"""Config fields for the forward passes of a page, for each kind of model.

`page/kinds.js` selects the forward pass by the name of the architecture.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxformer.functional.attention.scores import alibi_slopes, relative_buckets
from jaxformer.functional.positions import rotary_frequencies
from jaxformer.models.config import (
    ConvolutionalConfig,
    RecurrentConfig,
    RecurrentEncoderDecoderConfig,
    architecture_name,
)
from jaxformer.models.config.encoder import EncoderDecoderConfig, ReadsSource
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.transformer import TransformerConfig

FIELDS = """vocab_size max_length num_layers embed_dim num_heads num_kv_heads head_dim activation
    output_activation norm norm_position parallel_block norm_epsilon embedding_norm residual
    positions position_offset query_key_norm attention_scale attention_softcap output_scale
    logits_softcap tie_embeddings scale_embeddings prefix bidirectional transform""".split()
# Defaults for fields that some architectures lack, because `page/` reads all fields.
_WITHOUT: dict[str, Any] = {
    "norm": "none",
    "norm_position": "pre",
    "positions": "none",
    "embedding_norm": False,
    "scale_embeddings": False,
    "output_scale": None,
    "logits_softcap": None,
    "prefix": 0,
    "transform": False,
}


def page_config(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config fields for the page's forward pass.

    Args:
        config: the resolved config of the model.
        params: the model's parameters, which contain the table of relative positions.
    """
    return _CONFIGS[architecture_name(config)](config, params)


def _fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of `FIELDS` that the config has, and defaults for the others."""
    present = {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}
    return _WITHOUT | present


def _transformer(config: TransformerConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of one stack of Transformer blocks.

    Rotary frequencies, ALiBi slopes and relative position buckets are computed here, so that
    JavaScript does not duplicate these formulas.
    """
    fields = _fields(config)
    fields["layers"] = [_layer(layer) for layer in config.layers]
    if config.positions == "alibi":
        fields["slopes"] = alibi_slopes(config.num_heads)
    if config.positions == "relative":
        table = np.asarray(params["relative_bias"]["table"], np.float32)
        distance = config.relative_distance
        buckets = relative_buckets(len(table), distance, config.bidirectional)
        fields["relative"] = {"distance": distance, "bias": table[buckets].tolist()}
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
        "window": getattr(layer, "window", None),
        "rotary": rotary,
        "first_attention_norm": layer.first_attention_norm,
    }


def _source(config: ReadsSource) -> dict[str, Any]:
    """Returns the fields about the source of an encoder–decoder."""
    return {
        "max_source_length": config.longest_source,
        "source_vocab_size": config.num_source_ids,
        "shares_table": config.shares_table,
    }


def _encoder_decoder(config: EncoderDecoderConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    encoder = _transformer(config.encoder, params["encoder"])
    encoder["transform"] = False  # Only an encoder with an output head has a transform.
    return _transformer(config, params) | _source(config) | {"encoder": encoder}


def _recurrent(config: RecurrentConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    return _fields(config) | {"cell": config.cell, "hidden_dim": config.hidden_dim}


def _recurrent_encoder_decoder(
    config: RecurrentEncoderDecoderConfig, params: Mapping[str, Any]
) -> dict[str, Any]:
    fields = _recurrent(config, params)
    return fields | _source(config) | {"attends": config.attends, "encoder": fields}


def _convolutional(config: ConvolutionalConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    dilations = [config.dilation_growth**layer for layer in range(config.num_layers)]
    return _fields(config) | {"kernel_size": config.kernel_size, "dilations": dilations}


_CONFIGS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "decoder": _transformer,
    "encoder": _transformer,
    "encoder-decoder": _encoder_decoder,
    "recurrent": _recurrent,
    "recurrent-encoder-decoder": _recurrent_encoder_decoder,
    "convolutional": _convolutional,
}
