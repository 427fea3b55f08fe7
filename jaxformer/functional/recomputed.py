"""Rematerialization: functions whose gradient recomputes intermediate values."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax
import numpy as np

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def recomputed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Returns `function` with a gradient that stores only the function's arguments.

    By default, a gradient stores float32 intermediate values, such as x − μ of a norm. Use
    `recomputed` for functions that are elementwise or reduce over one axis: recomputing such an
    operation is faster than reading its result from memory.

    In a scan over layers, the intermediate values are always recomputed. In unrolled layers, XLA
    recognizes that the recomputation repeats steps of the forward pass, and decides whether to
    recompute them. A barrier would force the recomputation, but also prevent XLA from fusing the
    recomputed steps with their neighbours. With a barrier, a training step of GPT-2 124M on a TPU
    v5e would access 10% more bytes.
    """

    @wraps(function)
    def storing_arguments(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

        def call_with_arrays(arrays: list) -> Result:
            rest = iter(arrays)
            filled = [next(rest) if x else leaf for x, leaf in zip(is_array, leaves, strict=True)]
            args, kwargs = tree.unflatten(filled)
            return function(*args, **kwargs)

        arrays = [leaf for x, leaf in zip(is_array, leaves, strict=True) if x]
        return jax.checkpoint(call_with_arrays, prevent_cse=False)(arrays)

    return storing_arguments
