"""What every autoregressive model is as a Flax module."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.contexts import Source
from jaxformer.functional.taps import NO_HOOKS, Hooks
from jaxformer.models.check import checked_hooks, checked_source, padded_source
from jaxformer.models.language_model import LanguageModel


class Autoregressive(LanguageModel):
    """Output i predicts token i + 1 and depends on tokens ≤ i (and on all of a prefix, which is
    given). Its `functional` can also go token by token: prepare and start, and forward with a
    cache. This is the interface that decoding and certificates use (`decoding.protocol`).
    """

    @property
    def unsupported_reason(self) -> str | None:
        """Why this very config is not autoregressive after all; None: it is."""
        return None

    @property
    def minimum_prefill(self) -> int:
        """The fewest tokens of a document that can be read at once at its start: they are given,
        and the first that is predicted comes after them."""
        return 1

    @property
    def reach(self) -> int | None:
        """How many tokens back, itself counted, a token sees in each layer; None: all."""
        return None

    @nn.nowrap
    def prepare(self, params, parts: int = 1):
        """The weights as many small steps want them, each matrix cut into so many parts."""
        return self.functional.prepare(params, self.config, parts)

    @nn.nowrap
    def start(
        self, weights, batch_size: int, capacity: int, source=None, hooks: Hooks = NO_HOOKS, **how
    ):
        """(An empty cache, what was captured of the source). weights: the params as they are, or
        prepared."""
        return self.functional.start(self.config, batch_size, capacity, **how), {}


class Sourced(Autoregressive):
    """An autoregressive model that reads a source first, all of it: int [batch, source length], or
    embeddings in its place, with 0 in source_segments for padding."""

    def __call__(
        self,
        tokens,
        segments: Int[Array, "batch length"] | None = None,
        source=None,
        source_segments: Int[Array, "batch source_length"] | None = None,
    ) -> Float[Array, "batch length vocab"]:
        """Logits in float32; output i predicts token i + 1 from the source and tokens ≤ i."""
        inputs = self.inputs(tokens, segments, source, source_segments)
        return self.logits(self.weights, self.forward(self.weights, **inputs).hidden)

    def hidden_states(self, tokens, segments=None, source=None, source_segments=None):
        """What the head is applied to, for losses that work through it in chunks."""
        inputs = self.inputs(tokens, segments, source, source_segments)
        return self.forward(self.weights, **inputs).hidden

    def inspect(
        self, tokens, segments=None, source=None, source_segments=None, *, capture=(), patch=None
    ):
        """Logits, and what passed through points of encoder and decoder: see
        `LanguageModel.inspect`."""
        hooks = checked_hooks(capture, patch, self.points)
        inputs = self.inputs(tokens, segments, source, source_segments)
        passed = self.forward(self.weights, **inputs, hooks=hooks)
        return self.logits(self.weights, passed.hidden), passed.captured

    def inputs(self, tokens, segments, source=None, source_segments=None) -> dict:
        read = checked_source(source, self.config, source_segments, len(tokens))
        return super().inputs(tokens, segments, source=Source(*read))

    @nn.nowrap
    def read_source(self, source) -> Source:
        """Sources given as lists of ids of any lengths, or as an array."""
        ids, segments = padded_source(source, self.config, type(self).__name__)
        return Source(jnp.asarray(ids), None if segments is None else jnp.asarray(segments))

    @nn.nowrap
    def start(
        self, weights, batch_size: int, capacity: int, source=None, hooks: Hooks = NO_HOOKS, **how
    ):
        """(A cache that has read the source, what was captured of the encoder); each source serves
        batch_size / sources rows."""
        sizes = (self.config, self.execution, batch_size, capacity)
        return self.functional.start(weights, source, *sizes, hooks=hooks, **how)
