"""A stack of layers, unrolled or as a scan.

    x → layer 1 → layer 2 → … → norm

The layers (`layers.layer`) may differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.scores import RelativePositions
from jaxformer.functional.inputs import Forward
from jaxformer.functional.layers.layer import (
    Layer,
    LayerInputs,
    LayerOutput,
    init_layer,
    layer_points,
    output_dim,
    run_layer,
    sublayers_of,
    weight_shapes_of,
)
from jaxformer.functional.layers.norms import Norm
from jaxformer.functional.layers.sublayer import Initial, SubLayer, with_contexts
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.functional.tokens import Tokens, is_few
from jaxformer.functional.trees import (
    REMAT,
    Weights,
    find_period,
    stack_trees,
    unstack,
)


class Repetition(NamedTuple):
    """The layers `first` … `stop − 1`, which a scan runs: layer n + period equals layer n.

    In a stack of one layer without a window for every five with one, the period is six.
    """

    first: int
    period: int
    stop: int


@dataclass(frozen=True)
class Stack:
    """A stack of layers.

    Attributes:
        layers: the layers, each a sequence of parts.
        dim: the number of features of the first layer's input.
        final_norm: the norm after the last layer, or None.
        output_scale: a factor of the result, or None.
        relative: relative positions that all layers share, or None.
        initial: the size of the initial weights; its `input_stddev` is that of the first layer.
    """

    layers: tuple[Layer, ...]
    dim: int
    final_norm: Norm | None = None
    output_scale: float | None = None
    relative: RelativePositions | None = None
    initial: Initial = Initial(None)  # noqa: RUF009 (frozen)

    @cached_property
    def sublayers(self) -> tuple[SubLayer, ...]:
        """The different sub-layers of all layers."""
        return tuple(dict.fromkeys(x for layer in self.layers for x in sublayers_of(layer)))

    @cached_property
    def points(self) -> tuple[str, ...]:
        """The points of all layers; see `layer_points`.

        Those of the layer with the most points come first, in their order.
        """
        layers = sorted(map(layer_points, self.layers), key=len, reverse=True)
        return tuple(dict.fromkeys(x for layer in layers for x in layer))

    @cached_property
    def masks(self) -> tuple[Mask, ...]:
        """The mask of each sub-layer that has one."""
        masks = [x.rule() for layer in self.layers for x in sublayers_of(layer)]
        return tuple(mask for mask in masks if mask is not None)

    @property
    def units(self) -> tuple[int, ...]:
        """Numbers of units that tensor parallelism can divide; see `SubLayer`."""
        return tuple(dict.fromkeys(x for sublayer in self.sublayers for x in sublayer.units()))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The number of features of each layer's input and, at the end, of the last output."""
        return tuple(accumulate(self.layers, lambda dim, x: output_dim(x, dim), initial=self.dim))

    @cached_property
    def repetition(self) -> Repetition:
        """How a scan runs the layers."""
        first, period = find_period(list(zip(self.layers, self.dims[:-1], strict=True)))
        num_layers = len(self.layers)
        return Repetition(first, period, num_layers - (num_layers - first) % period)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the layers whose weights have equal shapes, for each such group.

        Groups say how weights are stacked, `repetition` says how a scan runs the layers.

        Layers of a group share a stacked tree, but need not be equal: they may differ in a window.
        """
        groups: dict[tuple, list[int]] = {}
        for number, (layer, dim) in enumerate(zip(self.layers, self.dims[:-1], strict=True)):
            groups.setdefault(weight_shapes_of(layer, dim), []).append(number)
        return tuple(map(tuple, groups.values()))

    def init(self, key: PRNGKeyArray) -> Any:
        """Returns the initial weights of all layers, as `group_trees` stacks them."""
        keys, equal, trees = jax.random.split(key, len(self.layers)), {}, {}
        for number, layer in enumerate(self.layers):
            initial = self.initial if number == 0 else replace(self.initial, input_stddev=1.0)
            equal.setdefault((layer, initial, self.dims[number]), []).append(number)
        for settings, numbers in equal.items():  # equal layers are initialized by one program
            stacked = jax.vmap(partial(init_layer, *settings))(keys[np.array(numbers)])
            trees |= dict(zip(numbers, unstack(stacked, len(numbers)), strict=True))
        return self.group_trees([trees[number] for number in range(len(self.layers))])

    def group_trees(self, trees: Sequence[Weights]) -> Any:
        """Stacks the weights of layers with equal shapes; the inverse of `layer_trees`.

        Returns:
            One tree if all layers have equal shapes. Otherwise {number of the first layer of a
            group: tree}. The arrays have the layer of the group as their first axis.
        """
        stacked = {
            str(some[0]): stack_trees([trees[number] for number in some]) for some in self.groups
        }
        return stacked if len(stacked) > 1 else stacked["0"]

    def by_group(self, weights: Any) -> dict[tuple[int, ...], Weights]:
        """Returns the stacked tree of each group, by the numbers of its layers."""
        weights = self.group_trees(weights) if isinstance(weights, list) else weights
        if len(self.groups) == 1:
            return {self.groups[0]: weights}
        return {some: weights[str(some[0])] for some in self.groups}

    def layer_trees(self, weights: Any) -> list[Weights]:
        """Returns the weights of each layer; a list is returned unchanged.

        Call this once before a decoding loop: slicing stacked weights inside the loop is slow.
        """
        if isinstance(weights, list):
            return weights
        trees = {
            number: tree
            for some, stacked in self.by_group(weights).items()
            for number, tree in zip(some, unstack(stacked, len(some)), strict=True)
        }
        return [trees[number] for number in range(len(self.layers))]

    def outside_repetition(self, weights: Any) -> dict[int, Weights]:
        """Returns the weights of each layer before and after the repetition, by its number."""
        groups = self.by_group(weights).items()
        return {
            number: jax.tree.map(lambda leaf, place=place: leaf[place], tree)
            for some, tree in groups
            for place, number in enumerate(some)
            if not self.repetition.first <= number < self.repetition.stop
        }

    def finish(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Applies the final norm and the output scale to the last layer's output."""
        x = x if self.final_norm is None else self.final_norm(weights["final_norm"], x)
        return x if self.output_scale is None else x * jnp.asarray(self.output_scale, x.dtype)

    def prepare(self, weights: Any) -> list[Weights]:
        """Returns the weights of each layer in the form for decoding; see `SubLayer.prepare`."""
        trees = self.layer_trees(weights)
        return [
            {**tree, **{x.name: x.prepare(tree[x.name]) for x in sublayers_of(layer)}}
            for layer, tree in zip(self.layers, trees, strict=True)
        ]


