"""What a model's mathematics is (a config for each kind) and how it is run (`Execution`).

All are frozen, hashable and free of JAX, so that a command line can show them at once. A config
holds no mode, mesh or key.
"""

from jaxformer.models.config.convolutional import ConvolutionalConfig
from jaxformer.models.config.decoder import DecoderConfig
from jaxformer.models.config.encoder import EncoderConfig
from jaxformer.models.config.encoder_decoder import (
    EncoderDecoderConfig,
    RecurrentEncoderDecoderConfig,
)
from jaxformer.models.config.execution import Execution
from jaxformer.models.config.presets import PRESETS, preset
from jaxformer.models.config.recurrent import RecurrentConfig
from jaxformer.models.config.rotary import RotaryScaling

# What a run or a saved folder calls the kind of its model, and `jaxformer train --model` too.
KINDS = {
    "decoder": DecoderConfig,
    "encoder": EncoderConfig,
    "encoder-decoder": EncoderDecoderConfig,
    "recurrent": RecurrentConfig,
    "convolutional": ConvolutionalConfig,
    "recurrent-encoder-decoder": RecurrentEncoderDecoderConfig,
}


def kind_of(config) -> str:
    """The kind of a model by its config."""
    return next(name for name, kind in KINDS.items() if type(config) is kind)


__all__ = ["KINDS", "PRESETS", "ConvolutionalConfig", "DecoderConfig", "EncoderConfig"]
__all__ += ["EncoderDecoderConfig", "Execution", "RecurrentConfig"]
__all__ += ["RecurrentEncoderDecoderConfig", "RotaryScaling", "kind_of", "preset"]
