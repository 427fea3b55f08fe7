"""Builds recurrent models from their configs: token vectors, recurrent layers, and a head."""

from functools import cache

from jaxformer.functional.embedding import Embedding, InputVectors, TokenVectors
from jaxformer.functional.layers.cross_attention import LuongAttention
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.layers.plain import Plain
from jaxformer.functional.layers.recurrent import CELLS, Recurrent
from jaxformer.functional.model import Model
from jaxformer.functional.stack import Stack
from jaxformer.models.builders.parts import build_head, build_source_vectors
from jaxformer.models.config import RecurrentConfig, RecurrentEncoderDecoderConfig


@cache
def build_recurrent(config: RecurrentConfig) -> Model:
    """Builds the recurrent language model of a config from `ModelConfig.resolved`.

    Token vectors have a standard deviation of 1/√dim, so that the logits of tied embeddings have a
    magnitude of at most about 1. A cell with such small inputs would initially learn very slowly,
    so the first layer has a larger input kernel.
    """
    layers = tuple(_layer(config) for _ in range(config.num_layers))
    stack = Stack(layers, config.embed_dim, input_stddev=config.embed_dim**-0.5)
    embedding = _embedding(config, TokenVectors(config.vocab_size), config.max_length)
    return Model(embedding, stack, build_head(config, _width(config)))


@cache
def build_recurrent_encoder_decoder(config: RecurrentEncoderDecoderConfig) -> Model:
    """Builds the recurrent encoder-decoder of a config from `ModelConfig.resolved`.

    At the start of each document, layer i of the decoder starts from the state of the encoder's
    layer i after the last source token.

    The input kernels of the first layers are drawn from N(0, 1/dim), although token vectors have a
    standard deviation of 1/√dim. With larger initial input kernels, as in the recurrent language
    model, the encoder-decoder learned the phrases of experiments/translate.py less accurately at
    every learning rate tried.
    """
    layers = [_layer(config, number) for number in range(config.num_layers)]
    if config.attends:
        layers[-1] = (*layers[-1], Plain(LuongAttention()))
    encoder = tuple(_layer(config) for _ in range(config.num_layers))
    return Model(
        _embedding(config, TokenVectors(config.vocab_size), config.max_length),
        Stack(tuple(layers), config.embed_dim),
        build_head(config, _width(config)),
        encoder=Model(
            _embedding(config, build_source_vectors(config), config.longest_source),
            Stack(encoder, config.embed_dim),
            generates=False,
        ),
        shares_embedding=config.shares_table,
    )


def _layer(config: RecurrentConfig, source_layer: int | None = None) -> Layer:
    """Builds a layer with dropout on its output, but not on its state (Zaremba et al. 2014)."""
    recurrent = Recurrent(CELLS[config.cell], _width(config), source_layer)
    return (Plain(recurrent, dropout=config.dropout),)


def _width(config: RecurrentConfig) -> int:
    return config.hidden_dim or config.embed_dim


def _embedding(config: RecurrentConfig, vectors: InputVectors, max_length: int) -> Embedding:
    dim, dtype, dropout = config.embed_dim, config.dtype, config.dropout
    return Embedding(vectors, dim, max_length, stddev=dim**-0.5, dtype=dtype, dropout=dropout)
