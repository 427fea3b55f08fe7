"""The models: a module for each class of configs."""

from dataclasses import replace
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int, Shaped

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.outputs import Pooler
from jaxformer.models import config as configs
from jaxformer.models.builders.convolutional import convolutional_of
from jaxformer.models.builders.recurrent import recurrent_encoder_decoder_of, recurrent_of
from jaxformer.models.builders.transformers import decoder_of, encoder_decoder_of, encoder_of
from jaxformer.models.config import Execution
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import Builder, LanguageModel


class Decoder(LanguageModel):
    """GPT-2, Llama and related models. `config` defines the model, `execution` how it runs.

    >>> model = Decoder(preset("gpt2-124m"))
    >>> variables = model.init(key, tokens)              # {"params": …}, float32
    >>> logits = jax.jit(model.apply)(variables, tokens)  # [batch, length, vocab_size]
    """

    builder: ClassVar[Builder] = staticmethod(decoder_of)
    config_type = configs.DecoderConfig
    config: configs.DecoderConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class EncoderDecoder(LanguageModel):
    """The Transformer of Vaswani et al. 2017 and related models.

    >>> model = EncoderDecoder(preset("transformer-base"))
    >>> logits = jax.jit(model.apply)(variables, tokens, source=source)
    >>> generate(model, variables, [[begin]] * 2, max_new_tokens=64, source=[[5, 6, 7], [8, 9]])
    """

    builder: ClassVar[Builder] = staticmethod(encoder_decoder_of)
    config_type = configs.EncoderDecoderConfig
    config: configs.EncoderDecoderConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class Recurrent(LanguageModel):
    """A recurrent language model.

    >>> model = Recurrent(RecurrentConfig(cell="lstm", num_layers=2))
    """

    builder: ClassVar[Builder] = staticmethod(lambda config, mask: recurrent_of(config))
    attends = False
    config_type = configs.RecurrentConfig
    config: configs.RecurrentConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class Convolutional(LanguageModel):
    """A causal convolutional language model, or with causal=False the centred counter-example.

    >>> model = Convolutional(ConvolutionalConfig(num_layers=6, kernel_size=3, dilation_growth=2))
    """

    builder: ClassVar[Builder] = staticmethod(lambda config, mask: convolutional_of(config))
    attends = False
    config_type = configs.ConvolutionalConfig
    config: configs.ConvolutionalConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class RecurrentEncoderDecoder(LanguageModel):
    """An RNN or LSTM encoder–decoder, with attention or with one state of fixed size.

    >>> model = RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(attends=True))
    """

    builder: ClassVar[Builder] = staticmethod(
        lambda config, mask: recurrent_encoder_decoder_of(config)
    )
    attends = False
    config_type = configs.RecurrentEncoderDecoderConfig
    config: configs.RecurrentEncoderDecoderConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)


class Encoder(LanguageModel):
    """BERT and related models, in which every output depends on every token of its document.

    An encoder therefore does not generate text. Its logits are those of the token *at* a position,
    which it learns at masked positions.

    >>> model = Encoder(EncoderConfig(norm_position="post"))
    >>> vectors = model.apply(variables, tokens, method="encode")  # [batch, length, embed_dim]
    >>> vector = model.apply(variables, tokens, method="pooled")   # [batch, embed_dim]
    """

    builder: ClassVar[Builder] = staticmethod(encoder_of)
    config_type = configs.EncoderConfig
    config: configs.EncoderConfig  # pyrefly: ignore[bad-override-mutable-attribute] (frozen)

    def encode(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length dim"]:
        """Computes a contextual vector for each token."""
        inputs = self.inputs(Inputs(tokens, segments, token_types))
        layers = replace(encoder_of(self.config, self.mask), transform=None)
        return layers.forward(self.weights, inputs, self.run(self.dropout_key())).hidden

    def pooled(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch dim"]:
        """Computes a vector for each row from the vector of its first token."""
        pooler = self.require("pooler", self.config.pooler)
        return pooler(self.weights, self.encode(tokens, segments, token_types), segments)

    def classify(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Computes float32 logits of each row's classes."""
        pooler = self.require("num_labels", self.config.num_labels)
        encoded = self.encode(tokens, segments, token_types)
        return pooler.classify(self.weights, encoded, segments)

    @nn.nowrap
    def require(self, name: str, value: object) -> Pooler:
        """Returns the pooler. Raises ValueError unless the config has this part."""
        pooler = encoder_of(self.config, self.mask).pooler
        if not value or pooler is None:
            raise ValueError(f"{name} is {value}; this encoder has no weights for that")
        return pooler


# The module for each class of configs.
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
    mask: Mask | None = None,
    family: str | None = None,
    generation: GenerationDefaults = GenerationDefaults(),  # noqa: B008 (frozen)
    checkpoint_dtype: str | None = None,
) -> LanguageModel:
    """Returns the Flax module for a config, chosen by the config's type.

    Args:
        config: a config of any kind.
        execution: how the model runs.
        mask: see `LanguageModel`.
        family: see `LanguageModel`.
        generation: see `LanguageModel`.
        checkpoint_dtype: see `LanguageModel`.

    Raises:
        ValueError: no module has a config of this type.
    """
    if type(config) not in MODELS:
        accepted = ", ".join(kind.__name__ for kind in MODELS)
        raise ValueError(f"config is a {type(config).__name__}; it must be one of {accepted}")
    model = MODELS[type(config)]
    about: dict[str, Any] = {"family": family, "generation": generation}
    return model(config, execution, mask, **about, checkpoint_dtype=checkpoint_dtype)
