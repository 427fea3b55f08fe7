"""Arguments and results of a forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.hooks import NO_HOOKS, Hooks
from jaxformer.functional.placement import OneDevice, Placement


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """Inputs of a forward pass.

    Attributes:
        tokens: ids, int [batch, length], or embeddings, float [batch, length, dim]. For an encoder
            of float features: [batch, length, num_features].
        segment_ids: int [batch, length], 1, 1, 2, 2, … for packed documents, 0 for padding. If
            None, each sequence is one document or, with a cache, continues the current document.
        token_type_ids: int [batch, length], for a model with token types; all 0 if None.
        source: the tokens of the encoder, for an encoder-decoder without a cache. With a cache, the
            model reads the cached keys and values of the source instead.
        source_segment_ids: int [batch, source], 0 for padding; None without padding.
    """

    # The arrays have the type `Any`, because callers may pass lists, and because JAX also fills
    # these fields with placeholders.
    tokens: Any
    segment_ids: Any = None
    token_type_ids: Any = None
    source: Any = None
    source_segment_ids: Any = None

    def source_inputs(self) -> "Inputs":
        """Returns the inputs of the encoder: the source and its segment ids."""
        return Inputs(self.source, self.source_segment_ids)


@runtime_checkable
class ExecutionOptions(Protocol):
    """Interface of execution options; see `models.config.Execution`."""

    @property
    def attention(self) -> str:
        """The implementation of attention."""

    @property
    def remat(self) -> str:
        """The rematerialization policy of the backward pass."""

    def scans(self, num_layers: int, few_tokens: bool) -> bool:
        """Returns whether a scan runs the layers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Run:
    """Options of a forward pass.

    Only `dropout_key` and `hooks` change the result.

    Attributes:
        execution: the implementation of attention, the loop over layers and the rematerialization
            (`models.config.Execution`).
        dropout_key: a random key for dropout in training; None disables dropout.
        hooks: hook points to capture and patch.
        placement: how values are sharded over devices.
        is_first: whether the cache is empty. With an empty cache, a pass over more than a few
            tokens computes attention without reading the cache.
        keeps_states: whether the cache stores recurrent states after each token of the pass.
    """

    execution: ExecutionOptions = field(metadata={"static": True})
    dropout_key: PRNGKeyArray | None = None
    hooks: Hooks = NO_HOOKS
    placement: Placement = field(default=OneDevice(), metadata={"static": True})
    is_first: bool = field(default=False, metadata={"static": True})
    keeps_states: bool = field(default=False, metadata={"static": True})

    def for_encoder(self, prefix: str, dropout_key: PRNGKeyArray | None) -> "Run":
        """Returns the options for an encoder whose hook point names start with `prefix`."""
        hooks = self.hooks.within(prefix)
        return replace(self, dropout_key=dropout_key, hooks=hooks)


class Forward(NamedTuple):
    """Result of a forward pass.

    Attributes:
        hidden: the input of the output head.
        captured: {name: value} for the captured hook points. Values from hook points inside layers
            have the layer as first axis.
        cache: the cache after these tokens; None without a cache.
        auxiliary: terms of the training objective, by name, each summed over the layers; see
            `layers.sublayer.Output`.
        states: for each layer, {name of a sub-layer: state after the tokens}.
    """

    hidden: Float[Array, "batch length dim"]
    captured: dict[str, Array]
    cache: Any = None
    auxiliary: Mapping[str, Array] = MappingProxyType({})
    states: Sequence[Mapping[str, Any]] = ()
