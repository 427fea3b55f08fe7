"""Builds recurrent models from their configs: token vectors, recurrent layers, and a head."""

from functools import cache

from jaxformer.functional.embedding import Embedding
from jaxformer.functional.layers.cross_attention import LuongAttention
from jaxformer.functional.layers.layer import Layer, Residual
from jaxformer.functional.layers.recurrent import CELLS, Recurrent
from jaxformer.functional.layers.sublayer import Initial
from jaxformer.functional.model import Model
from jaxformer.functional.stack import Stack
from jaxformer.models.builders.parts import head_of
from jaxformer.models.config import RecurrentConfig, RecurrentEncoderDecoderConfig


@cache
def recurrent_of(config: RecurrentConfig) -> Model:
    """Returns the recurrent language model that a resolved config describes.

    Token vectors have a standard deviation of 1/√dim, which suits logits. The first layer's input
    kernel is larger to compensate, because a cell with small inputs learns very slowly at first.
    """
    layers = tuple(_layer(config) for _ in range(config.num_layers))
    initial = Initial(None, is_normed=False, input_stddev=config.embed_dim**-0.5)
    stack = Stack(layers, config.embed_dim, initial=initial)
    embedding = _embedding(config, config.vocab_size, config.max_length)
    return Model(embedding, stack, head_of(config, _width(config)))


@cache
def recurrent_encoder_decoder_of(config: RecurrentEncoderDecoderConfig) -> Model:
    """Returns the recurrent encoder–decoder that a resolved config describes.

    Each document of the decoder begins with the last states of the encoder's layers.

    Unlike in a language model, the first input kernels are not enlarged: W ~ N(0, 1/dim) reads
    vectors of size 1/√dim. With enlarged kernels the model learned the phrases of
    experiments/translate.py less exactly at every learning rate tried.
    """
    dim, initial = config.embed_dim, Initial(None, is_normed=False)
    layers = [_layer(config, number) for number in range(config.num_layers)]
    if config.attends:
        layers[-1] = (*layers[-1], Residual(LuongAttention(), adds=False))
    encoder = tuple(_layer(config) for _ in range(config.num_layers))
    return Model(
        _embedding(config, config.vocab_size, config.max_length),
        Stack(tuple(layers), dim, initial=initial),
        head_of(config, _width(config)),
        encoder=Model(
            _embedding(config, config.num_source_ids, config.longest_source),
            Stack(encoder, dim, initial=initial),
            generates=False,
        ),
        shares_embedding=config.share_embeddings,
    )


def _layer(config: RecurrentConfig, source_layer: int | None = None) -> Layer:
    """Returns a layer, with dropout of its output but not through time (Zaremba et al. 2014)."""
    recurrent = Recurrent(CELLS[config.cell], _width(config), source_layer)
    return (Residual(recurrent, adds=False, dropout=config.dropout),)


def _width(config: RecurrentConfig) -> int:
    return config.hidden_dim or config.embed_dim


def _embedding(config: RecurrentConfig, vocab_size: int, max_length: int) -> Embedding:
    dim, dtype, dropout = config.embed_dim, config.dtype, config.dropout
    return Embedding(vocab_size, dim, max_length, stddev=dim**-0.5, dtype=dtype, dropout=dropout)