def run_stack(
    stack: Stack,
    weights: Weights,
    x: Float[Array, "batch length dim"],
    tokens: Tokens,
    states: Sequence[Mapping[str, Any]] | None = None,
    dropout_keys: Sequence[PRNGKeyArray | None] | None = None,
) -> Forward:
    """Runs all layers, by a scan or unrolled.

    Args:
        stack: the layers.
        weights: the weights of the model: those of the layers, in "blocks", and what they share.
        x: the input of the first layer.
        tokens: the tokens of the pass.
        states: what each layer kept of earlier tokens, by sub-layer; None: nothing.
        dropout_keys: a key for each layer; None: no dropout.

    Returns:
        The output of the last layer, before the final norm. The first axis of a captured value is
        that of the layers that have the point.
    """
    num_layers, run = len(stack.layers), tokens.run
    scans = run.execution.scans(num_layers, tokens.slots is not None and is_few(x.shape[1]))
    steps = layer_steps(stack, with_contexts(stack.sublayers, tokens, weights), scans)
    columns = (
        dropout_keys or [None] * num_layers,
        states or [{}] * num_layers,
        layer_hooks(stack, run.hooks),
    )
    inputs = [LayerInputs(*each) for each in zip(*columns, strict=True)]
    blocks, outputs = weights["blocks"], []
    alone = (
        stack.outside_repetition(blocks) if scans else dict(enumerate(stack.layer_trees(blocks)))
    )
    for number, layer in enumerate(stack.layers):
        if number in alone:
            x, *output = steps[layer](alone[number], x, inputs[number])
            outputs.append(output)
        elif number == stack.repetition.first:
            x, repeated = _scan(stack, steps, x, blocks, inputs)
            outputs += repeated
    after, captured, auxiliary = zip(*outputs, strict=True)
    sums = {name: value.sum(axis=0) for name, value in _stacked(auxiliary).items()}
    return Forward(x, _stacked(captured), auxiliary=sums, states=after)


