"""Metrics of a model's prediction, as values: activation patching measures how they change.

A metric is a pytree, so a compiled sweep takes it as an argument: other tokens compile nothing. An
own metric is a frozen dataclass with a field `position` and a method `__call__`, registered by
`jax.tree_util.register_dataclass`.
"""

from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.functional.inputs import Inputs


@runtime_checkable
class Metric(Protocol):
    """A number computed from the logits at one position.

    Attributes:
        position: the position whose logits the metric reads; negative: from the end.
    """

    position: Any

    def __call__(self, logits: Float[Array, "batch vocab"]) -> Float[Array, ""]:
        """Computes the metric from the logits at the position, the mean over the batch."""
        ...


@partial(
    jax.tree_util.register_dataclass, data_fields=["right", "wrong", "position"], meta_fields=[]
)
@dataclass(frozen=True)
class LogitDifference:
    """The logit of one token minus that of another one, the mean over the batch.

    Attributes:
        right: a token id, or one for each batch element.
        wrong: a token id, or one for each batch element.
        position: the position whose logits are read; negative: from the end.
    """

    right: Any
    wrong: Any
    position: Any = -1

    def __call__(self, logits: Float[Array, "batch vocab"]) -> Float[Array, ""]:
        """Computes the mean of logit[right] − logit[wrong]."""
        return (_entries(logits, self.right) - _entries(logits, self.wrong)).mean()


@partial(jax.tree_util.register_dataclass, data_fields=["token", "position"], meta_fields=[])
@dataclass(frozen=True)
class LogProbability:
    """The natural logarithm of a token's probability, the mean over the batch.

    Attributes:
        token: a token id, or one for each batch element.
        position: the position whose logits are read; negative: from the end.
    """

    token: Any
    position: Any = -1

    def __call__(self, logits: Float[Array, "batch vocab"]) -> Float[Array, ""]:
        """Computes the mean of log softmax(logits)[token]."""
        return _entries(jax.nn.log_softmax(logits), self.token).mean()


def _entries(logits: Float[Array, "batch vocab"], tokens: Any) -> Float[Array, " batch"]:
    return logits[jnp.arange(len(logits), dtype=jnp.int32), jnp.asarray(tokens)]


def checked_metric(metric: Any, inputs: Inputs, vocab_size: int) -> Any:
    """Returns the metric with its position counted from the start.

    Args:
        metric: a `Metric`.
        inputs: the tokens of the model.
        vocab_size: the number of token ids.

    Raises:
        ValueError: it is no metric, its position is outside of the tokens, or a token has no logit.
    """
    is_value = is_dataclass(metric) and not isinstance(metric, type)
    if not is_value or not isinstance(metric, Metric) or jax.tree_util.all_leaves([metric]):
        raise ValueError(
            f"metric is a {type(metric).__name__}; it must be a LogitDifference, a LogProbability "
            "or another registered dataclass with a position and __call__(logits)"
        )
    batch, length = inputs.tokens.shape[:2]
    position = np.asarray(metric.position)
    whole = position.ndim == 0 and np.issubdtype(position.dtype, np.integer)
    if not whole or not -length <= position < length:
        raise ValueError(
            f"metric.position is {metric.position!r}; it must be a whole number from {-length} to "
            f"{length - 1}: the tokens are {length} long"
        )
    for name in ("right", "wrong", "token"):
        _check_tokens(name, getattr(metric, name, 0), batch, vocab_size)
    changed: Any = metric
    return replace(changed, position=int(position) % length)


def _check_tokens(name: str, tokens: Any, batch: int, vocab_size: int) -> None:
    ids = np.asarray(tokens)
    is_int = np.issubdtype(ids.dtype, np.integer)
    in_range = ((ids >= 0) & (ids < vocab_size)).all() if is_int else False
    if ids.shape not in ((), (batch,)) or not in_range:
        raise ValueError(
            f"metric.{name} is {tokens!r}; it must be a token id from 0 to {vocab_size - 1}, or "
            f"one for each of {batch} batch elements"
        )
