"""The decoder-only Transformer as a Flax module: it owns the parameters, `functional` computes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional import decoder
from jaxformer.models.config import DecoderConfig, Execution


class Decoder(nn.Module):
    """GPT-2, Llama and their relatives, as `config` says; `execution` says how it is run.

    >>> model = Decoder(preset("gpt2-124m"))
    >>> variables = model.init(key, tokens)              # {"params": …}, float32
    >>> logits = jax.jit(model.apply)(variables, tokens)  # [batch, length, vocab_size]

    Tokens are int [batch, length], or float [batch, length, embed_dim], embeddings in their place.
    A dropout key in `rngs` means training; without one a pass has no randomness.
    """

    config: DecoderConfig
    execution: Execution = Execution()

    def setup(self):
        parts = decoder.decoder_initializers(self.config.complete)
        self.weights = {name: self.param(name, init) for name, init in parts.items()}

    def __call__(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch length vocab"]:
        """Logits in float32; output i predicts token i + 1 and depends on tokens ≤ i."""
        return self._logits(self.hidden_states(tokens, segments))

    def hidden_states(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch length dim"]:
        """What the head is applied to, for losses that work through it in chunks."""
        return self._run(tokens, segments)[0]

    def inspect(self, tokens, segments=None, *, capture=(), patch=None):
        """Logits and what passed through the points named in `capture`, with `patch` put in place.

        captured[name] has the layer as its first axis for points inside the blocks; patch maps
        names to functional.taps.Patch(where, value). The names are `Decoder.points`.
        """
        for name in (*capture, *(patch or {})):
            if name not in self.points:
                raise ValueError(f"no point is named {name!r}; there are {', '.join(self.points)}")
        hidden, captured = self._run(tokens, segments, capture=tuple(capture), patch=patch)
        return self._logits(hidden), captured

    def head(self):
        """The output map's weights: kernel [embed_dim, vocab_size] and, if it has one, bias."""
        return decoder.head(self.weights)

    points = decoder.DECODER_POINTS

    def _run(self, tokens, segments, **hooks):
        check_tokens(tokens, self.config, segments)
        return decoder.hidden_states(
            self.weights,
            tokens,
            self.config.complete,
            self.execution,
            segments=segments,
            dropout_key=self.make_rng("dropout") if self.has_rng("dropout") else None,
            **hooks,
        )

    def _logits(self, hidden):
        return decoder.logits(self.weights, hidden)

    # The autoregressive face (decoding): plain functions of weights and cache, no parameters made.

    @nn.nowrap
    def prepare(self, params):
        """The weights as many small steps want them."""
        return decoder.prepare(params, self.config.complete)

    @nn.nowrap
    def start(self, weights, batch_size: int, capacity: int, source=None):
        """An empty cache. weights, here and below: the params as they are, or prepared."""
        if source is not None:
            raise ValueError("source was given, but a decoder-only model reads none")
        return decoder.start(self.config.complete, batch_size, capacity)

    @nn.nowrap
    def advance(self, weights, tokens, cache, segments=None, last_only: bool = False):
        """Logits of the new tokens (of the last alone on request) and the cache after them."""
        config = self.config.complete
        hidden, cache = decoder.advance(weights, tokens, cache, config, segments=segments)
        return decoder.logits(weights, hidden[:, -1:] if last_only else hidden), cache


def check_tokens(tokens, config, segments=None):
    """Refuse what can be seen to be wrong; ids are looked at where they are known (not in jit)."""
    is_id = jnp.issubdtype(tokens.dtype, jnp.integer)
    if tokens.ndim != (2 if is_id else 3) or (not is_id and tokens.shape[2] != config.embed_dim):
        raise ValueError(
            f"tokens are {tokens.dtype} {tokens.shape}; they must be int [batch, length] or float "
            f"[batch, length, {config.embed_dim}] (embeddings)"
        )
    if tokens.shape[1] > config.max_length and segments is None:
        raise ValueError(
            f"tokens are {tokens.shape[1]} long; max_length is {config.max_length} positions"
        )
    if segments is not None and segments.shape != tokens.shape[:2]:
        raise ValueError(f"segments are {segments.shape}; tokens are {tokens.shape[:2]}")
    if is_id and not isinstance(tokens, jax.core.Tracer) and tokens.size:
        known = np.asarray(tokens)  # NumPy: inside a jit, jnp would trace even what is known
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= config.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"tokens hold id {bad}; vocab_size is {config.vocab_size}")
