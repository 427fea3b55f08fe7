"""Search for the layer at which two passes differ, by the values at the model's named points.

`model.points` lists the names in the order of computation. In every value, the second to last axis
is that of the tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxformer.functional.layers.layer import layer_points
from jaxformer.functional.taps import Patch
from jaxformer.models.check import AnyArray
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.verify import rules
from jaxformer.verify.comparison import Comparison, compare
from jaxformer.verify.dependency import dependency_matrix

if TYPE_CHECKING:
    from jaxformer.verify.subject import Subject

Index = slice | tuple[EllipsisType | slice | np.ndarray, ...]


class Value(NamedTuple):
    """The value at a named point of a model.

    Attributes:
        point: The name of the point.
        layer: The layer; None: the point is outside the blocks.
        value: float32 [batch, …, length, features].
    """

    point: str
    layer: int | None
    value: np.ndarray

    def __str__(self) -> str:
        """Returns a text such as "layer 0, block.output"."""
        return self.point if self.layer is None else f"layer {self.layer}, {self.point}"


def trace(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[np.ndarray, "batch length"],
    segments: Int[np.ndarray, "batch length"] | None = None,
    **read: AnyArray,
) -> list[Value]:
    """Returns the values at the model's points, in order, and the logits at the end.

    It omits attention weights, because capturing them changes the computation. It also omits the
    points of an encoder–decoder's encoder, whose tokens are those of the source.

    Args:
        model: The model.
        variables: Its parameters.
        tokens: int [batch, length].
        segments: The documents of the tokens [batch, length], 0 for padding; None: one document.
        **read: Further arguments of `model.apply`, such as the source.
    """
    points = [x for x in model.points if not x.startswith("encoder.") and ".weights" not in x]
    hooks = {"capture": tuple(points), "method": "inspect"}
    logits, captured = model.apply(variables, tokens, segments, **read, **hooks)
    inner = [point for point in points if point in model.layer_points]
    first = points.index(inner[0])
    outer = [Value(x, None, captured[x]) for x in points if x not in inner]
    blocks = [Value(x, i, captured[x][place]) for x, i, place in _block_points(model, inner)]
    values = [*outer[:first], *blocks, *outer[first:], Value("logits", None, logits)]
    return [value._replace(value=np.asarray(value.value, np.float32)) for value in values]


def _block_points(model: LanguageModel, names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yields (point, layer, place of the layer among those that have the point), by layer."""
    places = dict.fromkeys(names, 0)
    for number, layer in enumerate(model.architecture.stack.layers):
        there = layer_points(layer)
        for name in (x for x in names if x in there):
            yield name, number, places[name]
            places[name] += 1


def first_difference(
    whole: Sequence[Value], part: Sequence[Value], index: Index, tolerance: float
) -> tuple[Value, float] | None:
    """Returns the first point at which two traces differ, and the difference; None if they agree.

    Args:
        whole: A trace.
        part: The trace of a part of its tokens or batch elements.
        index: The index of that part in the values [batch, …, length, features] of `whole`.
        tolerance: Accepted difference, relative to max(1, the largest value).
    """
    for point, expected in zip(whole, part, strict=True):
        x, y = point.value[index], expected.value
        if x.size and not np.allclose(x, y, rtol=0, atol=tolerance * max(1.0, abs(y).max())):
            return point, float(np.nan_to_num(abs(x - y), nan=np.inf).max())
    return None


def block_functions(subject: "Subject") -> Iterator[Callable[[Variables, Array], Array]]:
    """Yields each block as a function of (variables, embeddings).

    The embeddings [1, length, dim] are those of the last batch element. They replace "block.input"
    at the block's layer, and the function returns "block.output".
    """
    model, segments = subject.model, jnp.asarray(subject.segments)
    tokens, read = jnp.zeros(segments.shape, jnp.int32), subject.read(len(segments))
    num_layers = model.config.num_layers
    for layer in range(num_layers):
        where = (jnp.arange(num_layers, dtype=jnp.int32) == layer)[:, None, None, None]

        def run(
            variables: Variables,
            x: Float[Array, "1 length dim"],
            layer: int = layer,
            where: Bool[Array, "layers 1 1 1"] = where,
        ) -> Float[Array, "batch length dim"]:
            patch = {"block.input": Patch(where, subject.in_batch(x)[None])}
            hooks = {"capture": ("block.output",), "patch": patch, "method": "inspect"}
            _, captured = model.apply(variables, tokens, segments, **read, **hooks)
            return captured["block.output"][layer]

        yield run


def first_broken(subject: "Subject") -> tuple[int, Comparison] | None:
    """Finds the first block whose dependencies differ from the rule of its layer.

    Returns:
        (layer, Comparison); None if all blocks obey their rules, or if the model has no point
        "block.input".
    """
    model, config, ids = subject.model, subject.config, subject.segments[-1]
    if "block.input" not in model.points:
        return None
    x, others = subject.inputs
    options = {"weights": subject.variables, "witnesses": subject.witnesses, "others": others}
    layer_rules = rules.of_layers(config, ids, model.mask, model.layers)
    for layer, run in enumerate(block_functions(subject)):
        dependency = dependency_matrix(run, x, **options)
        rule = np.zeros(dependency.matrix.shape, bool)
        rule[-1, :, 0] = rules.composed([layer_rules[layer]], len(ids), config.residual)
        compared = compare(dependency, rule)
        if not compared.holds:
            return layer, compared
    return None


def distance(x: ArrayLike, y: ArrayLike) -> float:
    """Returns the largest difference relative to max(1, the largest |y|); ∞ if one is NaN."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    off = np.abs(x - y).max() / max(1.0, np.nan_to_num(np.abs(y)).max())
    return float(np.nan_to_num(off, nan=np.inf))
