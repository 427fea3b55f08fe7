"""The LayerNorm lesson's page: two sliders, and what `layer_norm` makes of a vector.

    python docs/layer_norm_page.py        # writes docs/layer-norm.html

The page computes nothing: for every place of the sliders it holds what `layer_norm` gave. It is one
file, without a network, that any browser opens.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxformer.functional import layer_norm

PAGE = Path(__file__).with_name("layer-norm.html")
TEMPLATE = Path(__file__).with_name("layer-norm.template.html")
VECTOR = (12.0, -3.0, 7.5, 0.5, 22.0, -9.0, 4.0, 14.0)  # a wide spread about a mean of 6
SCALES = np.round(np.arange(0, 31) / 10, 1)
BIASES = np.round(np.arange(-30, 31) / 10, 1)


def table() -> np.ndarray:
    """layer_norm(VECTOR, γ, β) at every place of the sliders [scales, biases, features]."""
    x = jnp.array(VECTOR)
    one = jnp.ones_like(x)
    rows = [[layer_norm(x, g * one, b * one) for b in BIASES] for g in SCALES]
    return np.round(np.array(rows, np.float64), 4)


def page() -> str:
    """The lesson as HTML."""
    values = {
        "input": VECTOR,
        "scales": SCALES.tolist(),
        "biases": BIASES.tolist(),
        "outputs": table().tolist(),
    }
    return TEMPLATE.read_text().replace("{{values}}", json.dumps(values, separators=(",", ":")))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {PAGE.stat().st_size / 1000:.0f} kB")
