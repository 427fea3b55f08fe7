"""From a config to the module that it describes."""

import jax
import jax.numpy as jnp

from jaxformer.models.config import (
    ConvolutionalConfig,
    DecoderConfig,
    Execution,
    RecurrentConfig,
)
from jaxformer.models.convolutional import Convolutional
from jaxformer.models.decoder import Decoder
from jaxformer.models.recurrent import Recurrent

_MODULES = {
    ConvolutionalConfig: Convolutional,
    DecoderConfig: Decoder,
    RecurrentConfig: Recurrent,
}


def build(config, execution: Execution = Execution()):  # noqa: B008 (frozen)
    """The Flax module for a config, chosen by the config's type."""
    if type(config) not in _MODULES:
        known = ", ".join(kind.__name__ for kind in _MODULES)
        raise ValueError(f"config is a {type(config).__name__}; it must be one of {known}")
    return _MODULES[type(config)](config, execution=execution)


def parameter_count(config) -> int:
    """Parameters of the model, counted off their shapes (no arrays are made)."""
    tree = jax.eval_shape(build(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(tree["params"]))
