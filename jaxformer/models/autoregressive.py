"""What every autoregressive model is as a Flax module."""

import flax.linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.models.check import checked_source, padded_source
from jaxformer.models.language_model import LanguageModel


class Autoregressive(LanguageModel):
    """Output i predicts token i + 1 and depends on tokens ≤ i (and on all of a prefix, which is
    given). Its `functional` can also go token by token: prepare, start and advance.
    """

    # The face that decoding knows: plain functions of weights and cache, no parameters made.

    @property
    def unsupported_reason(self) -> str | None:
        """Why this very config is not autoregressive after all; None: it is."""
        return None

    @property
    def minimum_prefill(self) -> int:
        """The fewest tokens of a document that can be read at once at its start: they are given,
        and the first that is predicted comes after them."""
        return 1

    @nn.nowrap
    def read_source(self, source):
        """What `start` takes for it."""
        if source is not None:
            raise ValueError(f"source was given, but a {type(self).__name__} reads none")

    @nn.nowrap
    def prepare(self, params, parts: int = 1):
        """The weights as many small steps want them, each matrix cut into so many parts."""
        return self.functional.prepare(params, self.config.resolved, parts)

    @nn.nowrap
    def start(self, weights, batch_size: int, capacity: int, source=None):
        """An empty cache. weights, here and below: the params as they are, or prepared."""
        return self.functional.start(self.config.resolved, batch_size, capacity)

    @nn.nowrap
    def advance(self, weights, tokens, cache, segments=None, last_only: bool = False):
        """Logits of the new tokens (of the last alone on request) and the cache after them."""
        config = self.config.resolved
        options = {"segments": segments, **self.options}
        hidden, cache = self.functional.advance(weights, tokens, cache, config, **options)
        return self.functional.logits(weights, hidden[:, -1:] if last_only else hidden), cache


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
        hidden = self.hidden_states(tokens, segments, source, source_segments)
        return self.functional.logits(self.weights, hidden)

    def hidden_states(self, tokens, segments=None, source=None, source_segments=None):
        """What the head is applied to, for losses that work through it in chunks."""
        source, source_segments = checked_source(source, self.config, source_segments, len(tokens))
        how = {"segments": segments, "source_segments": source_segments}
        return self.run(self.functional.hidden_states, tokens, source, **how)

    @nn.nowrap
    def read_source(self, source):
        """(ids, segments) of sources given as lists of ids of any lengths, or as an array."""
        return padded_source(source, self.config, type(self).__name__)

    @nn.nowrap
    def start(self, weights, batch_size: int, capacity: int, source=None):
        """A cache that has read the source; each source serves batch_size / sources rows."""
        ids, segments = source
        config = self.config.resolved
        return self.functional.start(
            weights, ids, config, self.execution, batch_size, capacity, source_segments=segments
        )
