"""Notes about finite numbers that were treated as masks, and about those that were too small."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxformer.verify.bounds import REACH, bounds_of, is_float, reach, underflow
from jaxformer.verify.marks import Marked, marked

_FALLING = ("exp", "exp2", "logistic")  # functions that are 0 for very negative inputs


class Thresholds:
    """Counts of the elements of exp that are 0 because of a finite mask.

    Attributes:
        far: The number of elements that are 0 as long as scores stay within `reach`.
        near: The number of elements that are 0 for these inputs and may differ for others.
        number: The largest input of exp among the latter, which is about the number of their mask.
    """

    def __init__(self) -> None:
        """Sets all counts to 0."""
        self.far, self.near, self.number = 0, 0, -np.inf

    def see(self, name: str, inputs: Sequence[Marked], outputs: Sequence[Marked]) -> None:
        """Counts the elements of a primitive's output.

        Args:
            name: The primitive's name.
            inputs: Its operands (`Marked`).
            outputs: Its outputs (`Marked`).
        """
        if name not in _FALLING or inputs[0].bounds is None or not is_float(inputs[0].value):
            return
        (x,), (output,) = inputs, outputs
        shape = np.shape(x.value)
        low, high = (np.broadcast_to(bound, shape) for bound in bounds_of(x))
        affected = marked(x.marks, shape)
        zero = affected & (np.asarray(output.value) == 0)
        settled = zero & ~marked(output.marks, shape)
        with np.errstate(invalid="ignore"):
            middle = (low + high) / 2
            self.far += int((settled & (high - low >= reach(x.value.dtype))).sum())
        near = zero & ~settled & np.isfinite(middle) & (middle < underflow(x.value.dtype))
        if near.any():
            self.near += int(near.sum())
            self.number = max(self.number, float(np.asarray(x.value)[near].max()))

    def notes(self) -> Iterator[str]:
        """Yields a sentence for each count that is not 0."""
        if self.far:
            yield (
                f"{self.far} scores are masked by a finite number: that holds while no score "
                f"exceeds {REACH:,.0f} in size"
            )
        if self.near:
            number = float(f"{self.number:.2g}")
            yield (
                f"{self.near} scores are masked by about {number:,.0f}, which scores may reach "
                f"(up to {REACH:,.0f} in size is allowed for): they count as visible. Mask by "
                "-jnp.inf or jnp.finfo(dtype).min, or bound the scores by a cap (tanh, clip)"
            )
