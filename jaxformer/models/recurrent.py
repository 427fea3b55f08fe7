"""RNN and LSTM language models as a Flax module."""

from jaxformer.functional import recurrent
from jaxformer.models.autoregressive import Autoregressive


class Recurrent(Autoregressive):
    """A recurrent language model, as its `RecurrentConfig` says.

    >>> model = Recurrent(RecurrentConfig(cell="lstm", num_layers=2))
    """

    functional = recurrent
