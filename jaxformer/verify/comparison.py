"""Comparison of a dependency matrix with a rule, and its picture."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxformer.verify.dependency import Dependency, dependency_matrix, place_name

_ROUNDING = 1e-5  # effects that are smaller, relative to the largest one, may be rounding


class RemarkWarning(UserWarning):
    """Warning that a certificate holds with a doubt that its reader should know."""


class Edge(NamedTuple):
    """A pair of an output position and an input position, and the largest effect seen."""

    output: tuple[int, ...]
    input: tuple[int, ...]
    effect: float

    def __str__(self) -> str:
        """Returns a text such as "output 0 ← input 1 (0.366)"."""
        output, input = place_name(self.output), place_name(self.input)
        return f"output {output} ← input {input} ({self.effect:.3g})"


@dataclass(frozen=True)
class Comparison:
    """The differences between a dependency matrix and a rule, largest effects first.

    Attributes:
        missing: Edges of the rule that were not found.
        spurious: Found edges that are not in the rule.
    """

    missing: tuple[Edge, ...]
    spurious: tuple[Edge, ...]

    @property
    def holds(self) -> bool:
        """Whether the found edges are those of the rule."""
        return not self.missing and not self.spurious

    def __str__(self) -> str:
        """Returns the counts of both kinds, and their first edges."""
        return f"{_listed('spurious', self.spurious)}; {_listed('missing', self.missing)}"


def compare(found: Dependency, rule: ArrayLike) -> Comparison:
    """Compares a dependency matrix with a rule (see `rules`).

    Args:
        found: The dependency matrix.
        rule: A bool array with the matrix's shape. For batches it may also be [outputs, inputs],
            one rule for all batch elements, or [batch, outputs, inputs]. In both cases batch
            elements must be independent of each other.

    Raises:
        ValueError: The rule has another shape or dtype.
    """
    rule, shape = np.asarray(rule), found.matrix.shape
    whole = _over_batch(rule, shape)
    if whole.shape != shape or whole.dtype != bool:
        each = f", or bool {shape[1::2]} for every batch element" * (len(shape) == 4)
        raise ValueError(
            f"rule is {rule.dtype} {rule.shape}; it must be bool {shape}, output positions before "
            f"input positions{each}"
        )
    missing, spurious = (
        tuple(_edges(table, found.effects, whole.ndim // 2))
        for table in (whole & ~found.matrix, found.matrix & ~whole)
    )
    return Comparison(missing, spurious)


def _over_batch(rule: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Expands a rule for one batch element, or one rule for each, to a rule for the batch."""
    is_batch = len(shape) == 4 and shape[0] == shape[2]
    if not is_batch or rule.shape not in (shape[1::2], (shape[0], *shape[1::2])):
        return rule
    whole = np.zeros(shape, rule.dtype)
    for row in range(shape[0]):
        whole[row, :, row] = rule if rule.ndim == 2 else rule[row]
    return whole


def assert_dependencies(
    function: Callable[..., Array],
    inputs: ArrayLike,
    rule: ArrayLike,
    *,
    allow_remarks: bool = False,
    **options: Any,
) -> Dependency:
    """Asserts that a function depends on its inputs as a rule says.

    If it does, the remarks of the dependency matrix become warnings (`RemarkWarning`).

    Example of a test: `assert_dependencies(model, tokens, rules.causal(len(tokens)))`.

    Args:
        function: See `dependency_matrix`.
        inputs: See `dependency_matrix`.
        rule: See `compare`.
        allow_remarks: Whether to omit the warnings (`RemarkWarning`) about remarks.
        **options: See `dependency_matrix`.

    Returns:
        The dependency matrix.

    Raises:
        AssertionError: Edges are missing or spurious; the message lists them and all remarks. It
            names `atol` if spurious edges have effects of the size of rounding.
        ValueError: An argument is not as described.
    """
    found = dependency_matrix(function, inputs, **options)
    compared = compare(found, rule)
    if not compared.holds:
        doubts = (*_rounding(compared, found), *found.remarks, *found.notes)
        raise AssertionError("; ".join((str(compared), *doubts)))
    if not allow_remarks:
        warn(found)
    return found


