"""At which layer two passes part, by what goes through the model's named points.

A model says which points it has, in the order of computation; every value tapped there has the
tokens on its last axis but one.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxformer.functional.taps import Patch
from jaxformer.verify import rules
from jaxformer.verify.dependency import compare, dependency_matrix


class Value(NamedTuple):
    """What went through a point: [batch, …, length, features]; layer None: outside the blocks."""

    point: str
    layer: int | None
    value: np.ndarray

    def __str__(self):
        return self.point if self.layer is None else f"layer {self.layer}, {self.point}"


def trace(model, variables, tokens, segments=None, **read) -> list[Value]:
    """All that went through the points of the tokens, in order, and the logits at the end.

    Weights of attention are left out: to be seen, they must be computed in another way; and so is
    what an encoder does, of which the tokens are others.
    """
    points = [x for x in model.points if not x.startswith("encoder.") and ".weights" not in x]
    how = {"capture": tuple(points), "method": "inspect"}
    logits, captured = model.apply(variables, tokens, segments, **read, **how)
    inner = [point for point in points if point in model.layer_points]
    before = points[: points.index(inner[0])]
    found = [Value(point, None, captured[point]) for point in before]
    for layer in range(model.config.num_layers):
        found += [Value(point, layer, captured[point][layer]) for point in inner]
    after = [x for x in points if x not in {*before, *inner}]
    found += [Value(point, None, captured[point]) for point in after]
    found.append(Value("logits", None, logits))
    return [value._replace(value=np.asarray(value.value, np.float32)) for value in found]


def first_difference(some, other, take_some, take_other, tolerance: float):
    """The first point at which two traces part, and by how much; None if at none.

    take(array [batch, …, length, features]) → the tokens that are to be compared.
    """
    for a, b in zip(some, other, strict=True):
        x, y = take_some(a.value), take_other(b.value)
        if x.size and not np.allclose(x, y, rtol=0, atol=tolerance * max(1.0, abs(y).max())):
            return a, float(np.nan_to_num(abs(x - y), nan=np.inf).max())
    return None


def own_functions(model, variables, segments, **read) -> Iterator:
    """Each block by itself: from what comes into it, float [batch, length, dim], to what it gives.

    What comes in is put in place of "block.input" at that layer alone, and "block.output" is read.
    """
    tokens = jnp.zeros(np.shape(segments), jnp.int32)
    num_layers = model.config.num_layers
    for layer in range(num_layers):
        where = (jnp.arange(num_layers) == layer)[:, None, None, None]

        def run(x, layer=layer, where=where):
            patch = {"block.input": Patch(where, x[None])}
            how = {"capture": ("block.output",), "patch": patch, "method": "inspect"}
            return model.apply(variables, tokens, segments, **read, **how)[1]["block.output"][layer]

        yield run


def first_broken(model, variables, x, others, segments, **read):
    """(layer, Comparison) of the first block that does not depend on what comes into it as its own
    rule says; None if all do, or if the model's blocks cannot be asked one by one."""
    if "block.input" not in model.points:
        return None
    config, residual = model.config, model.config.residual
    for layer, run in enumerate(own_functions(model, variables, jnp.asarray(segments), **read)):
        found = dependency_matrix(run, x, witnesses=("taint", "change"), others=others)
        rule = np.zeros(found.matrix.shape, bool)
        for row, ids in enumerate(segments):
            own = rules.of_layers(config, ids, rules.mask_of(model))[layer]
            rule[row, :, row] = rules.composed([own], len(ids), residual)
        compared = compare(found, rule)
        if not compared.holds:
            return layer, compared
    return None
