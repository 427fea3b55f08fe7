"""The values that a pass takes and returns: what is read, how it runs, and the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.placement import OneDevice, Placement
from jaxformer.functional.taps import NO_HOOKS, Hooks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What a model reads in one pass.

    Attributes:
        tokens: ids, int [batch, length], or embeddings, float [batch, length, dim].
        segments: int [batch, length], 1, 1, 2, 2, … for packed documents, 0 for padding; None: one
            document, or with a cache the current document of each row.
        token_types: int [batch, length], for a model that has types; None: all 0.
        source: ids, int [batch, source], or embeddings, float [batch, source, dim], for a model
            that reads a source; None with a cache, which has read it.
        source_segments: int [batch, source], 0 for padding; None: no padding.
    """

    # Not annotated as arrays: before the checks they may be lists, and JAX fills in placeholders.
    tokens: Any
    segments: Any = None
    token_types: Any = None
    source: Any = None
    source_segments: Any = None

    def of_source(self) -> "Inputs":
        """Returns the source as the inputs of an encoder."""
        return Inputs(self.source, self.source_segments)


@runtime_checkable
class ExecutionOptions(Protocol):
    """How models run; see `models.config.Execution`."""

    @property
    def attention(self) -> str:
        """The implementation of attention."""

    @property
    def remat(self) -> str:
        """What the backward pass recomputes."""

    def scans(self, num_layers: int, few_tokens: bool) -> bool:
        """Returns whether a scan runs the layers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Run:
    """How a pass runs; apart from dropout and hooks it does not change the result.

    Attributes:
        execution: the implementation of attention, the loop over layers and the rematerialization
            (`models.config.Execution`).
        dropout_key: a random key, which means training; None: no dropout.
        hooks: points to capture and patch.
        placement: where the values lie on devices.
        is_first: whether the cache is empty. Many new tokens then attend to each other only; few of
            them read the slots anyway.
        keeps_states: whether the cache keeps the states after each token of the pass.
    """

    execution: ExecutionOptions = field(metadata={"static": True})
    dropout_key: PRNGKeyArray | None = None
    hooks: Hooks = NO_HOOKS
    placement: Placement = field(default=OneDevice(), metadata={"static": True})
    is_first: bool = field(default=False, metadata={"static": True})
    keeps_states: bool = field(default=False, metadata={"static": True})

    def of_encoder(self, prefix: str, dropout_key: PRNGKeyArray | None) -> "Run":
        """Returns the run of an encoder, whose points have names that start with `prefix`."""
        hooks = self.hooks.within(prefix)
        return replace(self, dropout_key=dropout_key, hooks=hooks)


class Forward(NamedTuple):
    """Result of a pass.

    Attributes:
        hidden: the input of the head.
        captured: {name: value} for the captured points. Values from points inside the layers have
            the layer as their first axis.
        cache: the cache after these tokens; None if the pass had none.
        auxiliary: sums over the layers for the objective, by name; see `layers.sublayer.Output`.
        states: the state of each layer after the tokens, by the names of its sub-layers.
    """

    hidden: Float[Array, "batch length dim"]
    captured: dict[str, Array]
    cache: Any = None
    auxiliary: Mapping[str, Array] = MappingProxyType({})
    states: Sequence[Mapping[str, Any]] = ()
