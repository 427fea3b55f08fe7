"""Metrics and patch locations (patch sites) of activation patching.

A metric is a function of the logits [batch, length, vocab] of a text, or a `Metric`, which needs
only the logits of one position. A `Metric` is a pytree and an argument of the compiled program,
so a metric with other token ids does not cause a recompilation. A user-defined `Metric` is a
frozen dataclass with a field `position` and a method `__call__`, registered with
`jax.tree_util.register_dataclass`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxformer.functional.hooks import NO_HOOKS, Hooks
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.trees import Weights
from jaxformer.models.check import as_array, checked_hooks, checked_inputs
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel
from jaxformer.terminal import kind_of

AXES = ("layer", "head", "position")


@runtime_checkable
class Metric(Protocol):
    """Base class of metrics, which compute a number from the logits at one position."""

    @property
    def position(self) -> Any:
        """The position whose logits the metric uses; negative positions count from the end."""

    def __call__(self, logits: Float[Array, "batch vocab"]) -> Float[Array, ""]:
        """Computes the metric from the logits at `position`, averaged over the batch."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitDifference:
    """Metric: the logit of one token minus the logit of another token, averaged over the batch.

    Attributes:
        right: a token id, or one id for each batch element.
        wrong: a token id, or one id for each batch element.
        position: the position whose logits the metric uses; negative positions count from the end.
    """

    right: Any
    wrong: Any
    position: Any = -1

    def __call__(self, logits: Float[Array, "batch vocab"]) -> Float[Array, ""]:
        """Computes logit[right] − logit[wrong], averaged over the batch."""
        return (_entries(logits, self.right) - _entries(logits, self.wrong)).mean()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogProbability:
    """Metric: the natural logarithm of a token's probability, averaged over the batch.

    Attributes:
        token: a token id, or one id for each batch element.
        position: the position whose logits the metric uses; negative positions count from the end.
    """

    token: Any
    position: Any = -1

    def __call__(self, logits: Float[Array, "batch vocab"]) -> Float[Array, ""]:
        """Computes log softmax(logits)[token], averaged over the batch."""
        return _entries(jax.nn.log_softmax(logits), self.token).mean()


@jax.tree_util.register_static
@dataclass(frozen=True)
class FunctionMetric:
    """Metric: a function of the logits at all positions.

    Attributes:
        function: function of the logits, float [batch, length, vocab], that returns a number.
        position: not used.
    """

    function: Callable[..., Float[Array, ""]]
    position: int = -1

    def __call__(self, logits: Float[Array, "batch length vocab"]) -> Float[Array, ""]:
        """Computes the metric from the logits of the texts."""
        return self.function(logits)


AnyMetric = Metric | Callable[..., Float[Array, ""]]


def _entries(logits: Float[Array, "batch vocab"], tokens: Any) -> Float[Array, " batch"]:
    return logits[jnp.arange(len(logits), dtype=jnp.int32), jnp.asarray(tokens)]


