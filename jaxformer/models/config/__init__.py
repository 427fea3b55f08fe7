"""Model configs, one class per architecture, and the execution options (`Execution`).

A model config describes only the mathematics: the mode (training or inference), the mesh and random
keys are not part of it. All classes are frozen and hashable. This package does not import JAX, so
that the command line prints its help quickly.
"""

from jaxformer.models.config.baselines import ConvolutionalConfig, RecurrentConfig
from jaxformer.models.config.decoder import DecoderConfig
from jaxformer.models.config.encoder import (
    EncoderConfig,
    EncoderDecoderConfig,
    RecurrentEncoderDecoderConfig,
)
from jaxformer.models.config.execution import Execution
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.presets import PRESETS, preset
from jaxformer.models.config.transformer import RotaryScaling

# Config classes by the name of the architecture, as in `jaxformer train --model` and in saved
# folders.
KINDS = {
    "decoder": DecoderConfig,
    "encoder": EncoderConfig,
    "encoder-decoder": EncoderDecoderConfig,
    "recurrent": RecurrentConfig,
    "convolutional": ConvolutionalConfig,
    "recurrent-encoder-decoder": RecurrentEncoderDecoderConfig,
}


def architecture_name(config: ModelConfig) -> str:
    """Returns the name of a config's architecture, a key of `KINDS`."""
    return next(name for name, kind in KINDS.items() if type(config) is kind)


__all__ = ["KINDS", "PRESETS", "ConvolutionalConfig", "DecoderConfig", "EncoderConfig"]
__all__ += ["EncoderDecoderConfig", "Execution", "RecurrentConfig"]
__all__ += ["RecurrentEncoderDecoderConfig", "RotaryScaling", "architecture_name", "preset"]