def _rounding(compared: Comparison, found: Dependency) -> tuple[str, ...]:
    """Returns a remark about `atol` if spurious edges have effects of the size of rounding."""
    largest = np.max(found.effects, where=np.isfinite(found.effects), initial=0.0)
    sizes = [edge.effect for edge in compared.spurious if 0 < edge.effect <= _ROUNDING * largest]
    if not sizes:
        return ()
    advice = f"pass atol={_rounded_up(max(sizes)):.0e}"
    if "taint" in found.witnesses:
        advice += " and witnesses=('derivative', 'change'), since taint does not measure effects"
    return (
        f"{len(sizes)} of the spurious edges have an effect of at most {_ROUNDING:g} of the "
        f"largest one ({largest:.3g}): if this is rounding, {advice}",
    )


def _rounded_up(number: float) -> float:
    """Returns the next number with one digit, so that it is larger than `number`."""
    unit = 10.0 ** np.floor(np.log10(number))
    return float((np.floor(number / unit) + 1) * unit)


def warn(found: Dependency) -> None:
    """Warns about the remarks of a certificate that holds."""
    for remark in found.remarks:
        warnings.warn(remark, RemarkWarning, stacklevel=3)


def _edges(
    table: Bool[np.ndarray, "*pairs"], effects: Float[np.ndarray, "*pairs"], split: int
) -> list[Edge]:
    sizes = np.nan_to_num(effects[table], nan=0.0, posinf=np.inf).tolist()
    places = zip(np.argwhere(table).tolist(), sizes, strict=True)
    edges = (Edge(tuple(place[:split]), tuple(place[split:]), size) for place, size in places)
    return sorted(edges, key=lambda edge: -edge.effect)


def _listed(kind: str, edges: Sequence[Edge], most: int = 3) -> str:
    """Returns a text with the number of edges and the first `most` edges."""
    if not edges:
        return f"0 {kind} edges"
    some = ", ".join(map(str, edges[:most])) + (", …" if len(edges) > most else "")
    return f"{len(edges)} {kind} edge{'s' * (len(edges) > 1)}: {some}"


def draw_dependency(
    found: Dependency,
    rule: Bool[np.ndarray, "batch length 1 length"],
    path: Path,
    title: str,
) -> None:
    """Writes a PNG of the dependencies within the last batch element.

    The left panel shows the found edges and the rule, the right panel the effect of each pair.

    Args:
        found: The `Dependency` of a batch on one input row.
        rule: The bool table with the same shape as its matrix.
        path: The PNG file to write.
        title: The title of the picture.
    """
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from jaxformer.artifacts.files import write_figure

    matrix, rule = found.matrix[-1, :, 0], rule[-1, :, 0]
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    kinds = {
        "depends, as the rule says": ("#2b5c8a", matrix & rule),
        "spurious: depends, against the rule": ("#d62728", matrix & ~rule),
        "missing: should depend": ("#ff9f1c", rule & ~matrix),
    }
    table = sum(number * where for number, (_, where) in enumerate(kinds.values(), 1))
    colours = ["#f4f4f4", *(colour for colour, _ in kinds.values())]
    left.imshow(table, cmap=ListedColormap(colours), vmin=0, vmax=3, interpolation="nearest")
    left.legend(
        handles=[Patch(color=c, label=f"{n} ({w.sum()})") for n, (c, w) in kinds.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        fontsize=8,
    )
    left.set_title("which output depends on which input")
    effects = found.effects[-1, :, 0]
    some = effects[np.isfinite(effects) & (effects > 0)]
    if some.size:
        scale = LogNorm(max(some.min(), some.max() * 1e-8), some.max())
        shown = np.where(effects > 0, effects, np.nan)
        image = right.imshow(shown, norm=scale, interpolation="nearest")
        figure.colorbar(image, ax=right, label="largest derivative or change (hidden states)")
    right.set_title("how much (white: exactly 0)")
    for axes in (left, right):
        axes.set(xlabel="input position", ylabel="output position")
    write_figure(figure, title, path, dpi=110)
