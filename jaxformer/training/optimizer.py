"""The optimiser, built from optax, and the learning rate of each update."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jaxformer.training.config import OptimizerConfig

WARMUP_SHARE = 0.1  # of the minutes, at most


@dataclass(frozen=True)
class Schedule:
    """The learning rate: linear from 0 to the peak over the warm-up, then down to a fraction of it
    as the run goes on, by steps or, where minutes end the run, by time. Where they do, the warm-up
    takes a tenth of them at most, however few updates that is."""

    config: OptimizerConfig
    steps: int | None = None
    minutes: float | None = None

    def done(self, step: int, seconds: float = 0.0) -> float:
        """How much of the run is over after so many updates and seconds of training: the greater of
        its steps' and its minutes' share, 1 at the end."""
        return max(self._by_steps(step), self._by_time(seconds))

    def rate(self, step: int, seconds: float = 0.0) -> float:
        """The learning rate of the update that follows so many."""
        config, warmup = self.config, self._warmup
        over = self._by_time(seconds)
        if self.steps is not None:  # the fall begins where the warm-up ends
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
        """The learning rates of all updates, one after another, where steps end the run."""
        return map(self.rate, range(self.steps))

    def _by_steps(self, step: int) -> float:
        return 0.0 if self.steps is None else step / self.steps

    def _by_time(self, seconds: float) -> float:
        return 0.0 if self.minutes is None else seconds / (60 * self.minutes)

    @property
    def _warmup(self) -> int:
        steps = self.config.warmup_steps
        return steps if self.steps is None else min(steps, self.steps - 1)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, then the optimiser; decay on matrices only.

    Its updates are those of a learning rate of 1: a training step multiplies them by the learning
    rate that it is given.
    """
    clip = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, _OPTIMIZERS[config.optimizer](config))


# By name, not by rank: stacked over layers, a bias has two axes as well.
_VECTORS = {"bias", "scale"}


def is_matrix(params):
    """True for each leaf that weight decay is for: everything but biases and scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in _VECTORS, params)


def _adamw(config):
    return optax.adamw(
        1.0, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=is_matrix
    )


def _lion(config):
    return optax.lion(
        1.0, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=is_matrix
    )


def _adafactor(config):
    return optax.adafactor(1.0, weight_decay_rate=config.weight_decay, weight_decay_mask=is_matrix)


def _muon(config):
    """Updates of kernels, but the head's, are made orthogonal and of the size of Adam's, so that
    one learning rate is for both."""
    muon = optax.contrib.muon(
        1.0,
        weight_decay=config.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=partial(jax.tree.map, _axes_of_kernel),
    )
    return optax.partition({"kernel": muon, "other": _adamw(config)}, _kernel_or_other)


def _kernel_or_other(params):
    def name(path, _):
        is_kernel = path[-1].key == "kernel" and path[0].key != "head"
        return "kernel" if is_kernel else "other"

    return jax.tree_util.tree_map_with_path(name, params)


def _axes_of_kernel(kernel):
    """[in, out], or [layers, in, out]."""
    return MuonDimensionNumbers(kernel.ndim - 2, kernel.ndim - 1)


_OPTIMIZERS = {"adamw": _adamw, "lion": _lion, "adafactor": _adafactor, "muon": _muon}
