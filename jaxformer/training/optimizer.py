"""The optimiser: clipped AdamW with warm-up and cosine decay, built from optax."""

import jax
import optax

from jaxformer.training.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up, then half a cosine down to the last step."""
    warmup = min(config.warmup_steps, steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW; decay on matrices only."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=is_matrix,
        ),
    )


# By name, not by rank: stacked over layers, a bias has two axes as well.
_VECTORS = {"bias", "scale"}


def is_matrix(params):
    """True for each leaf that weight decay is for: everything but biases and scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in _VECTORS, params)
