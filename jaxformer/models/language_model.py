"""Base class of all model modules, which declares parameters and calls pure functions."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional import outputs
from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.own_masks import as_mask
from jaxformer.functional.cache.key_values import Cache, CacheSize
from jaxformer.functional.hooks import NO_HOOKS, Hooks, Intervention
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.model import Model, weight_shapes
from jaxformer.functional.position_vectors import as_positions
from jaxformer.functional.trees import Weights
from jaxformer.models.builders.own import OwnParts, check_own_parts
from jaxformer.models.builders.parts import with_layers
from jaxformer.models.check import (
    Sources,
    check_parameters,
    check_variables,
    checked_inputs,
    hooks_of_texts,
    padded_source,
)
from jaxformer.models.config import Execution
from jaxformer.models.config.check import shown
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.sharding.activations import placement_here
from jaxformer.models.sharding.explicit_axes import has_explicit_axes, in_auto_axes
from jaxformer.terminal import kind_of

# Variables are {"params": …} or, for decoding, {"packed": …}.
Variables = Mapping[str, Any]
# A function that takes the resolved config and the user's parts, and returns the architecture.
Builder = Callable[[Any, OwnParts], Model]


class LanguageModel(nn.Module):
    """Base class of all models. Subclasses set `config_type` and `builder`.

    Tokens are int [batch, length], or embeddings, float [batch, length, embed_dim]. Dropout is
    applied only if `rngs` has a dropout key. Output i of an autoregressive model predicts token i +
    1 and depends on tokens ≤ i. In a prefix-LM, all outputs also depend on the whole prefix, which
    the model does not predict.

    Attributes:
        config: the config. Sizes that are None are replaced by their defaults at construction.
        execution: the execution options.
        mask: the mask of self-attention within each document. In an encoder-decoder, this is the
            mask of the decoder. Pass a mask of `functional.attention.masks` or a user-defined
            mask; an array [max_length, max_length] of booleans or of 0 and 1, where 1 means that
            the query (row) may attend to the key (column); or a function of the positions of a
            query and a key, such as `lambda query, key: key <= query`. Arrays and functions are
            converted to masks. If None, the model uses the mask of the config. With `layers`, each
            sub-layer has its own mask.
        activation: an elementwise function that replaces the config's activation of the
            feed-forward layers. With `layers`, each sub-layer has its own activation.
        positions: position vectors that replace the config's positions: an array [max_length,
            embed_dim], or a function (positions, embed_dim) that returns the vectors, where
            positions is int [tokens].
        layers: the layers of a Transformer; in an encoder-decoder, the decoder's layers. Each layer
            is a tuple of `Residual`, `Plain` and `Parallel` of `functional`. Their sub-layers may
            be user-defined. Defaults to the layers of the config.
        model_type: the transformers model_type of the checkpoint that contained the weights, or
            None. `jf.load` sets this field, and `jf.save` stores it. If several model types fit the
            config, `jf.export` prefers this one.
        generation: the checkpoint's defaults for generation, which the arguments of a call
            override.
        checkpoint_dtype: the dtype of the checkpoint's tensors, or None. `jf.load` sets this field,
            `jf.save` stores it, and `jf.export` writes tensors of this dtype.
    """

    config_type: ClassVar[type]
    builder: ClassVar[Builder]
    # The fields among mask, activation and positions that have an effect.
    accepted_parts: ClassVar[tuple[str, ...]] = OwnParts._fields

    config: ModelConfig
    execution: Execution = Execution()
    mask: Mask | None = None
    layers: tuple[Layer, ...] | None = field(default=None, kw_only=True)
    activation: Callable[..., Any] | None = field(default=None, kw_only=True)
    positions: Any = field(default=None, kw_only=True)
    # Models that differ only in their model_type are equal, because they compute the same outputs.
    model_type: str | None = field(default=None, compare=False, kw_only=True)
    generation: GenerationDefaults = field(default=GenerationDefaults(), kw_only=True)
    checkpoint_dtype: str | None = field(default=None, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the type of the config, and replaces its sizes that are None.

        Raises:
            ValueError: The config is not a `config_type`.
        """
        if type(self.config) is not self.config_type:
            raise ValueError(
                f"config is {kind_of(self.config)}; {type(self).__name__} needs "
                f"{self.config_type.__name__}. jaxformer.build(config) chooses the class"
            )
        object.__setattr__(self, "config", self.config.resolved)
        object.__setattr__(self, "mask", as_mask(self.mask))
        object.__setattr__(self, "positions", as_positions(self.positions))
        super().__post_init__()

    def setup(self) -> None:
        """Creates the parameters, unless the variables contain them."""
        parts = self.architecture.initializers
        self.weights = {name: self._part(name, init) for name, init in parts.items()}

    @property
    def architecture(self) -> Model:
        """The architecture of the model: embedding, layers and head.

        Raises:
            ValueError: The mask or the layers do not fit the config.
        """
        own = OwnParts(self.mask, self.activation, self.positions)
        check_own_parts(own, self.config, self.accepted_parts)
        for name, example in (("mask", "Attention"), ("activation", "FeedForward")):
            if getattr(own, name) is not None and self.layers is not None:
                raise ValueError(
                    f"{name} is {shown(getattr(own, name))}, but layers were given too; give each "
                    f"sub-layer its {name}, as in {example}(…, {name}=…)"
                )
        architecture = type(self).builder(self.config, own)
        return architecture if self.layers is None else with_layers(architecture, self.layers)

    def _part(self, name: str, init: Callable[[PRNGKeyArray], Any]) -> Any:
        """Returns the tree of parameters called `name`, such as "embedding".

        If the variables contain these parameters, the method checks their shapes. If not, `init`
        creates the parameters. Flax would check parameters leaf by leaf, but a kernel may consist
        of several leaves.
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
        segment_ids: Int[Array, "batch length"] | None = None,
        token_type_ids: Int[Array, "batch length"] | None = None,
        source: Shaped[Array, "batch source *dim"] | None = None,
        source_segment_ids: Int[Array, "batch source"] | None = None,
    ) -> Float[Array, "batch length vocab"]:
        """Computes float32 logits.

        Args:
            tokens: int [batch, length], or embeddings.
            segment_ids: the number of each token's document, such as 1, 1, 2, 2, and 0 for
                padding. If None, each sequence is one document.
            token_type_ids: token types, for a model with token types; all 0 if None.
            source: the input of the encoder: int [batch, source], or embeddings, float [batch,
                source, embed_dim]. If the config has `source_features`, it must be float [batch,
                source, source_features].
            source_segment_ids: 0 for padding of the source, and 1 for tokens. If None, the source
                has no padding.
        """
        inputs = self.inputs(
            Inputs(tokens, segment_ids, token_type_ids, source, source_segment_ids)
        )
        passed = self.forward(self.weights, inputs, dropout_key=self.dropout_key())
        return self.logits(self.weights, passed.hidden)

    def hidden_states(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segment_ids: Int[Array, "batch length"] | None = None,
        token_type_ids: Int[Array, "batch length"] | None = None,
        source: Shaped[Array, "batch source *dim"] | None = None,
        source_segment_ids: Int[Array, "batch source"] | None = None,
    ) -> Float[Array, "batch length dim"]:
        """Computes the input of the output head, for losses that apply the head in chunks."""
        inputs = self.inputs(
            Inputs(tokens, segment_ids, token_type_ids, source, source_segment_ids)
        )
        return self.forward(self.weights, inputs, dropout_key=self.dropout_key()).hidden

    def inspect(
        self,
        tokens: Shaped[Array, "batch length *dim"],
        segment_ids: Int[Array, "batch length"] | None = None,
        token_type_ids: Int[Array, "batch length"] | None = None,
        source: Shaped[Array, "batch source *dim"] | None = None,
        source_segment_ids: Int[Array, "batch source"] | None = None,
        *,
        capture: Iterable[str] = (),
        patch: Mapping[str, Intervention] | None = None,
    ) -> tuple[Float[Array, "batch length vocab"], dict[str, Array]]:
        """Computes logits, and captures or patches values at hook points.

        Args:
            tokens: see `__call__`.
            segment_ids: see `__call__`.
            token_type_ids: see `__call__`.
            source: see `__call__`.
            source_segment_ids: see `__call__`.
            capture: names of hook points to capture, from `model.hook_points`.
            patch: {name of a hook point: jaxformer.Patch or jaxformer.Edit}, values to change.

        Returns:
            (logits, captured). For hook points inside layers, the first axis of captured[name] is
            the layer.
        """
        inputs = self.inputs(
            Inputs(tokens, segment_ids, token_type_ids, source, source_segment_ids)
        )
        hooks = hooks_of_texts(capture, patch, self.hook_points, inputs)
        key = self.dropout_key()
        passed = self.forward(self.weights, inputs, dropout_key=key, hooks=hooks)
        return self.logits(self.weights, passed.hidden), passed.captured

    def head(self) -> Weights:
        """Returns the output head: kernel [dim, vocab_size], bias or None, and soft cap or None."""
        self.require_bound()
        return self.output_map(self.weights)

    def inputs(self, inputs: Inputs) -> Inputs:
        """Checks the inputs and converts them to arrays."""
        self.require_bound()
        return checked_inputs(inputs, self.config)

    def dropout_key(self) -> PRNGKeyArray | None:
        """Returns the dropout key of this call of `apply`, or None."""
        return self.make_rng("dropout") if self.has_rng("dropout") else None

    @nn.nowrap
    def require_bound(self) -> None:
        """Raises ValueError if the module is called outside `apply` and `init`."""
        if self.scope is None:
            raise ValueError(
                f"{kind_of(self)} does not store parameters; call "
                'model.apply(variables, …), with method="…" for other methods'
            )

    # The following methods are pure functions of their arguments, so other modules can use them
    # without Flax. `weights` are the parameters or, with a cache, the result of `pack_weights`.

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
        """Returns the settings of a forward pass, such as the placement on devices."""
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
        """Runs one forward pass over complete sequences or, with a cache, over the next tokens.

        If the cache is empty (`is_first`), the tokens attend only to each other. With
        `keeps_states`, the cache stores recurrent states after each token, so that tokens can be
        dropped.
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
    def init_cache(
        self, weights: Weights, source: Inputs | None, size: CacheSize, hooks: Hooks = NO_HOOKS
    ) -> tuple[Cache, dict[str, Array]]:
        """Returns an empty cache with the encoded sources, and the encoder's captured values.

        Batch elements i * n to (i + 1) * n - 1 use source i, where n is the batch size divided by
        the number of sources.
        """
        if not self.architecture.generates:
            raise ValueError(f"{kind_of(self)} cannot decode, so it does not have a cache")
        run = self.run(None, hooks, is_decoding=True)
        return self.architecture.init_cache(weights, source, run, size)

    @nn.nowrap
    def pack_weights(self, params: Weights, parts: int = 1) -> Weights:
        """Repacks the weights for decoding.

        Each weight matrix is split into `parts` parts, so that CPU cores work in parallel.
        """
        if not self.architecture.generates:
            raise ValueError(f"{kind_of(self)} cannot decode, so its weights cannot be packed")
        return self.architecture.pack_weights(params, parts)

    @nn.nowrap
    def logits(
        self, weights: Weights, hidden: Float[Array, "batch length dim"]
    ) -> Float[Array, "batch length vocab"]:
        """Computes float32 logits of hidden states."""
        return outputs.logits(weights, hidden, self.config.logits_softcap)

    @nn.nowrap
    def output_map(self, weights: Weights) -> Weights:
        """Returns the output head: kernel [dim, vocab_size], bias or None, and soft cap or None."""
        cap = self.config.logits_softcap
        return {**outputs.head(weights), **({} if cap is None else {"cap": cap})}

    @nn.nowrap
    def check(self, variables: Variables) -> None:
        """Raises ValueError unless the variables fit this model."""
        check_variables(variables)
        for name, shapes in weight_shapes(self.architecture).items():
            check_parameters(name, variables["params"].get(name, {}), shapes)

    @nn.nowrap
    def read_source(self, source: Sources | None) -> Inputs | None:
        """Checks and pads the source; returns None for a model without a source."""
        return padded_source(source, self.config, type(self).__name__)

    @property
    def hook_points(self) -> tuple[str, ...]:
        """The names of all hook points, in order of computation."""
        return self.architecture.hook_points

    @property
    def layer_hook_points(self) -> tuple[str, ...]:
        """The hook points inside layers; captured values have the layer as first axis."""
        return self.architecture.layer_hook_points

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The masks of all sub-layers that have a mask."""
        return self.architecture.masks

    @property
    def minimum_prefill(self) -> int:
        """Number of tokens at the start of a document that the model must process in one call.

        The model does not predict these tokens.
        """
        return max((mask.minimum_prefill for mask in self.masks), default=1)

    @property
    def reach(self) -> int | None:
        """The largest window of all layers, in tokens; None if a layer lacks a window."""
        slots = [x.key_value_size() for x in self.architecture.stack.sublayers]
        windows = [x.reach for x in slots if x is not None]
        reaches = [x for x in windows if x is not None]
        return max(reaches) if reaches and len(reaches) == len(windows) else None