def layer_steps(
    stack: Stack, tokens: Tokens, scans: bool
) -> dict[Layer, Callable[[Weights, Array, LayerInputs], LayerOutput]]:
    """Returns `run_layer` of each different layer, with rematerialization."""
    # With a cache the caller is compiled already. A jit inside it lets JAX trace equal layers once.
    # Without a cache the caller may not be compiled, and this jit would compile at every call.
    compiled = (lambda step: step) if tokens.slots is None else jax.jit
    # The forward and the backward pass of a scan are separate loops, so nothing has to prevent
    # common subexpression elimination between them.
    remat = partial(REMAT[tokens.run.execution.remat], prevent_cse=not scans)
    return {x: compiled(remat(partial(run_layer, x, tokens))) for x in set(stack.layers)}


def layer_hooks(stack: Stack, hooks: Hooks) -> list[Hooks]:
    """Returns the hooks of each layer.

    The first axis of a patch is that of the layers that have its point.

    Raises:
        ValueError: the first axis of a patch has another size.
    """
    hooks = hooks.of(stack.points)
    patches: list[dict[str, Patch]] = [{} for _ in stack.layers]
    for name, patch in hooks.patch.items():
        having = [n for n, layer in enumerate(stack.layers) if name in layer_points(layer)]
        for number, entry in zip(having, patch.of_layers(name, len(having)), strict=True):
            patches[number][name] = entry
    return [replace(hooks, patch=patch) for patch in patches]


def _scan(
    stack: Stack,
    steps: Mapping[Layer, Callable[[Weights, Array, LayerInputs], LayerOutput]],
    x: Float[Array, "batch length dim"],
    weights: Any,
    inputs: Sequence[LayerInputs],
) -> tuple[Float[Array, "batch length dim"], list[list]]:
    """Runs the layers of the repetition by a scan over its periods.

    Returns:
        (x, [states, captured, auxiliary] of each of these layers).
    """
    first, period, stop = stack.repetition

    def one_period(
        x: Float[Array, "batch length dim"], part: tuple[dict, list[LayerInputs]]
    ) -> tuple[Float[Array, "batch length dim"], list[list]]:
        (stacked, inputs), trees, outputs = part, {}, []
        for members, tree in stacked.items():
            trees |= dict(zip(members, unstack(tree, len(members)), strict=True))
        for number, given in zip(range(first, first + period), inputs, strict=True):
            x, *output = steps[stack.layers[number]](trees[number], x, given)
            outputs.append(output)
        return x, outputs

    periods = range(first, stop, period)
    by_place = [stack_trees([inputs[n + place] for n in periods]) for place in range(period)]
    groups = stack.by_group(weights).items()
    trees = dict(_by_period(stack.repetition, *group) for group in groups)
    trees = {members: tree for members, tree in trees.items() if members}
    x, outputs = jax.lax.scan(one_period, x, (trees, by_place))
    unstacked = [unstack(output, len(periods)) for output in map(tuple, outputs)]
    return x, [list(unstacked[place][n]) for n in range(len(periods)) for place in range(period)]


def _by_period(
    repetition: Repetition, numbers: tuple[int, ...], tree: Weights
) -> tuple[tuple[int, ...], Weights]:
    """Returns the layers of a group in the first period, and the weights of those in all periods.

    The weights are [periods, layers of the group in a period, …].
    """
    first, period, stop = repetition
    members = tuple(n for n in numbers if first <= n < first + period)
    if not members:
        return members, tree
    begin, end = (sum(n < edge for n in numbers) for edge in (first, stop))
    return members, jax.tree.map(
        lambda leaf: leaf[begin:end].reshape(-1, len(members), *leaf.shape[1:]), tree
    )


def _stacked(values: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Stacks the values of all layers that have one, by name.

    Raises:
        ValueError: the layers have values of different shapes.
    """
    names = dict.fromkeys(name for each in values for name in each)
    found = {name: [each[name] for each in values if name in each] for name in names}
    for name, each in found.items():
        if len(shapes := dict.fromkeys(x.shape for x in each)) > 1:
            raise ValueError(
                f"{name} has different shapes in different layers, {', '.join(map(str, shapes))}, "
                "so these values cannot be stacked; if layers of a cache have different windows, "
                "start it with ring=False, so that all layers keep all tokens"
            )
    return {name: jnp.stack(each) for name, each in found.items()}
