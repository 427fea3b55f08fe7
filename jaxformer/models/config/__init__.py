"""Model configs, one class for each kind of model, and the execution options (`Execution`).

A model config describes the mathematics; it holds no mode (training or inference), mesh or random
key. All classes are frozen and hashable. They do not import JAX, so that the command line can print
its help without loading it.
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

# Names of the model kinds, as in `jaxformer train --model`, in runs and in saved folders.
KINDS = {
    "decoder": DecoderConfig,
    "encoder": EncoderConfig,
    "encoder-decoder": EncoderDecoderConfig,
    "recurrent": RecurrentConfig,
    "convolutional": ConvolutionalConfig,
    "recurrent-encoder-decoder": RecurrentEncoderDecoderConfig,
}


def kind_of(config: ModelConfig) -> str:
    """Returns the name of a config's model kind, a key of `KINDS`."""
    return next(name for name, kind in KINDS.items() if type(config) is kind)


__all__ = ["KINDS", "PRESETS", "ConvolutionalConfig", "DecoderConfig", "EncoderConfig"]
__all__ += ["EncoderDecoderConfig", "Execution", "RecurrentConfig"]
__all__ += ["RecurrentEncoderDecoderConfig", "RotaryScaling", "kind_of", "preset"]
