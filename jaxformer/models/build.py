"""From a config to the module that it describes."""

from functools import lru_cache

import jax

from jaxformer.models import config as configs
from jaxformer.models.config import Execution
from jaxformer.models.convolutional import Convolutional
from jaxformer.models.decoder import Decoder
from jaxformer.models.encoder import Encoder
from jaxformer.models.encoder_decoder import EncoderDecoder, RecurrentEncoderDecoder
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.recurrent import Recurrent

_MODULES = {
    configs.ConvolutionalConfig: Convolutional,
    configs.DecoderConfig: Decoder,
    configs.EncoderConfig: Encoder,
    configs.EncoderDecoderConfig: EncoderDecoder,
    configs.RecurrentConfig: Recurrent,
    configs.RecurrentEncoderDecoderConfig: RecurrentEncoderDecoder,
}


def build(config, execution: Execution = Execution(), **options):  # noqa: B008 (frozen)
    """The Flax module for a config, chosen by the config's type; options: other fields of it."""
    if type(config) not in _MODULES:
        accepted = ", ".join(kind.__name__ for kind in _MODULES)
        raise ValueError(f"config is a {type(config).__name__}; it must be one of {accepted}")
    return _MODULES[type(config)](config, execution=execution, **options)


def init(model, key):
    """The model's variables, whatever it reads: no input is needed to make them."""
    return model.init(key, method=LanguageModel.head)


@lru_cache(maxsize=8)
def shape_tree(model) -> dict:
    """The model's parameters, as shapes (no arrays are made)."""
    return jax.eval_shape(lambda key: init(model, key), jax.random.key(0))["params"]


def parameter_count(config) -> int:
    """Parameters of the model, counted off their shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(shape_tree(build(config))))
