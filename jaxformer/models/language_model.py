"""What every model here is as a Flax module."""

from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from jaxformer.functional.masks import Mask, first_forward_edge
from jaxformer.models.check import (
    check_hooks,
    check_parameters,
    check_variables,
    checked_tokens,
)
from jaxformer.models.config import Execution


class LanguageModel(nn.Module):
    """Owns the parameters and hands them to `functional`, a module of pure functions of that name:
    initializers, hidden_states, head, logits.

    Tokens are int [batch, length], or float [batch, length, embed_dim], embeddings in their place.
    A dropout key in `rngs` means training; without one a pass has no randomness.
    """

    config: Any
    execution: Execution = Execution()

    def setup(self):
        parts = self.functional.initializers(self.config.resolved)
        self.weights = {name: self._part(name, init) for name, init in parts.items()}

    def _part(self, name, init):
        """Some of the parameters, made or as they are given.

        Flax would compare what is given leaf by leaf, and a kernel may be of several leaves.
        """
        if not self.has_variable("params", name):
            return self.param(name, init)
        given = self.get_variable("params", name)
        check_parameters(name, given, jax.eval_shape(init, jax.random.key(0)))
        return given

    @nn.nowrap
    def apply(self, variables, *args, **kwargs):
        """Flax's `apply`, the variables checked first."""
        check_variables(variables)
        return super().apply(variables, *args, **kwargs)

    def __call__(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch length vocab"]:
        """Logits in float32."""
        hidden = self.hidden_states(tokens, segments)
        return self.functional.logits(self.weights, hidden)

    def hidden_states(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch length dim"]:
        """What the head is applied to, for losses that work through it in chunks."""
        return self.run(self.functional.hidden_states, tokens, segments=segments)

    def head(self):
        """The output map's weights: kernel [dim, vocab_size] and, if it has one, bias."""
        self.require_bound()
        return self.functional.head(self.weights)

    @nn.nowrap
    def require_bound(self):
        """Raise ValueError unless this is called through `apply` or `init`."""
        if self.scope is None:
            raise ValueError(
                f"this {type(self).__name__} has no parameters of its own; call "
                'model.apply(variables, …), for other methods with method="…"'
            )

    @property
    def options(self) -> dict:
        """What its functions take besides config and execution."""
        return {}

    def run(self, function, tokens, *source, segments, **options):
        """A pass: the function of the weights, the tokens and, if it reads one, the source."""
        self.require_bound()
        tokens, segments = checked_tokens(tokens, self.config, segments)
        config, key = self.config.resolved, None
        if self.has_rng("dropout"):
            key = self.make_rng("dropout")
        options = {"segments": segments, "dropout_key": key, **self.options, **options}
        return function(self.weights, tokens, *source, config, self.execution, **options)


class Transformer(LanguageModel):
    """A model whose `functional` has named POINTS, and `inspect` beside `hidden_states`.

    mask: who sees whom in self-attention (of the decoder, where there are two), any rule of
    `functional.masks` or your own; it holds within each document. None: what the config says.
    """

    mask: Mask | None = None

    @property
    def options(self) -> dict:
        if self.mask is None:
            return {}
        if not isinstance(self.mask, Mask):
            raise ValueError(
                f"mask is a {type(self.mask).__name__}; it must be a Mask, a rule about positions"
            )
        for name in ("window", "prefix"):
            if getattr(self.config, name, None):
                raise ValueError(
                    f"{name} is {getattr(self.config, name)}; with a mask it must not be set: the "
                    "mask says who sees whom"
                )
        return {"mask": self.mask}

    @property
    def unsupported_reason(self) -> str | None:
        """Why nothing can be generated: the caller's mask lets a token see a later one."""
        if "mask" not in self.options:
            return None
        edge = first_forward_edge(self.mask, min(self.config.max_length, 512))
        return edge and f"its mask lets position {edge[0]} see the later position {edge[1]}"

    @property
    def points(self) -> tuple[str, ...]:
        return self.functional.POINTS

    def inspect(self, tokens, segments=None, *, capture=(), patch=None):
        """Logits and what passed through the points named in `capture`, with `patch` put in place.

        captured[name] has the layer as its first axis for points inside the blocks; patch maps
        names to functional.taps.Patch(where, value). The names are `model.points`.
        """
        return self.run_inspected(tokens, segments=segments, capture=capture, patch=patch)

    def run_inspected(self, tokens, *source, capture, patch, **options):
        check_hooks(capture, patch, self.points)
        hooks = {"capture": tuple(capture), "patch": patch}
        hidden, captured = self.run(self.functional.inspect, tokens, *source, **hooks, **options)
        return self.functional.logits(self.weights, hidden), captured
