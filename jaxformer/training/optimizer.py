"""The optimizer, built from optax, and the schedule of the learning rate."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from jaxformer.training.config import OptimizerConfig

WARMUP_SHARE = 0.1  # largest share of the minutes


@dataclass(frozen=True)
class Schedule:
    """Schedule of the learning rate: a linear warm-up from 0, then a decay to the final fraction.

    The decay follows the steps or, if minutes limit the run, the training time. With minutes, the
    warm-up ends after a tenth of them at the latest.

    Attributes:
        config: The settings of the optimizer.
        steps: The number of updates of the run; None: no limit.
        minutes: The minutes of training of the run; None: no limit.
    """

    config: OptimizerConfig
    steps: int | None = None
    minutes: float | None = None

    def done(self, step: int, seconds: float = 0.0) -> float:
        """Returns the share of the run that is over, 1 at the end.

        It is the larger of the share of the steps and the share of the minutes.

        Args:
            step: The number of updates so far.
            seconds: The seconds of training so far.
        """
        return max(self._by_steps(step), self._by_time(seconds))

    def rate(self, step: int, seconds: float = 0.0) -> float:
        """Returns the learning rate of the next update.

        Args:
            step: The number of updates so far.
            seconds: The seconds of training so far.
        """
        config, warmup = self.config, self._warmup
        over = self._by_time(seconds)
        if self.steps is not None:  # the decay begins after the warm-up
            over = max(over, (step - warmup) / (self.steps - warmup))
        left = 1.0 - min(1.0, max(0.0, over))
        if config.schedule == "cosine":
            fall = 0.5 * (1 - math.cos(math.pi * left))
        elif config.schedule == "linear":
            fall = left
        else:
            fall = min(1.0, left / config.decay_fraction)
        warm = min(1.0, step / warmup) if warmup else 1.0
        if self.minutes is not None:
            warm = max(warm, min(1.0, self._by_time(seconds) / WARMUP_SHARE))
        return config.learning_rate * warm * (fall + (1 - fall) * config.final_fraction)

    def rates(self) -> Iterator[float]:
        """Returns the learning rates of all updates in order; endless if no steps limit the run."""
        return map(self.rate, islice(count(), self.steps))

    def _by_steps(self, step: int) -> float:
        return 0.0 if self.steps is None else step / self.steps

    def _by_time(self, seconds: float) -> float:
        return 0.0 if self.minutes is None else seconds / (60 * self.minutes)

    @property
    def _warmup(self) -> int:
        steps = self.config.warmup_steps
        return steps if self.steps is None else min(steps, self.steps - 1)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Builds the optimizer: clipping by the global norm, then the updates.

    Weight decay applies to matrices only. The updates are those of a learning rate of 1; the
    training step multiplies them by the scheduled learning rate.
    """
    return optax.chain(clipped_to(config.clip_norm), _OPTIMIZERS[config.optimizer](config))


def clipped_to(largest_norm: float) -> optax.GradientTransformation:
    """Computes what `optax.clip_by_global_norm` does, by one product per element.

    XLA:CPU fuses a product into the update of each moment. optax divides and then multiplies; XLA
    stores the quotients, in a pass over all gradients.
    """

    def update(updates, state, params=None):
        norm = optax.global_norm(updates)
        factor = jnp.where(norm < largest_norm, 1.0, largest_norm / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# By name, not by rank: a bias that is stacked over layers also has two axes.
_VECTORS = {"bias", "scale"}


def is_matrix(params):
    """Returns a tree with True for each leaf with weight decay: all but biases and scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _last(path) not in _VECTORS, params)


def _last(path) -> str:
    """Returns the name of a leaf."""
    return jax.tree_util.keystr(path[-1:], simple=True)


def _adamw(config, make=optax.adamw):
    return make(1.0, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=is_matrix)


def _adafactor(config):
    return optax.adafactor(1.0, weight_decay_rate=config.weight_decay, weight_decay_mask=is_matrix)


def _muon(config):
    """Builds Muon for all kernels except the head's, and AdamW for the rest.

    Muon's updates are scaled to the size of Adam's, so that both use one learning rate.
    """
    muon = optax.contrib.muon(
        1.0,
        weight_decay=config.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=partial(jax.tree.map, _axes_of_kernel),
    )
    return optax.partition({"kernel": muon, "other": _adamw(config)}, _kernel_or_other)


def _kernel_or_other(params):
    def name(path, _):
        is_kernel = _last(path) == "kernel" and path[0].key != "head"
        return "kernel" if is_kernel else "other"

    return jax.tree_util.tree_map_with_path(name, params)


def _axes_of_kernel(kernel):
    """Returns the axes of a kernel [in, out] or [layers, in, out]."""
    return MuonDimensionNumbers(kernel.ndim - 2, kernel.ndim - 1)


_lion = partial(_adamw, make=optax.lion)
_OPTIMIZERS = {"adamw": _adamw, "lion": _lion, "adafactor": _adafactor, "muon": _muon}
