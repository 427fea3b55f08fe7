"""GGUF header fields of Gemma 3, which has layers with and without an attention window."""

import math
from types import ModuleType
from typing import Any, NamedTuple

from jaxformer.hub.options import per_layer
from jaxformer.models.config import RotaryScaling
from jaxformer.models.config.transformer import TransformerConfig

# llama.cpp recognizes the 27B model by its 62 layers. For this model alone, it scales attention
# scores by (embed_dim / num_heads) ** -0.5 instead of head_dim ** -0.5.
_LAYERS_OF_27B = 62


class LayerOptions(NamedTuple):
    """The per-layer options that may differ between the layers of a Gemma 3 model."""

    window: int | None
    base: float
    scaling: RotaryScaling | None


def gemma_header(gguf: ModuleType, config: TransformerConfig) -> dict[str, Any]:
    """Returns the header fields for the windows and the rotary embeddings of the layers.

    Raises:
        ValueError: llama.cpp's implementation of Gemma 3 cannot run the model.
    """
    names = ("window", "rotary_base", "rotary_scaling")
    columns = (per_layer(getattr(config, name), config.num_layers) for name in names)
    layers = [LayerOptions(*options) for options in zip(*columns, strict=True)]
    local = {layer for layer in layers if layer.window is not None}
    whole = {layer for layer in layers if layer.window is None}
    for name in ("query_key_value_bias", "attention_output_bias"):
        if getattr(config, name):
            raise _refused(f"{name} is True")
    for what, options in (("with a window", local), ("without a window", whole)):
        if len(options) > 1:
            raise _refused(f"layers {what} differ in window, rotary_base or rotary_scaling")
    if any(layer.scaling is not None for layer in local):
        raise _refused("a layer with a window has rotary_scaling")
    if config.activation != "geglu_tanh":
        raise _refused(f"activation is {config.activation!r}, not 'geglu_tanh'")
    _check_scale(config)
    header: dict[str, Any] = {}
    for layer in local:
        header["sliding_window"] = layer.window
        header["sliding_window_pattern"] = [x.window is not None for x in layers]
        header["rope_freq_base_swa"] = header["rope_freq_base"] = layer.base
    for layer in whole:
        header["rope_freq_base"] = layer.base
        if layer.scaling is not None:
            if layer.scaling.kind != "linear":
                raise _refused(f"rotary_scaling is {layer.scaling}")
            header["rope_scaling_type"] = gguf.RopeScalingType.LINEAR
            header["rope_scaling_factor"] = layer.scaling.factor
    if config.logits_softcap is not None:
        header["final_logit_softcapping"] = config.logits_softcap
    return header


def _check_scale(config: TransformerConfig) -> None:
    """Raises ValueError if llama.cpp scales the attention scores differently."""
    # pyrefly: ignore[unsupported-operation] (a resolved config has head_dim)
    usual = config.head_dim**-0.5
    expected = usual
    if config.num_layers == _LAYERS_OF_27B:
        expected = (config.embed_dim // config.num_heads) ** -0.5
    scale = usual if config.attention_scale is None else config.attention_scale
    if not math.isclose(scale, expected, rel_tol=1e-6):
        raise _refused(f"attention_scale is {scale}, but llama.cpp uses {expected}")


def _refused(problem: str) -> ValueError:
    return ValueError(f"{problem}; llama.cpp's architecture GEMMA3 cannot represent this")
