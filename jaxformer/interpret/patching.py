"""What activation patching measures: metrics of a prediction, and sites where a value is replaced.

A metric is a pytree, so a compiled sweep takes it as an argument: other tokens compile nothing. An
own metric is a frozen dataclass with a field `position` and a method `__call__`, registered by
`jax.tree_util.register_dataclass`.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import NO_HOOKS, Hooks
from jaxformer.functional.trees import Weights
from jaxformer.models.check import as_array, checked_hooks, checked_inputs
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel

AXES = ("layer", "head", "position")


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


@jax.tree_util.register_dataclass
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


@jax.tree_util.register_dataclass
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


class Site(NamedTuple):
    """Part of a point's value. An index of −1 means the whole axis.

    Attributes:
        layer: index of the layer.
        head: index of the head; for keys and values, that of the key/value head.
        position: index of the token.
    """

    layer: Int[Array | np.ndarray, "*sites"]
    head: Int[Array | np.ndarray, "*sites"]
    position: Int[Array | np.ndarray, "*sites"]


@dataclass(frozen=True)
class Grid:
    """All sites of a sweep.

    Attributes:
        point: name of the point.
        axes: the names of the axes along which sites differ, in the order of `AXES`.
        shape: shape of the point's value, with the layers as first axis if the point has them.
        has_layers: whether the point is inside the layers.
        has_heads: whether the point's value has an axis of heads.
    """

    point: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    has_layers: bool
    has_heads: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of sites along each of `axes`."""
        index = {"layer": 0, "head": -3, "position": -2}
        return tuple(self.shape[index[name]] for name in self.axes)

    def sites(self) -> Site:
        """Returns all sites, in the order of the entries of an array of shape `sizes`."""
        count = int(np.prod(self.sizes, dtype=int))
        found = dict(zip(self.axes, np.indices(self.sizes), strict=True))
        everywhere = np.full(count, -1)
        return Site(*(found.get(name, everywhere).reshape(-1).astype(np.int32) for name in AXES))

    def where(self, site: Site) -> Bool[Array, "..."]:
        """Returns the entries of the point's value that belong to one site, for `Patch.where`."""
        where = is_at(site.position, self.shape[-2])[:, None]
        if self.has_heads:
            where = is_at(site.head, self.shape[-3])[:, None, None] & where
        where = where[None]  # the batch
        if self.has_layers:
            where = is_at(site.layer, self.shape[0]).reshape(-1, *[1] * where.ndim) & where
        return where


def is_at(index: Int[Array | np.ndarray, ""], size: int) -> Bool[Array, " size"]:
    """Returns which of 0 … size − 1 equal the index; all if it is −1."""
    return (jnp.arange(size, dtype=jnp.int32) == index) | (index < 0)


def pad_sites(sites: Site, multiple: int) -> Site:
    """Repeats the last site until their number is a multiple of `multiple`."""
    missing = -len(sites.layer) % multiple
    return Site(*(np.pad(x, (0, missing), mode="edge") for x in sites))


def metric_of(
    model: LanguageModel, weights: Weights, inputs: Inputs, metric: Metric, hooks: Hooks = NO_HOOKS
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Runs a pass; computes logits only at the position that the metric reads.

    Returns:
        (value of the metric, captured values).
    """
    passed = model.forward(weights, inputs, hooks=hooks)
    hidden = jax.lax.dynamic_slice_in_dim(passed.hidden, metric.position, 1, axis=1)
    return metric(model.logits(weights, hidden)[:, 0]), passed.captured


measure = jax.jit(metric_of, static_argnames="model")


def checked_pair(clean: Any, corrupted: Any, config: ModelConfig) -> tuple[Inputs, Inputs]:
    """Returns the two inputs as arrays.

    Args:
        clean: tokens [batch, length], or `Inputs`.
        corrupted: the same, of the same shape.
        config: the model's config.

    Raises:
        ValueError: an input does not fit the model, or their shapes or segments differ.
    """
    pair = []
    for name, given in (("clean", clean), ("corrupted", corrupted)):
        given = given if isinstance(given, Inputs) else Inputs(given)
        tokens = as_array(name, given.tokens)
        if np.ndim(tokens) < 2 or 0 in np.shape(tokens):
            raise ValueError(
                f"{name} has shape {np.shape(tokens)}; it must be int [batch, length] with at "
                "least one token, or Inputs"
            )
        pair.append(checked_inputs(given, config))
    for field in fields(Inputs):
        shapes = [np.shape(getattr(given, field.name)) for given in pair]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{field.name} of clean has shape {shapes[0]}, that of corrupted {shapes[1]}; they "
                "must be equal, because a value is moved to the same position"
            )
    for name in ("segments", "source_segments"):
        first, second = (getattr(given, name) for given in pair)
        if first is not None and (np.asarray(first) != np.asarray(second)).any():
            raise ValueError(
                f"{name} of clean and corrupted differ; they must be equal, because a value is "
                "moved to the same position"
            )
    return pair[0], pair[1]


def checked_grid(
    model: LanguageModel, point: str, axes: Any, weights: Weights, inputs: Inputs
) -> Grid:
    """Returns the sites of a sweep over a point.

    Args:
        model: the model.
        point: name of the point.
        axes: names from `AXES`; None: all axes that the point has.
        weights: the model's parameters.
        inputs: the tokens and, if it reads one, the source of the model.

    Raises:
        ValueError: the model has no such point, or the point has no such axis.
    """
    hooks = checked_hooks((point,), None, model.points)

    def capture(weights: Weights, inputs: Inputs) -> Shaped[Array, "..."]:
        return model.forward(weights, inputs, hooks=hooks).captured[point]

    shape = jax.eval_shape(capture, weights, inputs).shape
    has_layers = point in model.layer_points
    has_heads = len(shape) - has_layers == 4
    present = zip(AXES, (has_layers, has_heads, True), strict=True)
    accepted = [name for name, is_present in present if is_present]
    axes = accepted if axes is None else axes if isinstance(axes, str) else tuple(axes)
    if not set(axes) <= set(accepted):
        raise ValueError(
            f"axes are {axes!r}; for the point {point!r} they must be a tuple with names from "
            f"{', '.join(accepted)}"
        )
    return Grid(
        point, tuple(name for name in accepted if name in axes), shape, has_layers, has_heads
    )