def checked_metric(metric: Any, inputs: Inputs, vocab_size: int) -> Metric:
    """Checks a metric, and returns a `Metric` with a nonnegative position.

    Args:
        metric: a `Metric`, or a function of the logits.
        inputs: the model's inputs.
        vocab_size: the number of token ids.

    Raises:
        ValueError: `metric` is not a metric, or its position or a token id is out of range.
    """
    if callable(metric) and not is_dataclass(metric) and not isinstance(metric, type | tuple):
        return FunctionMetric(metric)
    is_value = is_dataclass(metric) and not isinstance(metric, type)
    if not is_value or not isinstance(metric, Metric) or jax.tree_util.all_leaves([metric]):
        raise ValueError(
            f"metric is {kind_of(metric)}; it must be a function of the logits, a "
            "LogitDifference, a LogProbability or another registered dataclass with a position and "
            "__call__(logits)"
        )
    batch, length = inputs.tokens.shape[:2]
    position = np.asarray(metric.position)
    whole = position.ndim == 0 and np.issubdtype(position.dtype, np.integer)
    if not whole or not -length <= position < length:
        raise ValueError(
            f"metric.position is {metric.position!r}; it must be a whole number from {-length} to "
            f"{length - 1}, because each text has {length} tokens"
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
    """Layer, head and position of one or several patch sites.

    An index of −1 selects the whole axis.

    Attributes:
        layer: index of the layer.
        head: index of the head; for keys and values, index of the key/value head.
        position: index of the token.
    """

    layer: Int[Array | np.ndarray, "*sites"]
    head: Int[Array | np.ndarray, "*sites"]
    position: Int[Array | np.ndarray, "*sites"]


@dataclass(frozen=True)
class Grid:
    """The patch sites (layer, head, position) of a call of `patch_sweep`: a grid over `axes`.

    Attributes:
        point: name of the hook point.
        axes: the names of the axes along which patch sites differ, in the order of `AXES`.
        shape: shape of the hook point's value; inside the layers, the first axis is the layer.
        has_layers: whether the hook point is inside the layers.
        has_heads: whether the hook point's value has a head axis.
    """

    point: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    has_layers: bool
    has_heads: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of patch sites along each of `axes`."""
        index = {"layer": 0, "head": -3, "position": -2}
        return tuple(self.shape[index[name]] for name in self.axes)

    def sites(self) -> Site:
        """Returns all patch sites in the row-major order of an array of shape `sizes`."""
        count = int(np.prod(self.sizes, dtype=int))
        found = dict(zip(self.axes, np.indices(self.sizes), strict=True))
        everywhere = np.full(count, -1)
        return Site(*(found.get(name, everywhere).reshape(-1).astype(np.int32) for name in AXES))

    def where(self, site: Site) -> Bool[Array, "..."]:
        """Returns the bool mask of a patch site, for `Patch.where`."""
        where = is_at(site.position, self.shape[-2])[:, None]
        if self.has_heads:
            where = is_at(site.head, self.shape[-3])[:, None, None] & where
        # The new first axis is the batch axis.
        where = where[None]
        if self.has_layers:
            where = is_at(site.layer, self.shape[0]).reshape(-1, *[1] * where.ndim) & where
        return where


def fraction_of_gap(
    values: Float[np.ndarray, "*shape"], clean: float, corrupted: float
) -> Float[np.ndarray, "*shape"]:
    """Returns `values` / (`clean` − `corrupted`); NaN if both metrics are equal."""
    return values / ((clean - corrupted) or np.nan)


def is_at(index: Int[Array | np.ndarray, ""], size: int) -> Bool[Array, " size"]:
    """Returns a mask [size] that is True only at `index`, or everywhere if `index` is −1."""
    return (jnp.arange(size, dtype=jnp.int32) == index) | (index < 0)


def pad_sites(sites: Site, multiple: int) -> Site:
    """Repeats the last patch site until the number of patch sites is a multiple of `multiple`."""
    missing = -len(sites.layer) % multiple
    return Site(*(np.pad(x, (0, missing), mode="edge") for x in sites))


def run_metric(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    metric: Metric,
    hooks: Hooks = NO_HOOKS,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Runs a forward pass and computes a metric from the logits.

    For a `Metric`, the logits are computed only at the position of the metric.

    Returns:
        (value of the metric, captured values).
    """
    passed = model.forward(weights, inputs, hooks=hooks)
    return metric_of_hidden(model, weights, metric, passed.hidden), passed.captured


def metric_of_hidden(
    model: LanguageModel,
    weights: Weights,
    metric: Metric,
    hidden: Float[Array, "batch length dim"],
) -> Float[Array, ""]:
    """Computes a metric from the hidden states, which are the input of the output head."""
    if isinstance(metric, FunctionMetric):
        value = metric(model.logits(weights, hidden))
        if jnp.shape(value) != ():
            raise ValueError(
                f"metric returns an array of shape {jnp.shape(value)}; it must return one number"
            )
        return value
    hidden = jax.lax.dynamic_slice_in_dim(hidden, metric.position, 1, axis=1)
    return metric(model.logits(weights, hidden)[:, 0])


measure = jax.jit(run_metric, static_argnames="model")


def checked_pair(clean: Any, corrupted: Any, config: ModelConfig) -> tuple[Inputs, Inputs]:
    """Checks the clean and the corrupted input, and converts both to arrays.

    Args:
        clean: tokens [batch, length], or `Inputs`.
        corrupted: the corrupted text, of the same type and shape as `clean`.
        config: the model's config.

    Raises:
        ValueError: An input is invalid for the model, or the shapes or segment ids of `clean`
            and `corrupted` differ.
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
                f"{field.name} has shape {shapes[0]} in clean and {shapes[1]} in corrupted; the "
                "shapes must be equal, because values are copied to the same position"
            )
    for name in ("segment_ids", "source_segment_ids"):
        first, second = (getattr(given, name) for given in pair)
        if first is not None and (np.asarray(first) != np.asarray(second)).any():
            raise ValueError(
                f"{name} of clean and corrupted differ; they must be equal, because values are "
                "copied to the same position"
            )
    return pair[0], pair[1]


def checked_grid(
    model: LanguageModel, point: str, axes: Any, weights: Weights, inputs: Inputs
) -> Grid:
    """Returns all patch sites of a hook point along the given axes.

    Args:
        model: the model.
        point: name of the hook point.
        axes: names from `AXES`; all axes of the hook point if None.
        weights: the model's parameters.
        inputs: the tokens and, for a model with a source, the source.

    Raises:
        ValueError: The model does not have this hook point, or the hook point lacks an axis.
    """
    hooks = checked_hooks((point,), None, model.hook_points)

    def capture(weights: Weights, inputs: Inputs) -> Shaped[Array, "..."]:
        return model.forward(weights, inputs, hooks=hooks).captured[point]

    shape = jax.eval_shape(capture, weights, inputs).shape
    has_layers = point in model.layer_hook_points
    has_heads = len(shape) - has_layers == 4
    present = zip(AXES, (has_layers, has_heads, True), strict=True)
    accepted = [name for name, is_present in present if is_present]
    axes = accepted if axes is None else axes if isinstance(axes, str) else tuple(axes)
    if not set(axes) <= set(accepted):
        raise ValueError(
            f"axes are {axes!r}; for the hook point {point!r} they must be a tuple with names from "
            f"{', '.join(accepted)}"
        )
    return Grid(
        point, tuple(name for name in accepted if name in axes), shape, has_layers, has_heads
    )
