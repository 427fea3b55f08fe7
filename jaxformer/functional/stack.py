"""A stack of layers, run one after another or by `jax.lax.scan`.

    x → layer 1 → layer 2 → … → norm

The layers (see `layers.layer`) may differ in their sub-layers, settings and weight shapes.
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
from jaxformer.functional.hooks import NO_HOOK, HookPoints, Hooks, Intervention
from jaxformer.functional.inputs import Forward
from jaxformer.functional.layers.layer import (
    Layer,
    LayerInputs,
    LayerOutput,
    init_layer,
    layer_hook_points,
    list_sublayers,
    list_weight_shapes,
    output_dim,
    run_layer,
)
from jaxformer.functional.layers.norms import Norm, apply_norm
from jaxformer.functional.layers.sublayer import Initial, SubLayer, with_contexts
from jaxformer.functional.tokens import Tokens, is_few
from jaxformer.functional.trees import (
    REMAT,
    Weights,
    find_period,
    stack_trees,
    unstack,
)


class Repetition(NamedTuple):
    """The layers `first` … `stop − 1`, which a scan runs.

    Layer n + `period` has the same settings as layer n.

    For example, if each layer without a window follows five layers with a window, the period is
    six.
    """

    first: int
    period: int
    stop: int


@dataclass(frozen=True)
class Stack:
    """A stack of layers.

    Attributes:
        layers: the layers, each a tuple of `Residual`, `Plain` and `Parallel`.
        dim: the number of features of the first layer's input.
        final_norm: the norm after the last layer, or None.
        output_scale: a factor that multiplies the output of the stack, or None.
        relative: the relative position bias that all layers share, or None.
        input_stddev: the standard deviation of the first layer's input, which scales initial
            weights.
    """

    layers: tuple[Layer, ...]
    dim: int
    final_norm: Norm | None = None
    output_scale: float | None = None
    relative: RelativePositions | None = None
    input_stddev: float = 1.0

    @cached_property
    def sublayers(self) -> tuple[SubLayer, ...]:
        """The distinct sub-layers of all layers."""
        return tuple(dict.fromkeys(x for layer in self.layers for x in list_sublayers(layer)))

    @cached_property
    def hook_points(self) -> tuple[str, ...]:
        """The names of the hook points of all layers; see `layer_hook_points`.

        The hook points of the layer with the most hook points come first, in order of computation.
        """
        layers = sorted(map(layer_hook_points, self.layers), key=len, reverse=True)
        return tuple(dict.fromkeys(x for layer in layers for x in layer))

    @cached_property
    def masks(self) -> tuple[Mask, ...]:
        """The masks of all sub-layers that have a mask."""
        masks = [x.rule() for layer in self.layers for x in list_sublayers(layer)]
        return tuple(mask for mask in masks if mask is not None)

    @property
    def units(self) -> tuple[int, ...]:
        """The sizes that tensor parallelism divides; see `SubLayer.units`."""
        return tuple(dict.fromkeys(x for sublayer in self.sublayers for x in sublayer.units()))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Numbers of features: one for each layer's input, and one for the last layer's output."""
        return tuple(accumulate(self.layers, lambda dim, x: output_dim(x, dim), initial=self.dim))

    @cached_property
    def repetition(self) -> Repetition:
        """The layers that a scan runs, and their period."""
        first, period = find_period(list(zip(self.layers, self.dims[:-1], strict=True)))
        num_layers = len(self.layers)
        return Repetition(first, period, num_layers - (num_layers - first) % period)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of layers with equal weight shapes, each a tuple of layer indices.

        The weights of a group are stacked in one tree. Layers with equal weight shapes may differ
        in other settings, such as the window. A scan (see `repetition`) therefore requires layers
        with equal settings, not only with equal weight shapes.
        """
        groups: dict[tuple, list[int]] = {}
        for number, (layer, dim) in enumerate(zip(self.layers, self.dims[:-1], strict=True)):
            groups.setdefault(list_weight_shapes(layer, dim), []).append(number)
        return tuple(map(tuple, groups.values()))

    def init(self, key: PRNGKeyArray) -> Any:
        """Returns the initial weights of all layers, stacked by `group_trees`."""
        keys, equal, trees = jax.random.split(key, len(self.layers)), {}, {}
        for number, layer in enumerate(self.layers):
            initial = Initial(len(self.layers), 1.0 if number else self.input_stddev)
            equal.setdefault((layer, initial, self.dims[number]), []).append(number)
        # One vmapped program initializes all layers with equal settings.
        for settings, numbers in equal.items():
            stacked = jax.vmap(partial(init_layer, *settings))(keys[np.array(numbers)])
            trees |= dict(zip(numbers, unstack(stacked, len(numbers)), strict=True))
        return self.group_trees([trees[number] for number in range(len(self.layers))])

    def group_trees(self, trees: Sequence[Weights]) -> Any:
        """Stacks the weights of layers with equal shapes; the inverse of `layer_trees`.

        Returns:
            One tree if all layers have equal shapes; otherwise {number of a group's first layer, as
            a string: tree of the group}. The first axis of each array is the layer within the
            group.
        """
        stacked = {
            str(group[0]): stack_trees([trees[number] for number in group]) for group in self.groups
        }
        return stacked if len(stacked) > 1 else stacked["0"]

    def by_group(self, weights: Any) -> dict[tuple[int, ...], Weights]:
        """Returns {group: stacked tree of the group's weights}; see `groups`."""
        weights = self.group_trees(weights) if isinstance(weights, list) else weights
        if len(self.groups) == 1:
            return {self.groups[0]: weights}
        return {group: weights[str(group[0])] for group in self.groups}

    def layer_trees(self, weights: Any) -> list[Weights]:
        """Returns a list of the weights of each layer.

        A list of weights is returned unchanged. Call this once before a decoding loop, because
        slicing stacked weights inside the loop is slow.
        """
        if isinstance(weights, list):
            return weights
        trees = {
            number: tree
            for group, stacked in self.by_group(weights).items()
            for number, tree in zip(group, unstack(stacked, len(group)), strict=True)
        }
        return [trees[number] for number in range(len(self.layers))]

    def outside_repetition(self, weights: Any) -> dict[int, Weights]:
        """Returns {layer index: weights} for the layers that the scan does not run."""
        return {
            number: jax.tree.map(lambda leaf, index=index: leaf[index], tree)
            for group, tree in self.by_group(weights).items()
            for index, number in enumerate(group)
            if not self.repetition.first <= number < self.repetition.stop
        }

    def finish(
        self, weights: Weights, x: Float[Array, "*batch dim"], hook: HookPoints = NO_HOOK
    ) -> Float[Array, "*batch dim"]:
        """Applies the final norm and the output scale to the last layer's output."""
        x = apply_norm(self.final_norm, weights, "final_norm", x, hook)
        return x if self.output_scale is None else x * jnp.asarray(self.output_scale, x.dtype)

    def pack_weights(self, weights: Any) -> list[Weights]:
        """Returns each layer's weights, repacked for decoding by `SubLayer.pack_weights`."""
        trees = self.layer_trees(weights)
        return [
            {**tree, **{x.name: x.pack_weights(tree[x.name]) for x in list_sublayers(layer)}}
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
    """Runs all layers, either unrolled or with a scan over the layers of `Stack.repetition`.

    Args:
        stack: the layers.
        weights: the weights of the model. The layers' weights are in "blocks".
        x: the input of the first layer.
        tokens: the tokens of the forward pass.
        states: for each layer, {name of a sub-layer: state after the earlier tokens}; None if
            there is no cache.
        dropout_keys: a dropout key for each layer; None disables dropout.

    Returns:
        The output of the last layer, before the final norm. The first axis of a captured value runs
        over the layers that have the hook point.
    """
    num_layers, run = len(stack.layers), tokens.run
    scans = run.execution.scans(num_layers, tokens.cache_views is not None and is_few(x.shape[1]))
    steps = layer_steps(stack, with_contexts(stack.sublayers, tokens, weights), scans)
    columns = (
        dropout_keys or [None] * num_layers,
        states or [{}] * num_layers,
        layer_hooks(stack, run.hooks),
    )
    inputs = [LayerInputs(*values) for values in zip(*columns, strict=True)]
    blocks, outputs = weights["blocks"], []
    unrolled = (
        stack.outside_repetition(blocks) if scans else dict(enumerate(stack.layer_trees(blocks)))
    )
    for number, layer in enumerate(stack.layers):
        if number in unrolled:
            x, *output = steps[layer](unrolled[number], x, inputs[number])
            outputs.append(output)
        elif number == stack.repetition.first:
            x, repeated = _scan(stack, steps, x, blocks, inputs)
            outputs += repeated
    after, captured, auxiliary = zip(*outputs, strict=True)
    sums = {name: value.sum(axis=0) for name, value in _stack_by_name(auxiliary).items()}
    return Forward(x, _stack_by_name(captured), auxiliary=sums, states=after)


def layer_steps(
    stack: Stack, tokens: Tokens, scans: bool
) -> dict[Layer, Callable[[Weights, Array, LayerInputs], LayerOutput]]:
    """Returns {layer: function that runs the layer} for each distinct layer.

    Each function calls `run_layer` with the remat policy in `tokens.run.execution`.
    """
    # A pass with a key/value cache runs inside the caller's jit. There, a second jit makes JAX
    # trace layers with equal settings only once. A pass without a cache may run outside of jit.
    # There, jit would compile in every pass, because every pass creates new functions.
    compiled = (lambda step: step) if tokens.cache_views is None else jax.jit
    # A scan has separate loops for the forward and the backward pass, so XLA cannot eliminate the
    # recomputation as a common subexpression.
    remat = partial(REMAT[tokens.run.execution.remat], prevent_cse=not scans)
    return {x: compiled(remat(partial(run_layer, x, tokens))) for x in set(stack.layers)}


def layer_hooks(stack: Stack, hooks: Hooks) -> list[Hooks]:
    """Splits hooks into the hooks of each layer.

    The first axis of a patch runs over the layers that have the hook point. An edit is copied for
    each of these layers, with the number of the layer.

    Raises:
        ValueError: The size of a patch's first axis is not the number of layers with the hook
            point, or a layer of an edit does not have the hook point.
    """
    hooks = hooks.of(stack.hook_points)
    patches: list[dict[str, Intervention]] = [{} for _ in stack.layers]
    for name, patch in hooks.patch.items():
        layers = [n for n, layer in enumerate(stack.layers) if name in layer_hook_points(layer)]
        for number, entry in zip(layers, patch.split_layers(name, layers), strict=True):
            patches[number][name] = entry
    return [replace(hooks, patch=patch) for patch in patches]


def _scan(
    stack: Stack,
    steps: Mapping[Layer, Callable[[Weights, Array, LayerInputs], LayerOutput]],
    x: Float[Array, "batch length dim"],
    weights: Any,
    inputs: Sequence[LayerInputs],
) -> tuple[Float[Array, "batch length dim"], list[list]]:
    """Runs the layers of `stack.repetition` by a scan with one iteration per period.

    For example, six layers A B C A B C have the period three. If A and B have equal weight shapes,
    the groups are (0, 1, 3, 4) and (2, 5), and the scan runs over the trees

        {(0, 1): weights [2, 2, …], (2,): weights [2, 1, …]}

    which `_by_period` returns. Each key of this dictionary lists layers that the first iteration
    runs. The first axis of the weights is the iteration, and the second axis has an entry for each
    layer in the key. Each iteration runs A, B and C with the following weights and inputs
    (dropout key, states and hooks):

        iteration    tree (0, 1)       tree (2,)    inputs
        0            layers 0 and 1    layer 2      layers 0, 1 and 2
        1            layers 3 and 4    layer 5      layers 3, 4 and 5

    Returns:
        (x, outputs): the output of the last layer of the scan, and [states, captured, auxiliary]
        for each layer of the scan.
    """
    first, period, stop = stack.repetition

    def one_period(
        x: Float[Array, "batch length dim"], part: tuple[dict, list[Array]]
    ) -> tuple[Float[Array, "batch length dim"], list[list]]:
        (stacked, own), trees, outputs = part, {}, []
        inputs = shared(own)
        for members, tree in stacked.items():
            trees |= dict(zip(members, unstack(tree, len(members)), strict=True))
        for number, layer_inputs in zip(range(first, first + period), inputs, strict=True):
            x, *output = steps[stack.layers[number]](trees[number], x, layer_inputs)
            outputs.append(output)
        return x, outputs

    starts = range(first, stop, period)
    inputs_in_period, shared = _stack_unless_shared(
        [[inputs[n + i] for i in range(period)] for n in starts]
    )
    groups = stack.by_group(weights).items()
    trees = dict(_by_period(stack.repetition, *group) for group in groups)
    trees = {members: tree for members, tree in trees.items() if members}
    x, outputs = jax.lax.scan(one_period, x, (trees, inputs_in_period))
    unstacked = [unstack(output, len(starts)) for output in map(tuple, outputs)]
    return x, [list(unstacked[i][n]) for n in range(len(starts)) for i in range(period)]


def _stack_unless_shared(
    trees: Sequence[list[LayerInputs]],
) -> tuple[list[Array], Callable[[list[Array]], list[LayerInputs]]]:
    """Stacks the leaves of trees of equal structure, but not the leaves that all trees share.

    The arrays of an `Edit`, such as the weights of an autoencoder, are the same for all layers, and
    may be large.

    Returns:
        (stacked leaves, function that returns a tree for one entry of the stacked leaves).
    """
    columns = list(zip(*map(jax.tree.leaves, trees), strict=True))
    is_shared = [len(trees) > 1 and all(x is column[0] for x in column) for column in columns]
    pairs = list(zip(columns, is_shared, strict=True))

    def rebuilt(own: list[Array]) -> list[LayerInputs]:
        rest = iter(own)
        leaves = [column[0] if is_one else next(rest) for column, is_one in pairs]
        return jax.tree.unflatten(jax.tree.structure(trees[0]), leaves)

    return [jnp.stack(column) for column, is_one in pairs if not is_one], rebuilt


def _by_period(
    repetition: Repetition, numbers: tuple[int, ...], tree: Weights
) -> tuple[tuple[int, ...], Weights]:
    """Reshapes stacked weights for a scan; the example in `_scan` shows the result.

    Args:
        repetition: the layers that the scan runs.
        numbers: the indices of the layers whose weights are stacked in `tree`.
        tree: the stacked weights, [layers, …].

    Returns:
        (members, weights): the layers of `numbers` that the first iteration of the scan runs, and
        the weights of all iterations, [iterations, members, …]. If the scan runs no layer of
        `numbers`, `members` is empty and `weights` is `tree`.
    """
    first, period, stop = repetition
    members = tuple(n for n in numbers if first <= n < first + period)
    if not members:
        return members, tree
    begin, end = (sum(n < edge for n in numbers) for edge in (first, stop))
    return members, jax.tree.map(
        lambda leaf: leaf[begin:end].reshape(-1, len(members), *leaf.shape[1:]), tree
    )


def _stack_by_name(values: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Stacks values with equal names, over the layers that have them.

    Raises:
        ValueError: Values with the same name have different shapes.
    """
    names = dict.fromkeys(name for layer in values for name in layer)
    found = {name: [layer[name] for layer in values if name in layer] for name in names}
    for name, arrays in found.items():
        if len(shapes := dict.fromkeys(x.shape for x in arrays)) > 1:
            raise ValueError(
                f"{name} has different shapes in different layers, {', '.join(map(str, shapes))}, "
                "so its values cannot be stacked. If the layers have different windows, call "
                "init_cache with ring=False, so that all layers cache all tokens"
            )
    return {name: jnp.stack(arrays) for name, arrays in found.items()}
