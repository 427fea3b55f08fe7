"""The encoder as a Flax module."""

import flax.linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.functional import encoder
from jaxformer.models.check import checked_token_types
from jaxformer.models.language_model import Transformer


class Encoder(Transformer):
    """BERT and its relatives: every output depends on every token of its document, so nothing is
    generated from it. Logits are of the token *at* a position, to be learnt where it was masked.

    >>> model = Encoder(EncoderConfig(norm_position="post"))
    >>> vectors = model.apply(variables, tokens, method="encode")  # [batch, length, embed_dim]
    >>> vector = model.apply(variables, tokens, method="pooled")   # [batch, embed_dim]
    """

    functional = encoder

    def __call__(
        self,
        tokens,
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length vocab"]:
        """Logits in float32; token_types: of each token, None: all 0."""
        inputs = self.inputs(tokens, segments, token_types)
        return self.logits(self.weights, self.forward(self.weights, **inputs).hidden)

    def encode(
        self,
        tokens,
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length dim"]:
        """A vector for each token, in its context."""
        inputs = self.inputs(tokens, segments, token_types)
        sizes = (self.config, self.execution, *self.rules)
        return encoder.encode(self.weights, inputs.pop("tokens"), *sizes, **inputs).hidden

    def pooled(
        self,
        tokens,
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch dim"]:
        """A vector for each row, made of that of its first token."""
        self.require("pooler", self.config.pooler)
        return encoder.pooled(self.weights, self.encode(tokens, segments, token_types), segments)

    def classify(
        self,
        tokens,
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Logits of each row's classes, in float32."""
        self.require("num_labels", self.config.num_labels)
        encoded = self.encode(tokens, segments, token_types)
        return encoder.classified(self.weights, encoded, segments)

    @nn.nowrap
    def require(self, name: str, value):
        """Raise ValueError unless the config has this part."""
        if not value:
            raise ValueError(f"{name} is {value}; this encoder has no weights for that")

    def inputs(self, tokens, segments, token_types=None) -> dict:
        inputs = super().inputs(tokens, segments)
        if token_types is None:
            return inputs
        types = checked_token_types(token_types, inputs["tokens"], self.config.num_token_types)
        return {**inputs, "token_types": types}
