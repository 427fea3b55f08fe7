"""CNN language models as a Flax module."""

from jaxformer.functional import convolution
from jaxformer.models.autoregressive import Autoregressive


class Convolutional(Autoregressive):
    """A causal convolutional language model, or with causal=False the centred counter-example.

    >>> model = Convolutional(ConvolutionalConfig(num_layers=6, kernel_size=3, dilation_growth=2))
    """

    functional = convolution

    @property
    def unsupported_reason(self) -> str | None:
        return None if self.config.causal else "its kernels are centred: they see what is to come"
