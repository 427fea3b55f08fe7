"""Which output position depends on which input position, and whether that is the rule.

    found = dependency_matrix(function, inputs)       # bool [outputs, inputs], and how large
    compare(found, rules.causal(length))              # what is missing, what is spurious
    assert_dependencies(function, inputs, rules.causal(length))       # the same, in a test

The function is any that JAX can trace, from tokens (int) or embeddings (float, features last) to an
array whose leading axes are positions too: [length, …] or [batch, length, …].
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.verify.witnesses import by_change, by_derivative, by_taint

WITNESSES = ("taint", "derivative", "change")
NO_PATH = "an effect was seen where taint followed no path: one of its rules is wrong"


class Disagreement(NamedTuple):
    """What one witness saw of a pair and another did not, and why that may be."""

    output: tuple
    input: tuple
    why: str


@dataclass(frozen=True)
class Dependency:
    """matrix: bool [*output positions, *input positions], what any witness saw; effects: float of
    the same shape, the largest derivative or change, NaN where neither was asked for; witnesses: of
    how many pairs each was asked; disagreements: where they differ; remarks: what to know besides.
    """

    matrix: np.ndarray
    effects: np.ndarray
    witnesses: dict[str, int]
    disagreements: tuple[Disagreement, ...] = ()
    remarks: tuple[str, ...] = ()


def dependency_matrix(
    function, inputs, *, witnesses=None, sample: int | None = None, others=None, seed: int = 0
) -> Dependency:
    """Which output depends on which input, by witnesses that know nothing of one another.

    "taint" follows all inputs through the function's jaxpr, where an exact 0 stops them: every path
    that there is. "derivative": where the Jacobian is not 0. "change": where an output is another,
    bit by bit, once one input is. The last two are of one point: they may miss a path whose effect
    is 0 there or rounded away, and never see one that is not.

    witnesses: which of them; None: all, but for "derivative" where there is none. sample: of how
    many inputs (outputs, for the derivative) the other two are asked, if they are not the first;
    None: of all. others: what inputs are changed to, [*inputs' shape]; None: drawn by `seed`,
    tokens from those of the inputs and one more. ValueError: what cannot be asked.
    """
    inputs = _array(inputs)
    is_ids = not jnp.issubdtype(inputs.dtype, jnp.floating)
    by_default, witnesses = witnesses is None, _checked(witnesses, is_ids)
    for name, number, least in (("sample", sample, 1), ("seed", seed, 0)):
        if number is not None and not (is_whole(number) and number >= least):
            raise ValueError(f"{name} is {number!r}; it must be a whole number of at least {least}")
    if others is not None and np.shape(others) != inputs.shape:
        raise ValueError(f"others are {np.shape(others)}; inputs are {inputs.shape}")
    num_positions = inputs.ndim if is_ids else inputs.ndim - 1
    before, after = _positions(function, inputs, num_positions)
    rng = np.random.default_rng((seed, 1))  # a stream that inputs drawn by `seed` do not have
    size = int(np.prod(after)), int(np.prod(before))
    others = _others(inputs, rng) if others is None else jnp.asarray(others, inputs.dtype)
    unchanged = (others == inputs).reshape(size[1], -1).all(axis=1)
    if unchanged.any():
        place = _place(np.unravel_index(int(unchanged.argmax()), before))
        raise ValueError(f"others are what inputs are at {place}; they must differ everywhere")
    seen, asked, remarks = {}, {}, []
    for witness in witnesses:
        axis = 0 if witness == "derivative" else 1
        chosen = np.arange(size[axis])
        if sample is not None and seen and witness != "taint" and sample < size[axis]:
            chosen = np.sort(rng.choice(size[axis], sample, replace=False))
        if witness == "taint":
            found, said = by_taint(function, inputs, num_positions)
            remarks += said
        elif witness == "derivative":
            try:
                found = by_derivative(function, inputs, num_positions, chosen)
            except Exception as error:  # JAX raises many kinds, of loops, callbacks and refs
                if not by_default:
                    raise
                remarks.append(f"there is no derivative: {str(error).splitlines()[0]}")
                continue
        else:
            found = by_change(function, inputs, num_positions, chosen, others)
        whole = np.full(size, np.nan)
        whole[(chosen, slice(None)) if axis == 0 else (slice(None), chosen)] = found
        seen[witness], asked[witness] = whole, int(found.size)
    matrix = np.any([found > 0 for found in seen.values()], axis=0)
    effects = [found for witness, found in seen.items() if witness != "taint"]
    largest = np.fmax.reduce(effects) if effects else np.full(size, np.nan)
    return Dependency(
        matrix.reshape(*after, *before),
        largest.reshape(*after, *before),
        asked,
        tuple(_disagreements(seen, after, before)),
        tuple(remarks),
    )


def _array(inputs):
    try:
        return jnp.asarray(inputs)
    except TypeError as error:
        raise ValueError(f"inputs are {type(inputs).__name__}; they must be one array") from error


def is_whole(number) -> bool:
    """Of any integer type, and not a bool, which Python counts among them."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def _checked(witnesses, is_ids: bool):
    if isinstance(witnesses, str) or not isinstance(witnesses, (type(None), tuple, list)):
        raise ValueError(
            f"witnesses is {witnesses!r}; it must be a tuple of {', '.join(WITNESSES)}"
        )
    possible = [name for name in WITNESSES if not (is_ids and name == "derivative")]
    for name in possible if witnesses is None else witnesses:
        if name not in WITNESSES:
            raise ValueError(f"witness is {name!r}; it must be one of {', '.join(WITNESSES)}")
        if name not in possible:
            raise ValueError("inputs are integers, of which there is no derivative; give floats")
    chosen = tuple(possible if witnesses is None else witnesses)
    if not chosen:
        raise ValueError(f"witnesses is empty; give some of {', '.join(possible)}")
    return chosen


def _positions(function, inputs, num_positions: int):
    """The position axes of (inputs, outputs)."""

    if not num_positions or not inputs.size:
        raise ValueError(
            f"inputs are {inputs.dtype} {inputs.shape}; they must be ids [length] or "
            "[batch, length], or floats with their features as a last axis more"
        )
    output = jax.eval_shape(function, inputs)
    if not hasattr(output, "shape") or len(output.shape) < num_positions:
        raise ValueError(
            f"the function gives {output}; it must give one array whose first {num_positions} axes "
            "are positions, as those of its inputs are"
        )
    return inputs.shape[:num_positions], output.shape[:num_positions]


def _others(inputs, rng):
    """Something else at each position."""
    if jnp.issubdtype(inputs.dtype, jnp.floating):
        size = max(float(jnp.std(inputs.astype(jnp.float32))), 1.0)
        return jnp.asarray(size * rng.normal(size=inputs.shape), inputs.dtype)
    ids = np.unique(np.append(np.asarray(inputs), [0, 1]))  # ids that there surely are
    at = np.searchsorted(ids, np.asarray(inputs))
    drawn = ids[(at + rng.integers(1, len(ids), inputs.shape)) % len(ids)]
    return jnp.asarray(drawn, inputs.dtype)


_WHY = {
    "derivative": "a path leads there, but the derivative is 0 at this point: its effects cancel, "
    "are rounded away or end in a flat place (a ReLU below 0)",
    "change": "a path leads there, but this change was rounded away or ends in a flat place",
    "taint": NO_PATH,
}
_INFINITE = "what stops a path was an exact 0, which an infinite value gets past"


def _disagreements(seen, after, before):
    """Pairs that one witness was asked and denied, and another saw."""
    for witness, found in seen.items():
        others = [other for name, other in seen.items() if name != witness]
        if not others:
            continue
        effect = np.fmax.reduce(others)
        for output, input in np.argwhere((found == 0) & (effect > 0)):
            why = _WHY[witness]
            if witness == "taint" and np.isinf(effect[output, input]):
                why = _INFINITE
            places = np.unravel_index(output, after), np.unravel_index(input, before)
            yield Disagreement(*(tuple(map(int, place)) for place in places), why)


# ---- against a rule


class Edge(NamedTuple):
    """Output (its position), input (its position) and the largest effect seen."""

    output: tuple
    input: tuple
    effect: float

    def __str__(self):
        return f"output {_place(self.output)} ← input {_place(self.input)} ({self.effect:.3g})"


@dataclass(frozen=True)
class Comparison:
    """Edges of the rule that were not found, and edges found that are not of the rule, those of
    the largest effect first."""

    missing: tuple[Edge, ...]
    spurious: tuple[Edge, ...]

    @property
    def holds(self) -> bool:
        return not self.missing and not self.spurious

    def __str__(self):
        return f"{_listed('spurious', self.spurious)}; {_listed('missing', self.missing)}"


def compare(found: Dependency, rule) -> Comparison:
    """What is found beside what the rule (bool, of the matrix's shape) says; see `rules`."""
    rule = np.asarray(rule)
    if rule.shape != found.matrix.shape or rule.dtype != bool:
        raise ValueError(
            f"rule is {rule.dtype} {rule.shape}; it must be bool {found.matrix.shape}, output "
            "positions before input positions"
        )
    split = rule.ndim - _input_axes(found)
    missing, spurious = (
        tuple(_edges(table, found.effects, split))
        for table in (rule & ~found.matrix, found.matrix & ~rule)
    )
    return Comparison(missing, spurious)


def assert_dependencies(function, inputs, rule, **options) -> Dependency:
    """AssertionError, the edges and the remarks, unless the function depends on its inputs as the
    rule says.

    In a test of your own: assert_dependencies(model, tokens, rules.causal(len(tokens))).
    """
    found = dependency_matrix(function, inputs, **options)
    compared = compare(found, rule)
    if not compared.holds:
        raise AssertionError("; ".join((str(compared), *found.remarks)))
    return found


def _input_axes(found: Dependency) -> int:
    return found.matrix.ndim // 2


def _edges(table, effects, split: int):
    places = np.argwhere(table)
    sizes = np.nan_to_num(effects[table], nan=0.0, posinf=np.inf)
    for place, size in sorted(
        zip(places.tolist(), sizes.tolist(), strict=True), key=lambda pair: -pair[1]
    ):
        yield Edge(tuple(place[:split]), tuple(place[split:]), size)


def _place(place: tuple) -> str:
    return str(place[0]) if len(place) == 1 else f"{place[-1]} of row {place[0]}"


def _listed(kind: str, edges, most: int = 3) -> str:
    """How many there are, and the first of them."""
    if not edges:
        return f"0 {kind} edges"
    some = ", ".join(map(str, edges[:most])) + (", …" if len(edges) > most else "")
    return f"{len(edges)} {kind} edge{'s' * (len(edges) > 1)}: {some}"
