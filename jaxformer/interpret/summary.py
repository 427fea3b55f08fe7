"""Short descriptions of results, for the output of a notebook cell."""

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Longer texts are cut.
_MOST = 60


def summary(result: Any) -> str:
    """Describes a named tuple on one line; arrays are described by dtype and shape.

    >>> summary(sweep)
    "Sweep(effects=float32 [2, 4, 18], clean=-0.2046, corrupted=-7.851, axes=('layer', …))"
    """
    fields = (f"{name}={_described(getattr(result, name))}" for name in result._fields)
    return f"{type(result).__name__}({', '.join(fields)})"


def _described(value: Any) -> str:
    """Describes the value of a field in a few words."""
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"{value.dtype} [{', '.join(map(str, shape))}]"
    if shape == ():
        value = np.asarray(value).item()
    if isinstance(value, dict):
        return f"{{{len(value)} entries: {_cut(', '.join(map(str, value)))}}}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{type(value).__name__}(…)"
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def to_png(figure: "Figure") -> bytes:
    """Returns a figure as a PNG file."""
    data = BytesIO()
    figure.savefig(data, format="png", dpi=100)
    return data.getvalue()
