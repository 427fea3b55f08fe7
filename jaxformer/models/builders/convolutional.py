"""Builds convolutional models from their configs: x + act(Convolution(Norm(x))) in each layer."""

from functools import cache

from jaxformer.functional.embedding import Embedding, embedding_stddev
from jaxformer.functional.layers.convolution import Convolution, causal_offsets, centred_offsets
from jaxformer.functional.layers.layer import Residual
from jaxformer.functional.layers.sublayer import Initial
from jaxformer.functional.model import Model
from jaxformer.functional.stack import Stack
from jaxformer.models.builders.parts import head_of, norm_of
from jaxformer.models.config import ConvolutionalConfig


@cache
def convolutional_of(config: ConvolutionalConfig) -> Model:
    """Returns the convolutional language model that a config describes.

    The dilation of a layer is `dilation_growth` to the power of its number.
    """
    dim, norm = config.embed_dim, norm_of(config)
    offsets = causal_offsets if config.causal else centred_offsets
    layers = tuple(
        (
            Residual(
                Convolution(
                    offsets(config.kernel_size, config.dilation_growth**number), config.activation
                ),
                norm,
                adds=config.residual,
                dropout=config.dropout,
            ),
        )
        for number in range(config.num_layers)
    )
    stddev = embedding_stddev(dim, passes_on=not config.residual and norm is None)
    initial = Initial(
        config.num_layers if config.residual else None,
        norm is not None,
        stddev if norm is None else 1.0,
    )
    return Model(
        Embedding(
            config.vocab_size,
            dim,
            config.max_length,
            stddev=stddev,
            dtype=config.dtype,
            dropout=config.dropout,
        ),
        Stack(layers, dim, norm, initial=initial),
        head_of(config, dim),
    )
