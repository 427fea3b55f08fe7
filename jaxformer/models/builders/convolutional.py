"""Builds convolutional models from their configs: x + act(Convolution(Norm(x))) in each layer."""

from functools import cache

from jaxformer.functional.embedding import Embedding, TokenVectors, embedding_stddev
from jaxformer.functional.layers.convolution import Convolution, causal_offsets
from jaxformer.functional.layers.layer import Residual
from jaxformer.functional.layers.plain import Plain
from jaxformer.functional.model import Model
from jaxformer.functional.stack import Stack
from jaxformer.models.builders.own import NO_OWN_PARTS, OwnParts
from jaxformer.models.builders.parts import build_head, build_norm
from jaxformer.models.config import ConvolutionalConfig


@cache
def build_convolutional(config: ConvolutionalConfig, own: OwnParts = NO_OWN_PARTS) -> Model:
    """Builds the convolutional language model of a config.

    Layer i has the dilation `dilation_growth` ** i.
    """
    dim, norm = config.embed_dim, build_norm(config)
    activation = own.activation or config.activation
    part = Residual if config.residual else Plain
    dilations = (config.dilation_growth**number for number in range(config.num_layers))
    layers = tuple(
        (
            part(
                Convolution(causal_offsets(config.kernel_size, dilation), activation),
                norm,
                dropout=config.dropout,
            ),
        )
        for dilation in dilations
    )
    passes_on = not config.residual and norm is None
    stddev = embedding_stddev(dim, passes_on=passes_on)
    return Model(
        Embedding(
            TokenVectors(config.vocab_size),
            dim,
            config.max_length,
            stddev=stddev,
            dtype=config.dtype,
            dropout=config.dropout,
        ),
        Stack(layers, dim, norm, input_stddev=stddev if passes_on else 1.0),
        build_head(config, dim),
    )
