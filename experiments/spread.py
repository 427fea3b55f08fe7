"""Measures scores and attention weights against the head width, with and without 1/√d.

    python experiments/spread.py --picture spread.png

Components of queries and keys are independent with mean 0 and variance 1, so q·k has variance d.
Without division by √d, the softmax over 64 keys concentrates on one key as d grows, and its
gradient vanishes (Vaswani et al. 2017, §3.2.1; lecture 11 §5).
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import Parser, at_least, conclude, picture, run

KEYS = 64
MEASURES = ("variance", "entropy", "slope")
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def measured(key, width: int, scale: float):
    """Computes statistics of attention with 256 random queries, each with its own keys.

    Returns the variance of the scores, the entropy of the weights in nats, and the trace of the
    softmax's Jacobian, Σ α (1 − α). The entropy and the trace are means over the queries.
    """
    query_key, key_key = jax.random.split(key)
    query = jax.random.normal(query_key, (256, width))
    keys = jax.random.normal(key_key, (256, KEYS, width))
    scores = scale * jnp.einsum("qd,qkd->qk", query, keys)
    weights = jax.nn.softmax(scores)
    entropy = -(weights * jax.nn.log_softmax(scores)).sum(axis=-1)
    slope = (weights * (1 - weights)).sum(axis=-1)
    return scores.var(), entropy.mean(), slope.mean()


def draw(found: dict, path: Path) -> None:
    """Plots the three statistics of `measured` against the head width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    labels = (
        "variance of the scores",
        "entropy of the weights (nats)",
        "softmax's slope, Σ α (1 − α)",
    )
    titles = (
        "scores grow with d",
        "attention concentrates on one key",
        "the gradient vanishes",
    )
    for i, axes in enumerate(figure.subplots(1, 3)):
        for name, values in found.items():
            # The array has the shape [widths, seeds].
            values = np.array(values)[..., i]
            axes.plot(WIDTHS, values.mean(axis=1), "o-", label=name)
            axes.fill_between(WIDTHS, values.min(axis=1), values.max(axis=1), alpha=0.2)
        axes.set(xlabel="head_dim d", ylabel=labels[i], title=titles[i], xscale="log")
        axes.grid(alpha=0.2)
    first, second, third = figure.axes
    first.plot(WIDTHS, WIDTHS, ":", color="grey", label="d")
    first.set_yscale("log")
    second.axhline(np.log(KEYS), linestyle=":", color="grey", label=f"ln {KEYS}: uniform")
    for axes in (first, second, third):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--seeds", type=at_least(1), default=8)
    parser.add_argument("--picture", type=picture, default="spread.png")
    arguments = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), arguments.seeds)
    scales = {"q·k": lambda width: 1.0, "q·k / √d": lambda width: width**-0.5}
    found, figures = {}, {}
    for name, scale in scales.items():
        look = [jax.vmap(partial(measured, width=d, scale=scale(d)))(keys) for d in WIDTHS]
        found[name] = [np.stack(some, axis=-1) for some in look]
        figures[name] = {
            f"d = {d}": dict(zip(MEASURES, some.mean(axis=0).tolist(), strict=True))
            for d, some in zip(WIDTHS, found[name], strict=True)
        }
    conclude(figures, arguments.record)
    draw(found, arguments.picture)


if __name__ == "__main__":
    run(main)
