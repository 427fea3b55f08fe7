"""Interchange interventions: copy a subspace of an activation from one text to another.

An interchange intervention runs the model on a base text, and replaces the component of one
activation in a subspace by the component on a source text:

    x' = x + (s − x) Rᵀ R

x and s are the activations of the base and the source, and R [k, dim] has k orthonormal rows. The
intervention tests whether the subspace represents a variable of an algorithm. If it does, the model
must give the answer of the algorithm for the base with the source's value of this variable.
`alignment.train_alignment` learns R.

Reference:
    Geiger et al. 2021, "Causal Abstractions of Neural Networks"; Geiger et al. 2023, "Finding
    Alignments Between Interpretable Causal Variables and Distributed Neural Representations".
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.hooks import Edit, EditAt, Hooks
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import layers_with
from jaxformer.interpret.patching import checked_grid
from jaxformer.interpret.summary import summary
from jaxformer.interpret.texts import read_inputs, read_logits
from jaxformer.models.check import AnyArray
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.terminal import kind_of

# Largest deviation of R Rᵀ from the identity matrix that counts as orthonormal.
_TOLERANCE = 1e-3


class InterchangeSite(NamedTuple):
    """Where an interchange intervention replaces values.

    Attributes:
        layer: the index of the layer.
        positions: the positions of the tokens, counted from 0; equal in the base and the source.
        point: the name of a hook point inside the layers, whose value has no axis of heads.
    """

    layer: int
    positions: tuple[int, ...]
    point: str = "block.output"


class InterchangePairs(NamedTuple):
    """Pairs of texts with the answers that the algorithm expects after the intervention.

    Attributes:
        base: token ids of the base texts.
        source: token ids of the source texts.
        answers: for each pair, the token that the model should predict at the last position of the
            base, after the intervention with the source.
    """

    base: Int[AnyArray, "pairs length"]
    source: Int[AnyArray, "pairs length"]
    answers: Int[AnyArray, " pairs"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


def interchange(
    value: Float[Array, "*batch dim"],
    source: Float[Array, "*batch dim"],
    rotation: Float[Array, "k dim"],
) -> Float[Array, "*batch dim"]:
    """Computes x + (s − x) Rᵀ R, which replaces x by s within the span of R's rows.

    Args:
        value: x, the activation of the base.
        source: s, the activation of the source.
        rotation: R, whose rows are orthonormal. With k = dim the result is s; with k = 0 it is x.
    """
    # By default, accelerators round the factors of a float32 product to fewer digits.
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return value + product(product(source - value, rotation.T), rotation)


def interchange_patch(
    source: Float[Array, "batch positions dim"],
    rotation: Float[Array, "k dim"],
    site: InterchangeSite,
) -> dict[str, Edit]:
    """Returns the patch of an interchange intervention.

    >>> seen = inspect(model, variables, source_tokens, capture=(site.point,))
    >>> values = seen.captured[site.point][site.layer][:, list(site.positions)]
    >>> inspect(model, variables, tokens, patch=interchange_patch(values, rotation, site))

    Args:
        source: the activations of the source texts at `site.positions`.
        rotation: R, whose rows are orthonormal.
        site: where the intervention replaces values.

    Raises:
        ValueError: The shapes do not fit, or the rows of R are not orthonormal.
    """
    positions = _checked_positions(site.positions)
    if jnp.ndim(source) != 3 or jnp.shape(source)[1] != len(positions):
        raise ValueError(
            f"source has shape {jnp.shape(source)}; it must be [batch, {len(positions)} "
            "(positions), dim]"
        )
    rotation = _checked_rotation(rotation, jnp.shape(source)[-1])
    place = Place(jnp.int32(site.layer), jnp.asarray(positions, jnp.int32))
    return {site.point: _edit(jnp.asarray(source), rotation, place, layers=(site.layer,))}


def interchange_accuracy(
    model: LanguageModel,
    variables: Variables,
    pairs: InterchangePairs,
    rotation: Float[Array, "k dim"],
    site: InterchangeSite,
    batch_size_within_memory: int = 32,
) -> float:
    """Computes the fraction of pairs for which the model predicts the expected answer.

    Args:
        model: a model without a source.
        variables: the model's variables.
        pairs: the pairs of texts, with the expected answers.
        rotation: R, whose rows are orthonormal.
        site: where the intervention replaces values.
        batch_size_within_memory: the number of pairs in one forward pass.

    Raises:
        ValueError: An argument is invalid.
    """
    size = whole_number("batch_size_within_memory", batch_size_within_memory, 1)
    checked, place, dim = check_interchange(model, variables, pairs, site)
    rotation, weights = _checked_rotation(rotation, dim), variables["params"]
    examples = read_examples(model, weights, checked, site.point, place, size)
    return measure_accuracy(model, weights, site.point, (examples, rotation, place), size)


# ---- Checks.


def _checked_positions(positions: Sequence[int]) -> tuple[int, ...]:
    if np.ndim(positions) != 1:
        raise ValueError(f"positions are {positions!r}; they must be a tuple, such as (3,)")
    found = tuple(whole_number("positions", x, 0) for x in positions)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"positions are {found}; they must be one or more different positions")
    return found


def _checked_rotation(rotation: Float[Array, "k dim"], dim: int) -> Float[Array, "k dim"]:
    shape = jnp.shape(rotation)
    if len(shape) != 2 or shape[1] != dim or shape[0] > dim:
        raise ValueError(f"rotation has shape {shape}; it must be [k, {dim}] with k ≤ {dim}")
    if not isinstance(rotation, jax.core.Tracer):
        wide = np.asarray(rotation, np.float64)
        error = abs(wide @ wide.T - np.eye(len(wide))).max(initial=0.0)
        if not error < _TOLERANCE:
            raise ValueError(
                f"the rows of rotation must be orthonormal; R Rᵀ differs from the identity matrix "
                f"by up to {error:.2g}"
            )
    return jnp.asarray(rotation, jnp.float32)


def check_interchange(
    model: LanguageModel, variables: Variables, pairs: InterchangePairs, site: InterchangeSite
) -> tuple[InterchangePairs, "Place", int]:
    """Checks the pairs and the site.

    Returns:
        (pairs as arrays, site as arrays, number of features at the hook point).

    Raises:
        ValueError: An argument is invalid.
    """
    if model.config.reads_source:
        raise ValueError(
            f"model is {kind_of(model)}; interchange interventions support only models "
            "without a source"
        )
    read = read_logits(model, variables, pairs.base, pairs.answers, -1, None)
    base, source = read.inputs.tokens, read_inputs(model, variables, pairs.source).tokens
    if base.shape != source.shape:
        raise ValueError(
            f"source has shape {source.shape} and base {base.shape}; the shapes must be equal, "
            "because values are copied to the same position"
        )
    positions = _checked_positions(site.positions)
    if max(positions) >= base.shape[1]:
        raise ValueError(
            f"positions are {positions}; they must be below {base.shape[1]}, the length of the "
            "texts"
        )
    grid = checked_grid(model, site.point, None, variables["params"], read.inputs)
    if not grid.has_layers or grid.has_heads:
        raise ValueError(
            f"point is {site.point!r}; it must be a hook point inside the layers whose value has "
            "no axis of heads, such as 'block.output'"
        )
    layers = layers_with(model, site.point)
    if site.layer not in layers:
        raise ValueError(
            f"layer is {site.layer}; the layers with the hook point {site.point!r} are "
            f"{', '.join(map(str, layers))}"
        )
    arrays = InterchangePairs(jnp.asarray(base), jnp.asarray(source), read.target)
    place = Place(jnp.int32(site.layer), jnp.asarray(positions, jnp.int32))
    return arrays, place, grid.shape[-1]


# ---- Compiled functions. Layer and positions are arrays, so that all sites share one program.


class Place(NamedTuple):
    """Layer and positions of an `InterchangeSite`."""

    layer: Int[Array, ""]
    positions: Int[Array, " positions"]


class Examples(NamedTuple):
    """The base texts, the activations of the source texts at the site, and the answers."""

    base: Int[Array, "pairs length"]
    values: Float[Array, "pairs positions dim"]
    answers: Int[Array, " pairs"]


def _edit(
    source: Float[Array, "batch positions dim"],
    rotation: Float[Array, "k dim"],
    place: Place,
    layers: tuple[int, ...] | None = None,
) -> Edit:
    """Returns the edit of an interchange intervention; see `interchange_patch`."""
    arrays = (source, rotation, place)
    return Edit(_interchange_at, *arrays, layers=layers, positions=place.positions)


def _interchange_at(
    value: Float[Array, "batch length dim"],
    at: EditAt,
    source: Float[Array, "batch positions dim"],
    rotation: Float[Array, "k dim"],
    place: Place,
) -> Float[Array, "batch length dim"]:
    """Function of an `Edit`: computes the interchange at all tokens of one layer, in float32.

    A token at positions[i] receives source[:, i]. The edit discards the results of other tokens.
    """
    if value.ndim != 3:
        raise ValueError(
            f"the value at the hook point has shape {value.shape}; an interchange intervention "
            "requires [batch, length, dim]"
        )
    x = value.astype(jnp.float32)
    index = (jnp.asarray(at.positions)[..., None] == place.positions).argmax(axis=-1)
    index = jnp.broadcast_to(index, x.shape[:2])
    source = jnp.broadcast_to(source.astype(jnp.float32), (len(x), *source.shape[1:]))
    aligned = jnp.take_along_axis(source, index[..., None], axis=1)
    return jnp.where(at.layer == place.layer, interchange(x, aligned, rotation), x)


def _batches(count: int, size: int) -> Iterator[Int[np.ndarray, " size"]]:
    """Yields the indices 0 … count − 1 in batches of `size`; the last batch repeats indices."""
    for first in range(0, count, size):
        yield np.arange(first, first + size) % count


def read_examples(
    model: LanguageModel,
    weights: Weights,
    pairs: InterchangePairs,
    point: str,
    place: Place,
    size: int,
) -> Examples:
    """Computes the activations of all source texts, `size` texts at a time."""
    index = jnp.int32(layers_with(model, point).index(int(place.layer)))
    count = len(pairs.answers)
    found = [
        _source_values(model, weights, point, pairs.source[some], (index, place.positions))
        for some in _batches(count, size)
    ]
    values = jnp.concatenate(found)[:count]
    return Examples(jnp.asarray(pairs.base), values, jnp.asarray(pairs.answers))


@partial(jax.jit, static_argnums=(0, 2))
def _source_values(
    model: LanguageModel,
    weights: Weights,
    point: str,
    tokens: Int[Array, "batch length"],
    at: tuple[Int[Array, ""], Int[Array, " positions"]],
) -> Float[Array, "batch positions dim"]:
    """Returns the values at a hook point.

    Args:
        model: the model.
        weights: the model's parameters.
        point: the name of the hook point.
        tokens: the source texts.
        at: (index of the layer among the layers with the hook point, positions).
    """
    captured = model.forward(weights, Inputs(tokens), hooks=Hooks((point,))).captured[point]
    index, positions = at
    return captured[index][:, positions].astype(jnp.float32)


def answer_logits(
    model: LanguageModel,
    weights: Weights,
    point: str,
    examples: Examples,
    rotation: Float[Array, "k dim"],
    place: Place,
) -> Float[Array, "batch vocab"]:
    """Computes the logits at the last position of each base text, after the intervention."""
    hooks = Hooks(patch={point: _edit(examples.values, rotation, place)})
    hidden = model.forward(weights, Inputs(examples.base), hooks=hooks).hidden[:, -1:]
    return model.logits(weights, hidden)[:, 0]


def measure_accuracy(
    model: LanguageModel,
    weights: Weights,
    point: str,
    arguments: tuple[Examples, Float[Array, "k dim"], Place],
    size: int,
) -> float:
    """Computes the accuracy on all examples, `size` examples at a time."""
    examples, rotation, place = arguments
    count, found = len(examples.answers), []
    for some in _batches(count, size):
        batch = Examples(*(x[some] for x in examples))
        found.append(np.asarray(_is_right(model, weights, point, (batch, rotation, place))))
    return float(np.concatenate(found)[:count].mean())


@partial(jax.jit, static_argnums=(0, 2))
def _is_right(
    model: LanguageModel,
    weights: Weights,
    point: str,
    arguments: tuple[Examples, Float[Array, "k dim"], Place],
) -> Bool[Array, " batch"]:
    """Returns whether the model predicts the answer of each example."""
    logits = answer_logits(model, weights, point, *arguments)
    return logits.argmax(axis=-1) == arguments[0].answers
