"""What every autoregressive model is as a Flax module."""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.models.check import check_tokens
from jaxformer.models.config import Execution


class Autoregressive(nn.Module):
    """Owns the parameters and hands them to `functional`, a module of pure functions of that name:
    initializers, hidden_states, head, logits, and, token by token, prepare, start and advance.

    Tokens are int [batch, length], or float [batch, length, embed_dim], embeddings in their place.
    A dropout key in `rngs` means training; without one a pass has no randomness.
    """

    config: Any
    execution: Execution = Execution()

    def setup(self):
        parts = self.functional.initializers(self.config.complete)
        self.weights = {name: self.param(name, init) for name, init in parts.items()}

    def __call__(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch length vocab"]:
        """Logits in float32; output i predicts token i + 1 and depends on tokens ≤ i."""
        return self.functional.logits(self.weights, self.hidden_states(tokens, segments))

    def hidden_states(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch length dim"]:
        """What the head is applied to, for losses that work through it in chunks."""
        check_tokens(tokens, self.config, segments)
        return self.functional.hidden_states(
            self.weights,
            tokens,
            self.config.complete,
            self.execution,
            segments=segments,
            dropout_key=self.dropout_key(),
        )

    def dropout_key(self):
        return self.make_rng("dropout") if self.has_rng("dropout") else None

    def head(self):
        """The output map's weights: kernel [dim, vocab_size] and, if it has one, bias."""
        return self.functional.head(self.weights)

    @property
    def refusal(self) -> str | None:
        """Why this very config is not autoregressive after all; None: it is."""
        return None

    # The face that decoding knows: plain functions of weights and cache, no parameters made.

    @nn.nowrap
    def prepare(self, params):
        """The weights as many small steps want them."""
        return self.functional.prepare(params, self.config.complete)

    @nn.nowrap
    def start(self, weights, batch_size: int, capacity: int, source=None):
        """An empty cache. weights, here and below: the params as they are, or prepared."""
        if source is not None:
            raise ValueError(f"source was given, but a {type(self).__name__} reads none")
        return self.functional.start(self.config.complete, batch_size, capacity)

    @nn.nowrap
    def advance(self, weights, tokens, cache, segments=None, last_only: bool = False):
        """Logits of the new tokens (of the last alone on request) and the cache after them."""
        config = self.config.complete
        hidden, cache = self.functional.advance(weights, tokens, cache, config, segments=segments)
        return self.functional.logits(weights, hidden[:, -1:] if last_only else hidden), cache
