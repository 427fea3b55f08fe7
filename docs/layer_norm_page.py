"""The LayerNorm lesson's page: two sliders, and what `layer_norm` makes of a vector.

    python docs/layer_norm_page.py        # writes docs/layer-norm.js

layer-norm.html computes nothing: for every place of its sliders these values are what `layer_norm`
gave. It needs no network: any browser opens it.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxformer.functional import layer_norm

VALUES = Path(__file__).with_name("layer-norm.js")
VECTOR = (8.0, -2.0, 5.0, 1.0, 2.0, -1.0, 1.0, 2.0)  # mean 2, spread 3: γ = 3, β = 2 undo it
SCALES = np.round(np.arange(0, 41) / 10, 1)
BIASES = np.round(np.arange(-30, 31) / 10, 1)


def table() -> np.ndarray:
    """layer_norm(VECTOR, γ, β) at every place of the sliders [scales, biases, features]."""
    x = jnp.array(VECTOR)
    one = jnp.ones_like(x)
    rows = [[layer_norm(x, g * one, b * one) for b in BIASES] for g in SCALES]
    return np.round(np.array(rows, np.float64), 3)


def script() -> str:
    """The values, as the page reads them."""
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
