"""The decoder-only Transformer as a Flax module."""

from jaxformer.functional import decoder
from jaxformer.models.autoregressive import Autoregressive
from jaxformer.models.check import check_tokens


class Decoder(Autoregressive):
    """GPT-2, Llama and their relatives, as `config` says; `execution` says how it is run.

    >>> model = Decoder(preset("gpt2-124m"))
    >>> variables = model.init(key, tokens)              # {"params": …}, float32
    >>> logits = jax.jit(model.apply)(variables, tokens)  # [batch, length, vocab_size]
    """

    functional = decoder
    points = decoder.POINTS

    def inspect(self, tokens, segments=None, *, capture=(), patch=None):
        """Logits and what passed through the points named in `capture`, with `patch` put in place.

        captured[name] has the layer as its first axis for points inside the blocks; patch maps
        names to functional.taps.Patch(where, value). The names are `Decoder.points`.
        """
        for name in (*capture, *(patch or {})):
            if name not in self.points:
                raise ValueError(f"no point is named {name!r}; there are {', '.join(self.points)}")
        check_tokens(tokens, self.config, segments)
        hidden, captured = decoder.inspect(
            self.weights,
            tokens,
            self.config.complete,
            self.execution,
            segments=segments,
            dropout_key=self.dropout_key(),
            capture=tuple(capture),
            patch=patch,
        )
        return decoder.logits(self.weights, hidden), captured
