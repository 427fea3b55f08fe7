"""From a config to the module that it describes."""

from jaxformer.models.config import DecoderConfig, Execution
from jaxformer.models.decoder import Decoder

_MODULES = {DecoderConfig: Decoder}


def build(config, execution: Execution = Execution()):  # noqa: B008 (frozen)
    """The Flax module for a config, chosen by the config's type."""
    if type(config) not in _MODULES:
        known = ", ".join(kind.__name__ for kind in _MODULES)
        raise ValueError(f"config is a {type(config).__name__}; it must be one of {known}")
    return _MODULES[type(config)](config, execution=execution)
