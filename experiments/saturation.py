"""Measures the mean slope of a sigmoid for inputs from several normal distributions.

    python experiments/saturation.py --picture saturation.png

The script computes the mean of σ′(z) over z ~ N(mean, variance) by quadrature, for several means
and variances. The result is 0.2066 for N(0, 1) and 0.0971 for N(2, 9) (lecture 11 §2). The gradient
of a layer is multiplied by σ′(z), so saturated inputs make the gradient small.
"""

from pathlib import Path

import jax
import numpy as np
from record import Parser, conclude, picture, run

INPUTS = {"N(0, 1)": (0.0, 1.0), "N(2, 9)": (2.0, 3.0)}
MEANS, DEVIATIONS = (0.0, 2.0, 4.0), np.geomspace(0.1, 10, 60)


def slope(z):
    """Computes the slope of the sigmoid, σ′(z) = σ(z) (1 − σ(z))."""
    return jax.nn.sigmoid(z) * jax.nn.sigmoid(-z)


def mean_slope(mean: float, deviation: float) -> float:
    """Returns E σ′(z) for z ~ N(mean, deviation²) by Gauss–Hermite quadrature with 200 points."""
    points, weights = np.polynomial.hermite_e.hermegauss(200)
    slopes = np.asarray(slope(mean + deviation * points))
    return float((weights * slopes).sum() / weights.sum())


def draw(slopes: dict, path: Path) -> None:
    """Plots σ′ and the input densities, and the mean slope against the standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    z = np.linspace(-8, 12, 600)
    left.plot(z, slope(z), color="black", label="σ′(z)")
    for mean in MEANS:
        by_spread = [mean_slope(mean, deviation) for deviation in DEVIATIONS]
        right.plot(DEVIATIONS, by_spread, label=f"mean {mean:g}")
    for colour, (name, (mean, deviation)) in zip(("C0", "C3"), INPUTS.items(), strict=True):
        density = np.exp(-((z - mean) ** 2) / (2 * deviation**2)) / (deviation * np.sqrt(2 * np.pi))
        label = f"density of z ~ {name}"
        left.fill_between(z, density, alpha=0.3, color=colour, label=label)
        right.plot(deviation, slopes[name], "o", color=colour)
        right.annotate(f"{name}: {slopes[name]:.4f}", (1.1 * deviation, slopes[name] + 0.006))
    left.set(
        xlabel="input z",
        ylabel="slope, density",
        title="distribution of inputs, and slope of the sigmoid",
    )
    right.set(
        xlabel="standard deviation of z", ylabel="mean of σ′(z)", xscale="log", ylim=(0, 0.26)
    )
    right.set_title("mean slope of the sigmoid")
    for axes in (left, right):
        axes.grid(alpha=0.2)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--picture", type=picture, default="saturation.png")
    arguments = parser.parse_args()
    slopes = {name: mean_slope(*of) for name, of in INPUTS.items()}
    conclude({"mean slope": slopes}, arguments.record)
    draw(slopes, arguments.picture)


if __name__ == "__main__":
    run(main)
