"""The models that read a source, as Flax modules."""

from jaxformer.functional import encoder_decoder, recurrent_encoder_decoder
from jaxformer.models.autoregressive import Sourced
from jaxformer.models.language_model import Transformer


class EncoderDecoder(Transformer, Sourced):
    """The Transformer of Vaswani et al. 2017, and its relatives, as `config` says.

    >>> model = EncoderDecoder(preset("transformer-base"))
    >>> logits = jax.jit(model.apply)(variables, tokens, source=source)
    >>> generate(model, variables, [[begin]] * 2, max_new_tokens=64, source=[[5, 6, 7], [8, 9]])
    """

    functional = encoder_decoder


class RecurrentEncoderDecoder(Sourced):
    """An RNN or LSTM encoder–decoder, with attention or, from one state of fixed size, without.

    >>> model = RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(attends=True))
    """

    functional = recurrent_encoder_decoder
