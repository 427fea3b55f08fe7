"""The optimizer, composed of optax transformations, and the learning rate schedule."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from jaxformer.models.parameters import stacked_tree
from jaxformer.training.config import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate schedule: a linear warm-up from 0, then a decay to the final fraction.

    The warm-up depends on the number of completed updates. The decay depends on the completed
    fraction of the steps or, if minutes limit the run, of the training time.

    Attributes:
        config: The settings of the optimizer.
        steps: The number of updates of the run; no limit if None.
        minutes: The training time of the run in minutes; no limit if None.
    """

    config: OptimizerConfig
    steps: int | None = None
    minutes: float | None = None

    def done(self, step: int, seconds: float = 0.0) -> float:
        """Returns the completed fraction of the run, which is 1 at the end.

        With limits on steps and minutes, the result is the larger of the two completed fractions.

        Args:
            step: The number of updates so far.
            seconds: The training time so far, in seconds.
        """
        return max(self._by_steps(step), self._by_time(seconds))

    def rate(self, step: int, seconds: float = 0.0, last: float | None = None) -> float:
        """Returns the learning rate of the next update.

        Args:
            step: The number of updates so far.
            seconds: The training time so far, in seconds.
            last: The learning rate of the last update, or None before the first update. The
                returned rate exceeds `last` by at most peak / warmup, even if the run was resumed
                with more steps or minutes.
        """
        config, warmup = self.config, self.warmup
        warm = min(1.0, step / warmup) if warmup else 1.0
        left = self._left(step, seconds)
        fall = 0.5 * (1 - math.cos(math.pi * left)) if config.schedule == "cosine" else left
        rate = config.peak * warm * (fall + (1 - fall) * config.final_fraction)
        if last is None or not warmup:
            return rate
        return min(rate, last + config.peak / warmup)

    def rates(self) -> Iterator[float]:
        """Yields the learning rate of each update, endlessly if no step limit is set."""
        return map(self.rate, islice(count(), self.steps))

    @property
    def warmup(self) -> int:
        """Number of warm-up updates, fewer than the updates of the run."""
        steps = self.config.warmup_steps
        return steps if self.steps is None else min(steps, self.steps - 1)

    def _left(self, step: int, seconds: float) -> float:
        """Returns the remaining fraction of the decay: 1 before the decay, 0 after the decay."""
        is_late = self.config.schedule == "warmup-stable-decay"
        # Length of the learning-rate decay as a fraction of the run.
        length = self.config.decay_fraction if is_late else 1.0
        after_warmup = length if self.steps is None else min(length, 1 - self.warmup / self.steps)
        by_steps = (1 - self._by_steps(step)) / after_warmup
        by_time = (1 - self._by_time(seconds)) / length
        return max(0.0, min(1.0, by_steps, by_time))

    def _by_steps(self, step: int) -> float:
        return 0.0 if self.steps is None else step / self.steps

    def _by_time(self, seconds: float) -> float:
        return 0.0 if self.minutes is None else seconds / (60 * self.minutes)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Builds the optimizer: clipping by the global norm, followed by the update rule.

    Weight decay applies to matrices only. The learning rate is 1; the training step multiplies the
    updates by the scheduled learning rate.
    """
    return optax.chain(clip_by_norm(config.clip_norm), _OPTIMIZERS[config.optimizer](config))


def clip_by_norm(largest_norm: float) -> optax.GradientTransformation:
    """Clips by the global norm like `optax.clip_by_global_norm`, but with one multiplication.

    XLA:CPU fuses this multiplication into the update of the optimizer's moments. optax divides each
    element and then multiplies it. For these two operations, XLA:CPU needs a separate pass over all
    gradients, which stores the quotients.
    """

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        norm = optax.tree.norm(updates)
        factor = jnp.where(norm < largest_norm, 1.0, largest_norm / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# Vectors are selected by name, because a bias that is stacked over layers has two axes.
_VECTORS = {"bias", "scale"}


def is_matrix(params: optax.Params) -> Any:
    """Returns a tree that is True for arrays with weight decay, and False for biases and scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _last(path) not in _VECTORS, params)


