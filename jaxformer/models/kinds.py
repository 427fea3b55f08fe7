"""The public model classes, one for each config class."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int, Shaped

from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.outputs import Pooler
from jaxformer.models import config as configs
from jaxformer.models.builders.convolutional import build_convolutional
from jaxformer.models.builders.recurrent import build_recurrent, build_recurrent_encoder_decoder
from jaxformer.models.builders.transformers import (
    build_decoder,
    build_encoder,
    build_encoder_decoder,
)
from jaxformer.models.config import Execution
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import Builder, LanguageModel
from jaxformer.terminal import kind_of


class Decoder(LanguageModel):
    """Decoder-only Transformer: GPT-2, Llama and related models.

    >>> model = Decoder(preset("gpt2-124m"))
    >>> variables = model.init(key, tokens)              # {"params": …}, float32
    >>> logits = jax.jit(model.apply)(variables, tokens)  # [batch, length, vocab_size]
    """

    builder: ClassVar[Builder] = staticmethod(build_decoder)
    config_type = configs.DecoderConfig
    config: configs.DecoderConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class EncoderDecoder(LanguageModel):
    """Encoder-decoder Transformer: Vaswani et al. 2017, T5, BART and related models.

    >>> model = EncoderDecoder(preset("transformer-base"))
    >>> logits = jax.jit(model.apply)(variables, tokens, source=source)
    >>> generate(model, variables, [[begin]] * 2, max_new_tokens=64, source=[[5, 6, 7], [8, 9]])
    """

    builder: ClassVar[Builder] = staticmethod(build_encoder_decoder)
    config_type = configs.EncoderDecoderConfig
    config: configs.EncoderDecoderConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class Recurrent(LanguageModel):
    """Recurrent language model (RNN or LSTM).

    >>> model = Recurrent(RecurrentConfig(cell="lstm", num_layers=2))
    """

    builder: ClassVar[Builder] = staticmethod(lambda config, own: build_recurrent(config))
    accepted_parts = ()
    config_type = configs.RecurrentConfig
    config: configs.RecurrentConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class Convolutional(LanguageModel):
    """Causal convolutional language model.

    >>> model = Convolutional(ConvolutionalConfig(num_layers=6, kernel_size=3, dilation_growth=2))
    """

    builder: ClassVar[Builder] = staticmethod(build_convolutional)
    accepted_parts = ("activation",)
    config_type = configs.ConvolutionalConfig
    config: configs.ConvolutionalConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class RecurrentEncoderDecoder(LanguageModel):
    """RNN or LSTM encoder-decoder, with attention or only with the encoder's last state.

    >>> model = RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(attends=True))
    """

    builder: ClassVar[Builder] = staticmethod(
        lambda config, own: build_recurrent_encoder_decoder(config)
    )
    accepted_parts = ()
    config_type = configs.RecurrentEncoderDecoderConfig
    config: configs.RecurrentEncoderDecoderConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class Encoder(LanguageModel):
    """Bidirectional encoder: BERT and related models.

    Every output depends on every token of its document, so an encoder does not generate text. The
    logits at a position predict the token *at* this position. Training masks this token in the
    input.

    >>> model = Encoder(EncoderConfig(norm_position="post"))
    >>> vectors = model.apply(variables, tokens, method="encode")  # [batch, length, embed_dim]
    >>> vector = model.apply(variables, tokens, method="pooled")   # [batch, embed_dim]
    """

    builder: ClassVar[Builder] = staticmethod(build_encoder)
    config_type = configs.EncoderConfig
    config: configs.EncoderConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)

    def encode(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segment_ids: Int[Array, "batch length"] | None = None,
        token_type_ids: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length dim"]:
        """Computes a contextual vector for each token."""
        inputs = self.inputs(Inputs(tokens, segment_ids, token_type_ids))
        encoder = replace(self.architecture, transform=None)
        return encoder.forward(self.weights, inputs, self.run(self.dropout_key())).hidden

    def pooled(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segment_ids: Int[Array, "batch length"] | None = None,
        token_type_ids: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch dim"]:
        """Computes a vector for each sequence from the vector of its first token."""
        pooler = self.require("pooler", self.config.pooler)
        return pooler(self.weights, self.encode(tokens, segment_ids, token_type_ids), segment_ids)

    def classify(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segment_ids: Int[Array, "batch length"] | None = None,
        token_type_ids: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Computes float32 logits of the classes of each sequence."""
        pooler = self.require("num_labels", self.config.num_labels)
        encoded = self.encode(tokens, segment_ids, token_type_ids)
        return pooler.classify(self.weights, encoded, segment_ids)

    @nn.nowrap
    def require(self, name: str, value: object) -> Pooler:
        """Returns the pooler. Raises ValueError if the config does not set the field `name`."""
        pooler = self.architecture.pooler
        if not value or pooler is None:
            raise ValueError(
                f"{name} of the config is {value}, so this encoder cannot compute this output"
            )
        return pooler


# The model class for each config class.
MODELS: dict[type[ModelConfig], type[LanguageModel]] = {
    module.config_type: module
    for module in (
        *(Decoder, Encoder, EncoderDecoder),
        *(Recurrent, Convolutional, RecurrentEncoderDecoder),
    )
}


def build(
    config: ModelConfig,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    *,
    mask: Any = None,
    layers: tuple[Layer, ...] | None = None,
    activation: Callable[..., Any] | None = None,
    positions: Any = None,
    model_type: str | None = None,
    generation: GenerationDefaults = GenerationDefaults(),  # noqa: B008 (frozen)
    checkpoint_dtype: str | None = None,
) -> LanguageModel:
    """Returns the Flax module for a config, chosen by the config's type.

    Args:
        config: a model config.
        execution: the execution options.
        mask: see `LanguageModel`.
        layers: see `LanguageModel`.
        activation: see `LanguageModel`.
        positions: see `LanguageModel`.
        model_type: see `LanguageModel`.
        generation: see `LanguageModel`.
        checkpoint_dtype: see `LanguageModel`.

    Raises:
        ValueError: The type of the config is unknown.
    """
    if type(config) not in MODELS:
        accepted = ", ".join(kind.__name__ for kind in MODELS)
        raise ValueError(f"config is {kind_of(config)}; it must be one of {accepted}")
    model = MODELS[type(config)]
    return model(
        config,
        execution,
        mask,
        layers=layers,
        activation=activation,
        positions=positions,
        model_type=model_type,
        generation=generation,
        checkpoint_dtype=checkpoint_dtype,
    )
