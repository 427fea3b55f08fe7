"""The decoder-only Transformer as a Flax module."""

from jaxformer.functional import decoder
from jaxformer.models.autoregressive import Autoregressive
from jaxformer.models.language_model import Transformer


class Decoder(Transformer, Autoregressive):
    """GPT-2, Llama and their relatives, as `config` says; `execution` says how it is run.

    >>> model = Decoder(preset("gpt2-124m"))
    >>> variables = model.init(key, tokens)              # {"params": …}, float32
    >>> logits = jax.jit(model.apply)(variables, tokens)  # [batch, length, vocab_size]
    """

    functional = decoder