def _last(path: tuple[Any, ...]) -> str:
    """Returns the last component of a leaf's path."""
    return jax.tree_util.keystr(path[-1:], simple=True)


def _adamw(
    config: OptimizerConfig, make: Callable[..., optax.GradientTransformation] = optax.adamw
) -> optax.GradientTransformation:
    return make(1.0, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=is_matrix)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    decay = config.weight_decay
    return per_layer(optax.adafactor(1.0, weight_decay_rate=decay, weight_decay_mask=is_matrix))


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Builds Muon for all kernels except the output head's, and AdamW for the rest.

    Muon's updates are scaled to the size of Adam's updates, so both use one learning rate.
    """
    muon = optax.contrib.muon(
        1.0,
        weight_decay=config.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=partial(jax.tree.map, _kernel_axes),
    )
    return optax.partition({"kernel": muon, "other": _adamw(config)}, _kernel_or_other)


def _kernel_or_other(params: optax.Params) -> Any:
    def name(path: tuple[Any, ...], _: Array) -> str:
        is_kernel = _last(path) == "kernel" and path[0].key != "head"
        return "kernel" if is_kernel else "other"

    return jax.tree_util.tree_map_with_path(name, params)


def _kernel_axes(kernel: Float[Array, "*layers in out"]) -> MuonDimensionNumbers:
    """Returns the input axis and the output axis of a kernel [in, out] or [layers, in, out]."""
    return MuonDimensionNumbers(kernel.ndim - 2, kernel.ndim - 1)


_lion = partial(_adamw, make=optax.lion)
_OPTIMIZERS = {"adamw": _adamw, "lion": _lion, "adafactor": _adafactor, "muon": _muon}


# Label of the parameters that are not stacked over layers.
_OTHER = "other"


def per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Applies an optimizer to each layer of the model as if the layers' arrays were separate.

    A model stacks the kernels of its layers into one array [layers, in, out]. Adafactor, LAMB and
    LARS compute statistics of each array, such as its norm. A statistic must not mix several
    layers. Element-wise optimizers such as Adam do not need `per_layer`. Transformations that
    depend on all parameters, such as clipping by the global norm, must stay outside `per_layer`:

        optax.chain(optax.clip_by_global_norm(1.0), per_layer(optax.lamb(1e-3)))

    Args:
        optimizer: An optax optimizer.

    Returns:
        The optimizer. The first axis of each array in the optimizer state is the layer, as in the
        parameters. The state is therefore sharded like the parameters.
    """
    inner = optax.with_extra_args_support(optimizer)
    mapped = optax.GradientTransformationExtraArgs(
        lambda params: _over_layers(inner.init, params),
        lambda updates, state, params=None, **extra: _over_layers(
            lambda *arrays: inner.update(*arrays, **extra), updates, state, params
        ),
    )

    def by_tree(params: optax.Params) -> optax.GradientTransformationExtraArgs:
        trees = dict.fromkeys(jax.tree.leaves(_labels(params)), mapped)
        return optax.partition({**trees, _OTHER: inner}, _labels)

    return optax.GradientTransformationExtraArgs(
        lambda params: by_tree(params).init(params),
        lambda updates, state, params=None, **extra: by_tree(updates).update(
            updates, state, params, **extra
        ),
    )


def _over_layers(function: Callable, tree: Any, *more: Any) -> Any:
    """Maps a function over the first axis of all arrays.

    If there are no arrays, the function is called once.
    """
    if not jax.tree.leaves(tree):
        return function(tree, *more)
    return jax.vmap(function)(tree, *more)


def _labels(params: optax.Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: stacked_tree(path) or _OTHER, params)
