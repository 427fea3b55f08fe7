"""Script that computes the values shown by docs/layer-norm-sliders.html.

    python docs/layer_norm_page.py        # writes docs/layer-norm-sliders.js

For each position of the sliders for γ and β, the written file holds the output of `layer_norm`. The
HTML page only looks up values in the written file, so the page works in any browser, without a
network.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxformer.functional import layer_norm

VALUES = Path(__file__).with_name("layer-norm-sliders.js")
# The vector has mean 2 and standard deviation 3, so γ = 3 and β = 2 restore it.
VECTOR = (8.0, -2.0, 5.0, 1.0, 2.0, -1.0, 1.0, 2.0)
SCALES = np.round(np.arange(0, 41) / 10, 1)
BIASES = np.round(np.arange(-30, 31) / 10, 1)


def table() -> np.ndarray:
    """Returns layer_norm(VECTOR, γ, β) for all slider positions [scales, biases, features]."""
    x = jnp.array(VECTOR)
    one = jnp.ones_like(x)
    rows = [[layer_norm(x, g * one, b * one) for b in BIASES] for g in SCALES]
    return np.round(np.array(rows, np.float64), 3)


def script() -> str:
    """Returns the text of layer-norm-sliders.js, which defines the values for the page."""
    values = {
        "input": VECTOR,
        "scales": SCALES.tolist(),
        "biases": BIASES.tolist(),
        "outputs": table().tolist(),
    }
    return f"const values = {json.dumps(values, separators=(',', ':'))};\n"


if __name__ == "__main__":
    VALUES.write_text(script())
    print(f"{VALUES}: {VALUES.stat().st_size / 1000:.0f} kB")
