"""Comparison of a dependency matrix with a rule, and a picture of both."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxformer.verify.dependency import Dependency, dependency_matrix, place_name

# Effects below this fraction of the largest effect may be rounding errors.
_ROUNDING = 1e-5


class RemarkWarning(UserWarning):
    """Warning that a dependency matrix may be wrong although it equals the rule."""


class Edge(NamedTuple):
    """A dependency of an output position on an input position, and its largest measured effect."""

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
        missing: Dependencies in the rule that were not found.
        spurious: Dependencies that were found but are not in the rule.
    """

    missing: tuple[Edge, ...]
    spurious: tuple[Edge, ...]

    @property
    def holds(self) -> bool:
        """Whether the dependencies that were found equal the rule."""
        return not self.missing and not self.spurious

    def __str__(self) -> str:
        """Returns the numbers of unexpected and missing dependencies, and the first of each."""
        return f"{_listed('unexpected', self.spurious)}; {_listed('missing', self.missing)}"


def compare(found: Dependency, rule: ArrayLike) -> Comparison:
    """Compares a dependency matrix with a rule (see `rules`).

    Args:
        found: The dependency matrix.
        rule: A bool array with the matrix's shape. For batches, the rule may also be
            [outputs, inputs] (the same for all batch elements) or [batch, outputs, inputs]. With
            these two shapes, no output may depend on another batch element.

    Raises:
        ValueError: The rule is not a bool array of an accepted shape.
    """
    rule, shape = np.asarray(rule), found.matrix.shape
    whole = _over_batch(rule, shape)
    if whole.shape != shape or whole.dtype != bool:
        each = f", or bool {shape[1::2]} for every batch element" * (len(shape) == 4)
        raise ValueError(
            f"rule is {rule.dtype} {rule.shape}; it must be bool {shape}, with output positions "
            f"as the first axis{each}"
        )
    missing, spurious = (
        tuple(_edges(table, found.effects, whole.ndim // 2))
        for table in (whole & ~found.matrix, found.matrix & ~whole)
    )
    return Comparison(missing, spurious)


def _over_batch(rule: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Expands a rule [outputs, inputs] or [batch, outputs, inputs] to the whole batch."""
    is_batch = len(shape) == 4 and shape[0] == shape[2]
    if not is_batch or rule.shape not in (shape[1::2], (shape[0], *shape[1::2])):
        return rule
    whole = np.zeros(shape, rule.dtype)
    for index in range(shape[0]):
        whole[index, :, index] = rule if rule.ndim == 2 else rule[index]
    return whole


def assert_dependencies(
    function: Callable[..., Array],
    inputs: ArrayLike,
    rule: ArrayLike,
    *,
    allow_remarks: bool = False,
    **options: Any,
) -> Dependency:
    """Asserts that a function depends on its inputs exactly as a rule says.

    If the assertion holds, the remarks of the dependency matrix become warnings (`RemarkWarning`).

    Example of a test: `assert_dependencies(model, tokens, rules.causal(len(tokens)))`.

    Args:
        function: See `dependency_matrix`.
        inputs: See `dependency_matrix`.
        rule: See `compare`.
        allow_remarks: If True, no `RemarkWarning` is issued.
        **options: See `dependency_matrix`.

    Returns:
        The dependency matrix.

    Raises:
        AssertionError: Dependencies are missing or unexpected. The message lists these
            dependencies and all remarks. The message recommends `atol` if unexpected effects are as
            small as rounding errors.
        ValueError: An argument is invalid.
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
    """Returns a remark about `atol` if unexpected effects are as small as rounding errors."""
    largest = np.max(found.effects, where=np.isfinite(found.effects), initial=0.0)
    sizes = [edge.effect for edge in compared.spurious if 0 < edge.effect <= _ROUNDING * largest]
    if not sizes:
        return ()
    advice = f"pass atol={_rounded_up(max(sizes)):.0e}"
    if "taint" in found.witnesses:
        advice += " and witnesses=('derivative', 'change'), as taint analysis measures no effects"
    return (
        f"the effects of {len(sizes)} unexpected dependencies are at most {_ROUNDING:g} times the "
        f"largest effect ({largest:.3g}); if they are rounding errors, {advice}",
    )


def _rounded_up(number: float) -> float:
    """Rounds up to one significant digit; the result is larger than `number`."""
    unit = 10.0 ** np.floor(np.log10(number))
    return float((np.floor(number / unit) + 1) * unit)


def warn(found: Dependency) -> None:
    """Issues the remarks of a dependency matrix as warnings."""
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
    """Returns a text with the number of dependencies and the first `most` dependencies."""
    if not edges:
        return f"0 {kind} dependencies"
    some = ", ".join(map(str, edges[:most])) + (", …" if len(edges) > most else "")
    noun = "dependency" if len(edges) == 1 else "dependencies"
    return f"{len(edges)} {kind} {noun}: {some}"


def draw_dependency(
    found: Dependency,
    rule: Bool[np.ndarray, "batch length 1 length"],
    path: Path,
    title: str,
) -> None:
    """Draws the dependencies within the last batch element as a PNG.

    The left panel compares the dependencies with the rule. The right panel shows the effect of each
    pair of positions.

    Args:
        found: The `Dependency` of all positions of a batch on the positions of its last batch
            element.
        rule: The expected dependencies, a bool array with the shape of `found.matrix`.
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
        "expected dependency": ("#2b5c8a", matrix & rule),
        "unexpected dependency": ("#d62728", matrix & ~rule),
        "missing dependency": ("#ff9f1c", rule & ~matrix),
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
    left.set_title("which output position depends on which input position")
    effects = found.effects[-1, :, 0]
    some = effects[np.isfinite(effects) & (effects > 0)]
    if some.size:
        scale = LogNorm(max(some.min(), some.max() * 1e-8), some.max())
        shown = np.where(effects > 0, effects, np.nan)
        image = right.imshow(shown, norm=scale, interpolation="nearest")
        figure.colorbar(image, ax=right, label="largest derivative or change (hidden states)")
    right.set_title("size of the effect (white: exactly 0)")
    for axes in (left, right):
        axes.set(xlabel="input position", ylabel="output position")
    write_figure(figure, title, path, dpi=110)
