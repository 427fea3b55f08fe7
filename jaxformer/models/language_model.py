"""The abstract module of all models: declares the parameters and calls pure functions with them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional import outputs
from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.cache.key_values import Cache, CacheSize
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.model import Model, weight_shapes
from jaxformer.functional.taps import NO_HOOKS, Hooks, Patch
from jaxformer.functional.trees import Weights
from jaxformer.models.activation_sharding import placement_here
from jaxformer.models.builders.parts import with_layers
from jaxformer.models.check import (
    check_own_mask,
    check_parameters,
    check_variables,
    checked_inputs,
    hooks_of_texts,
    padded_source,
)
from jaxformer.models.config import Execution
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.explicit_axes import has_explicit_axes, in_auto_axes

Variables = Mapping[str, Any]  # {"params": …} or, for decoding, {"prepared": …}
# (resolved config, mask or None) → the value with the functions of the model
Builder = Callable[[Any, Mask | None], Model]


class LanguageModel(nn.Module):
    """Abstract class of all models; a final class names its `config_type` and its `builder`.

    Tokens are int [batch, length], or embeddings, float [batch, length, embed_dim]. A pass has
    dropout, its only randomness, only if `rngs` has a dropout key. An autoregressive model's output
    i predicts token i + 1 and depends on tokens ≤ i; with a prefix, outputs also depend on the
    whole prefix, which the model does not predict.

    Attributes:
        config: a config; its open sizes are resolved once, at construction.
        execution: how the model runs.
        mask: the mask of self-attention (of the decoder, if the model also has an encoder), any
            rule of `functional.attention.masks` or your own. It holds within each document. None:
            the config's mask.
        layers: the layers of a Transformer (of the decoder, if it also has an encoder), each a
            tuple of `functional.Residual` and `functional.Parallel`, with sub-layers of the library
            or of your own. None: those of the config.
        family: the model_type of transformers that the weights came from, or None. `jf.load` sets
            it, `jf.save` stores it, and `jf.export` prefers it if several families have such a
            model.
        generation: the checkpoint's defaults for generating; calls can override them.
        checkpoint_dtype: the dtype of the tensors that the weights came from, or None. `jf.load`
            sets it, `jf.save` stores it, and `jf.export` writes tensors of this dtype.
    """

    config_type: ClassVar[type]
    builder: ClassVar[Builder]
    attends: ClassVar[bool] = True  # whether a mask of self-attention has an effect

    config: ModelConfig
    execution: Execution = Execution()
    mask: Mask | None = None
    layers: tuple[Layer, ...] | None = field(default=None, kw_only=True)
    # Models that differ only in their family are equal, since they compute the same.
    family: str | None = field(default=None, compare=False, kw_only=True)
    generation: GenerationDefaults = field(default=GenerationDefaults(), kw_only=True)
    checkpoint_dtype: str | None = field(default=None, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the type of the config and resolves its open sizes.

        Raises:
            ValueError: the config is of another kind of model.
        """
        if type(self.config) is not self.config_type:
            raise ValueError(
                f"config is of {type(self.config).__name__}; {type(self).__name__} needs "
                f"{self.config_type.__name__}. jaxformer.build(config) chooses the class"
            )
        object.__setattr__(self, "config", self.config.resolved)
        super().__post_init__()

    def setup(self) -> None:
        """Creates the parameters, or takes them from the variables."""
        parts = self.architecture.initializers
        self.weights = {name: self._part(name, init) for name, init in parts.items()}

    @property
    def architecture(self) -> Model:
        """What the model computes, as a value: its embedding, layers and head.

        Raises:
            ValueError: the mask or the layers do not fit the config.
        """
        check_own_mask(self.mask, self.config, self.attends)
        architecture = type(self).builder(self.config, self.mask)
        return architecture if self.layers is None else with_layers(architecture, self.layers)

    def _part(self, name: str, init: Callable[[PRNGKeyArray], Any]) -> Any:
        """Returns some of the parameters: new ones, or the caller's after a check.

        Flax would check the caller's leaf by leaf, but a kernel may have several leaves.
        """
        if not self.has_variable("params", name):
            return self.param(name, init)
        given = self.get_variable("params", name)
        check_parameters(name, given, weight_shapes(self.architecture)[name])
        return given

    @nn.nowrap
    def apply(self, variables: Variables, *args: Any, **kwargs: Any) -> Any:
        """Checks the variables and calls Flax's `apply`."""
        check_variables(variables)
        apply = super().apply
        if has_explicit_axes(variables, args, kwargs):
            apply = in_auto_axes(apply)
        return apply(variables, *args, **kwargs)

    @nn.nowrap
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls Flax's `init`."""
        return in_auto_axes(super().init)(rngs, *args, **kwargs)

    def __call__(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
        source: Shaped[Array, "batch source *dim"] | None = None,
        source_segments: Int[Array, "batch source"] | None = None,
    ) -> Float[Array, "batch length vocab"]:
        """Computes float32 logits.

        Args:
            tokens: int [batch, length], or embeddings.
            segments: 1, 1, 2, 2, … for packed documents, 0 for padding; None: one document.
            token_types: for a model that has types; None: all types are 0.
            source: for a model that reads one, int [batch, source], or embeddings.
            source_segments: 0 for padding of the source; None: no padding.
        """
        inputs = self.inputs(Inputs(tokens, segments, token_types, source, source_segments))
        passed = self.forward(self.weights, inputs, dropout_key=self.dropout_key())
        return self.logits(self.weights, passed.hidden)

    def hidden_states(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
        source: Shaped[Array, "batch source *dim"] | None = None,
        source_segments: Int[Array, "batch source"] | None = None,
    ) -> Float[Array, "batch length dim"]:
        """Computes the input of the head, for losses that apply the head in chunks."""
        inputs = self.inputs(Inputs(tokens, segments, token_types, source, source_segments))
        return self.forward(self.weights, inputs, dropout_key=self.dropout_key()).hidden

    def inspect(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segments: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
        source: Shaped[Array, "batch source *dim"] | None = None,
        source_segments: Int[Array, "batch source"] | None = None,
        *,
        capture: Iterable[str] = (),
        patch: Mapping[str, Patch] | None = None,
    ) -> tuple[Float[Array, "batch length vocab"], dict[str, Array]]:
        """Computes logits and the values at points of the pass.

        Args:
            tokens: as in a call.
            segments: as in a call.
            token_types: as in a call.
            source: as in a call.
            source_segments: as in a call.
            capture: names of points to capture, from `model.points`.
            patch: {name of a point: functional.taps.Patch}, values to replace.

        Returns:
            (logits, captured). captured[name] has the layer as its first axis for points inside the
            layers.
        """
        inputs = self.inputs(Inputs(tokens, segments, token_types, source, source_segments))
        hooks = hooks_of_texts(capture, patch, self.points, inputs)
        key = self.dropout_key()
        passed = self.forward(self.weights, inputs, dropout_key=key, hooks=hooks)
        return self.logits(self.weights, passed.hidden), passed.captured

    def head(self) -> Weights:
        """Returns the output map: kernel [dim, vocab_size] and, if it has them, bias and cap."""
        self.require_bound()
        return self.output_map(self.weights)

    def inputs(self, inputs: Inputs) -> Inputs:
        """Returns the inputs as arrays, after all checks."""
        self.require_bound()
        return checked_inputs(inputs, self.config)

    def dropout_key(self) -> PRNGKeyArray | None:
        """Returns the dropout key of this call of `apply`; None if `rngs` has none."""
        return self.make_rng("dropout") if self.has_rng("dropout") else None

    @nn.nowrap
    def require_bound(self) -> None:
        """Raises ValueError unless the call is inside `apply` or `init`."""
        if self.scope is None:
            raise ValueError(
                f"this {type(self).__name__} has no parameters of its own; call "
                'model.apply(variables, …), for other methods with method="…"'
            )

    # Plain functions of weights, for decoding, training and certificates. `weights` are the params
    # or, with a cache, the result of `prepare`.

    @nn.nowrap
    def run(
        self,
        dropout_key: PRNGKeyArray | None = None,
        hooks: Hooks = NO_HOOKS,
        *,
        is_first: bool = False,
        is_decoding: bool = False,
        keeps_states: bool = False,
    ) -> Run:
        """Returns how a pass of this model runs on the devices in context."""
        placement = placement_here(self.execution.attention)
        execution = self.execution.for_decoding if is_decoding else self.execution
        return Run(execution, dropout_key, hooks, placement, is_first, keeps_states)

    @nn.nowrap
    def forward(
        self,
        weights: Weights,
        inputs: Inputs,
        cache: Cache | None = None,
        *,
        dropout_key: PRNGKeyArray | None = None,
        hooks: Hooks = NO_HOOKS,
        is_first: bool = False,
        keeps_states: bool = False,
    ) -> Forward:
        """Runs one pass over complete sequences or, with a cache, over the next tokens.

        If the cache is empty (`is_first`), the tokens need not attend to its slots. With
        `keeps_states`, the cache keeps the states after each token, so that tokens can be dropped.
        """
        run = self.run(
            dropout_key,
            hooks,
            is_first=is_first,
            is_decoding=cache is not None,
            keeps_states=keeps_states,
        )
        return self.architecture.forward(weights, inputs, run, cache)

    @nn.nowrap
    def start(
        self, weights: Weights, source: Inputs | None, size: CacheSize, hooks: Hooks = NO_HOOKS
    ) -> tuple[Any, dict[str, Array]]:
        """Returns (a cache that has read only the source, the values captured meanwhile).

        Source i serves batch elements i * n to (i + 1) * n - 1, where n = batch_size / sources.
        """
        if not self.architecture.generates:
            raise ValueError(f"a {type(self).__name__} has no cache to start")
        run = self.run(None, hooks, is_decoding=True)
        return self.architecture.start(weights, source, run, size)

    @nn.nowrap
    def prepare(self, params: Weights, parts: int = 1) -> Weights:
        """Repacks the weights for decoding, with each packed kernel split into `parts` parts."""
        if not self.architecture.generates:
            raise ValueError(f"a {type(self).__name__} has no weights for decoding")
        return self.architecture.prepare(params, parts)

    @nn.nowrap
    def logits(
        self, weights: Weights, hidden: Float[Array, "batch length dim"]
    ) -> Float[Array, "batch length vocab"]:
        """Computes float32 logits of hidden states."""
        return outputs.logits(weights, hidden, self.config.logits_cap)

    @nn.nowrap
    def output_map(self, weights: Weights) -> Weights:
        """Returns the head: kernel [dim, vocab_size] and, if it has them, bias and cap."""
        cap = self.config.logits_cap
        return {**outputs.head(weights), **({} if cap is None else {"cap": cap})}

    @nn.nowrap
    def check(self, variables: Variables) -> None:
        """Raises ValueError unless these are variables of this model."""
        check_variables(variables)
        for name, shapes in weight_shapes(self.architecture).items():
            check_parameters(name, variables["params"].get(name, {}), shapes)

    @nn.nowrap
    def read_source(self, source: Any) -> Inputs | None:
        """Returns the checked source, padded; None if the model reads none."""
        return padded_source(source, self.config, type(self).__name__)

    @property
    def points(self) -> tuple[str, ...]:
        """The names of the points to capture or patch, in the order of computation."""
        return self.architecture.points

    @property
    def layer_points(self) -> tuple[str, ...]:
        """The points that every layer has; captured values have the layer as their first axis."""
        return self.architecture.layer_points

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The rule of each sub-layer that reads other tokens."""
        return self.architecture.masks

    @property
    def minimum_prefill(self) -> int:
        """How many tokens at the start of a document must be read in one call.

        The model predicts only tokens after these.
        """
        return max((mask.minimum_prefill for mask in self.masks), default=1)

    @property
    def reach(self) -> int | None:
        """The largest window of any layer, in tokens; None if a layer has no window."""
        slots = [x.slot_size() for x in self.architecture.stack.sublayers]
        windows = [x.reach for x in slots if x is not None]
        reaches = [x for x in windows if x is not None]
        return max(reaches) if reaches and len(reaches) == len(windows) else None
