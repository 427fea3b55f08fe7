"""What every model here is as a Flax module."""

from functools import cache
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from jaxformer.functional.contexts import Source
from jaxformer.functional.layers import Forward
from jaxformer.functional.masks import Mask, first_forward_edge
from jaxformer.functional.taps import Hooks
from jaxformer.models.check import check_parameters, check_variables, checked_hooks, checked_tokens
from jaxformer.models.config import Execution


class LanguageModel(nn.Module):
    """Owns the parameters and hands them to `functional`, a module of pure functions of that name:
    initializers, points, forward, head, logits.

    Tokens are int [batch, length], or float [batch, length, embed_dim], embeddings in their place.
    A dropout key in `rngs` means training; without one a pass has no randomness. The sizes that
    `config` leaves open are worked out here, once.
    """

    config: Any
    execution: Execution = Execution()

    def __post_init__(self):
        object.__setattr__(self, "config", self.config.resolved)
        super().__post_init__()

    def setup(self):
        parts = self.functional.initializers(self.config)
        self.weights = {name: self._part(name, init) for name, init in parts.items()}

    def _part(self, name, init):
        """Some of the parameters, made or as they are given.

        Flax would compare what is given leaf by leaf, and a kernel may be of several leaves.
        """
        if not self.has_variable("params", name):
            return self.param(name, init)
        given = self.get_variable("params", name)
        check_parameters(name, given, parameter_shapes(self.functional, self.config)[name])
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
        inputs = self.inputs(tokens, segments)
        return self.logits(self.weights, self.forward(self.weights, **inputs).hidden)

    def hidden_states(
        self, tokens, segments: Int[Array, "batch length"] | None = None
    ) -> Float[Array, "batch length dim"]:
        """What the head is applied to, for losses that work through it in chunks."""
        inputs = self.inputs(tokens, segments)
        return self.forward(self.weights, **inputs).hidden

    def inspect(self, tokens, segments=None, *, capture=(), patch=None):
        """Logits and what passed through the points named in `capture`, with `patch` put in place.

        captured[name] has the layer as its first axis for points inside the layers; patch maps
        names to functional.taps.Patch(where, value). The names are `model.points`.
        """
        hooks = checked_hooks(capture, patch, self.points)
        inputs = self.inputs(tokens, segments)
        passed = self.forward(self.weights, **inputs, hooks=hooks)
        return self.logits(self.weights, passed.hidden), passed.captured

    def head(self):
        """The output map: kernel [dim, vocab_size] and, if it has them, bias and cap."""
        self.require_bound()
        return self.output_map(self.weights)

    def inputs(self, tokens, segments, **source) -> dict:
        """What `forward` takes, checked."""
        self.require_bound()
        tokens, segments = checked_tokens(tokens, self.config, segments)
        key = self.make_rng("dropout") if self.has_rng("dropout") else None
        return {"tokens": tokens, "segments": segments, "dropout_key": key, **source}

    @nn.nowrap
    def require_bound(self):
        """Raise ValueError unless this is called through `apply` or `init`."""
        if self.scope is None:
            raise ValueError(
                f"this {type(self).__name__} has no parameters of its own; call "
                'model.apply(variables, …), for other methods with method="…"'
            )

    # Plain functions of weights: what decoding, training and certificates call.

    @property
    def points(self) -> tuple[str, ...]:
        """The names at which a pass can be looked into, in the order of computation."""
        return self.functional.points(self.config)

    @property
    def layer_points(self) -> tuple[str, ...]:
        """Those of them that every layer has: what is captured there has the layer first."""
        return self.functional.layer_points(self.config)

    @nn.nowrap
    def forward(
        self,
        weights,
        tokens,
        *,
        cache=None,
        segments=None,
        source: Source | None = None,
        token_types=None,
        dropout_key=None,
        hooks: Hooks = Hooks(),  # noqa: B008 (frozen)
    ) -> Forward:
        """One pass over whole rows or, with a cache, over the next tokens.

        weights: the params as they are or, with a cache, prepared.
        """
        inputs = {"segments": segments, "dropout_key": dropout_key, "hooks": hooks}
        if source is not None:
            inputs["source"] = source
        if token_types is not None:
            inputs["token_types"] = token_types
        if cache is not None:
            inputs["cache"] = cache
        model = (self.config, self.execution, *self.rules)
        return self.functional.forward(weights, tokens, *model, **inputs)

    @nn.nowrap
    def check(self, variables):
        """Raise ValueError unless these are variables of this very model."""
        check_variables(variables)
        for name, shapes in parameter_shapes(self.functional, self.config).items():
            check_parameters(name, variables["params"].get(name, {}), shapes)

    @nn.nowrap
    def output_map(self, weights) -> dict:
        """The head: kernel [dim, vocab_size] and, if it has them, bias and cap."""
        cap = {} if self.logits_cap is None else {"cap": self.logits_cap}
        return {**self.functional.head(weights), **cap}

    @nn.nowrap
    def read_source(self, source) -> Source | None:
        """What `start` and `forward` take for it, checked; None: the model reads none."""
        if source is not None:
            raise ValueError(f"source was given, but a {type(self).__name__} reads none")

    @nn.nowrap
    def logits(self, weights, hidden) -> Float[Array, "batch length vocab"]:
        """What the head makes of hidden states, in float32."""
        return self.functional.logits(weights, hidden, self.logits_cap)

    @property
    def logits_cap(self) -> float | None:
        """Logits y become cap · tanh(y / cap); None: they stay as they are."""
        return None

    @property
    def rules(self) -> tuple:
        """What its `forward` takes besides config and execution: masks, if it has attention."""
        return ()


@cache
def parameter_shapes(functional, config) -> dict:
    """The parameters that a model makes, by the name of their part, as shapes."""
    key = jax.random.key(0)
    return {name: jax.eval_shape(x, key) for name, x in functional.initializers(config).items()}


class Transformer(LanguageModel):
    """A model whose tokens attend to one another.

    mask: who sees whom in self-attention (of the decoder, where there are two), any rule of
    `functional.masks` or your own; it holds within each document. None: what the config says.
    """

    mask: Mask | None = None

    @property
    def rules(self) -> tuple:
        return (self.self_attention_masks,)

    @property
    def logits_cap(self) -> float | None:
        return self.config.logits_cap

    @property
    def self_attention_masks(self) -> tuple[Mask, ...]:
        """Who sees whom, layer by layer."""
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise ValueError(
                f"mask is a {type(self.mask).__name__}; it must be a Mask, a rule about positions"
            )
        for name in ("window", "prefix"):
            if self.mask is not None and getattr(self.config, name, None):
                raise ValueError(
                    f"{name} is {getattr(self.config, name)}; with a mask it must not be set: the "
                    "mask says who sees whom"
                )
        layers = self.config.layers
        rules = {
            layer: self.functional.self_attention_mask(layer, self.mask)
            for layer in dict.fromkeys(layers)
        }
        return tuple(rules[layer] for layer in layers)

    @property
    def unsupported_reason(self) -> str | None:
        """Why nothing can be generated: the caller's mask lets a token see a later one."""
        if self.mask is None:
            return None
        rule = self.self_attention_masks[0]
        edge = first_forward_edge(rule, min(self.config.max_length, 512))
        return edge and f"its mask lets position {edge[0]} see the later position {edge[1]}"

    @property
    def minimum_prefill(self) -> int:
        return max(mask.minimum_prefill for mask in self.self_attention_masks)

    @property
    def reach(self) -> int | None:
        reaches = [mask.reach for mask in self.self_attention_masks]
        return None if None in reaches else max(reaches)
