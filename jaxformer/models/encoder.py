"""The encoder as a Flax module."""

from jaxtyping import Array, Float, Int

from jaxformer.functional import encoder
from jaxformer.models.language_model import Transformer


class Encoder(Transformer):
    """BERT and its relatives: every output depends on every token of its document, so nothing is
    generated from it. Logits are of the token *at* a position, to be learnt where it was masked.

    >>> model = Encoder(EncoderConfig(norm_position="post"))
    >>> vectors = model.apply(variables, tokens, method="encode")  # [batch, length, embed_dim]
    >>> vector = model.apply(variables, tokens, method="pooled")   # [batch, embed_dim]
    """

    functional = encoder

    def encode(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch length dim"]:
        """A vector for each token, in its context."""
        inputs = self.inputs(tokens, segments)
        sizes = (self.config, self.execution, *self.rules)
        return encoder.encode(self.weights, inputs.pop("tokens"), *sizes, **inputs).hidden

    def pooled(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch dim"]:
        """A vector for each row, made of that of its first token."""
        return encoder.pooled(self.weights, self.encode(tokens, segments), segments)
