"""Functions with a custom gradient that also support forward-mode differentiation.

`jax.custom_vjp` does not support forward mode: `jax.jvp`, `jax.jacfwd` and `jax.hessian` raise an
error. With `own_gradient`, reverse mode computes a custom gradient, which saves time or memory, and
forward mode computes JAX's derivative of the function. To support both modes, this module defines a
JAX primitive that maps the tangents of the arguments to the tangents of the output. In forward
mode, JAX evaluates the primitive, which computes JAX's derivative. In reverse mode, JAX transposes
the primitive, which computes the custom gradient.

Reference:
    JAX documentation, "How JAX primitives work"; Radul et al. 2022 (reverse mode is forward mode,
    then transposition).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxformer.functional.placement import vary_alike

# Arrays or tracers.
Leaves = list[Any]
# A function (operands, tangents) → tangents, or (operands, cotangents) → cotangents.
Map = Callable[[Leaves, Leaves], Leaves]

_linear_map = Primitive("linear_map_with_own_transpose")
_linear_map.multiple_results = True


def own_gradient(
    function: Callable[..., Any],
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[[Any, Any], Sequence[Any]],
    derived: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns `function` with `backward` as its gradient.

    Args:
        function: a function of pytrees of arrays.
        forward: takes the arguments of `function` and returns (output of `function`, residuals).
        backward: function (residuals, cotangent of the output) → cotangents of the arguments; None
            for an argument without a cotangent.
        derived: a function with the same values as `function`. Forward mode differentiates
            `derived`, which defaults to `function`.
    """
    differentiable = jax.custom_jvp(function)
    derived = function if derived is None else derived

    @differentiable.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        output, residuals = forward(*primals)
        return output, _tangent(derived, backward, output, residuals, primals, tangents)

    # Inside `shard_map`, `vary_alike` makes every argument vary over each mesh axis over which any
    # argument varies. Therefore JAX sums the gradient of a replicated argument over the devices.
    return lambda *arguments: differentiable(*vary_alike(*arguments))


def _tangent(
    derived: Callable[..., Any],
    backward: Callable[[Any, Any], Sequence[Any]],
    output: Any,
    residuals: Any,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> Any:
    """Computes the tangent of the output, by a linear map whose transpose is `backward`."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, primals))
    rest, rest_structure = jax.tree.flatten(jax.tree.map(jnp.asarray, residuals))
    outputs, output_structure = jax.tree.flatten(output)
    # Most residuals are also arguments of the function. An array that is both a residual and an
    # argument is passed as one operand, so that it is stored only once.
    operands = {id(x): x for x in (*leaves, *rest)}
    index = {name: i for i, name in enumerate(operands)}
    of_leaves, of_rest = ([index[id(x)] for x in each] for each in (leaves, rest))
    moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def derivative(operands: Leaves, tangents: Leaves) -> Leaves:
        values = [operands[i] for i in of_leaves]
        directions = [np.zeros(x.shape, jax.dtypes.float0) for x in values]
        for i, x in zip(moving, tangents, strict=True):
            directions[i] = x
        both = (jax.tree.unflatten(structure, each) for each in (values, directions))
        return jax.tree.leaves(jax.jvp(derived, *both)[1])

    def transpose(operands: Leaves, cotangents: Leaves) -> Leaves:
        residuals = jax.tree.unflatten(rest_structure, [operands[i] for i in of_rest])
        gradients = backward(residuals, jax.tree.unflatten(output_structure, cotangents))
        found = [
            x
            for primal, gradient in zip(primals, gradients, strict=True)
            for x in _leaves_as(jax.tree.structure(primal), gradient)
        ]
        values = (operands[of_leaves[i]] for i in moving)
        return [
            jnp.zeros_like(x) if y is None else y
            for x, y in zip(values, map(found.__getitem__, moving), strict=True)
        ]

    directions = jax.tree.leaves(tangents)
    found = _linear_map.bind(
        *operands.values(),
        *(directions[i] for i in moving),
        num_operands=len(operands),
        derivative=derivative,
        transpose=transpose,
        outputs=tuple(map(jax.typeof, outputs)),
    )
    return jax.tree.unflatten(output_structure, found)


def _leaves_as(structure: Any, gradient: Any) -> Leaves:
    """Returns a gradient for each leaf of the argument; None for leaves without a gradient."""
    if gradient is None:
        return [None] * structure.num_leaves
    return structure.flatten_up_to(gradient)


# ---- the primitive: evaluation calls `derivative`, and transposition calls `transpose`


def _evaluate(*values: Any, num_operands: int, derivative: Map, **_: Any) -> Leaves:
    return derivative(list(values[:num_operands]), list(values[num_operands:]))


def _jvp(
    values: Sequence[Any],
    tangents: Sequence[Any],
    *,
    num_operands: int,
    derivative: Map,
    **rest: Any,
) -> tuple[Leaves, Leaves]:
    """Evaluates the primitive and its derivative.

    The primitive is linear in its tangent arguments, but not in its operands.
    """
    apply = partial(_linear_map.bind, num_operands=num_operands, derivative=derivative, **rest)
    operands, directions = values[:num_operands], values[num_operands:]
    of_operands, of_directions = tangents[:num_operands], tangents[num_operands:]
    output = apply(*values)
    found = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in output]
    if any(type(x) is not ad.Zero for x in of_directions):
        found = apply(*operands, *map(ad.instantiate_zeros, of_directions))
    moving = [i for i, x in enumerate(of_operands) if type(x) is not ad.Zero]
    if moving:

        def moving_derivative(*moved: Any) -> Leaves:
            new = dict(zip(moving, moved, strict=True))
            return derivative([new.get(i, x) for i, x in enumerate(operands)], list(directions))

        values, changes = (tuple(x[i] for i in moving) for x in (operands, of_operands))
        more = jax.jvp(moving_derivative, values, changes)[1]
        found = list(map(ad.add_tangents, found, more))
    return output, found


def _transpose(
    cotangents: Sequence[Any], *values: Any, num_operands: int, transpose: Map, **_: Any
) -> Leaves:
    operands, directions = list(values[:num_operands]), values[num_operands:]
    nothing = [None] * num_operands
    if all(type(x) is ad.Zero for x in cotangents):
        return nothing + [None] * len(directions)
    found = transpose(operands, list(map(ad.instantiate_zeros, cotangents)))
    return nothing + [
        y if ad.is_undefined_primal(x) else None for x, y in zip(directions, found, strict=True)
    ]


def _batch(
    values: Sequence[Any],
    axes: Sequence[int | None],
    *,
    num_operands: int,
    derivative: Map,
    transpose: Map,
    **_: Any,
) -> tuple[Leaves, list[int]]:
    values = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values, axes, strict=True)
    ]
    in_axes = [None if axis is None else 0 for axis in axes]
    of_operands, of_directions = in_axes[:num_operands], in_axes[num_operands:]
    batched = jax.vmap(derivative, (of_operands, of_directions))

    def batched_transpose(operands: Leaves, cotangents: Leaves) -> Leaves:
        found = jax.vmap(transpose, (of_operands, 0))(operands, cotangents)
        return [
            x.sum(axis=0) if axis is None else x
            for x, axis in zip(found, of_directions, strict=True)
        ]

    both = list(values[:num_operands]), list(values[num_operands:])
    output = _linear_map.bind(
        *values,
        num_operands=num_operands,
        derivative=batched,
        transpose=batched_transpose,
        outputs=tuple(jax.make_jaxpr(batched)(*both).out_avals),
    )
    return output, [0] * len(output)


_linear_map.def_impl(_evaluate)
_linear_map.def_abstract_eval(lambda *_, outputs, **__: outputs)
mlir.register_lowering(_linear_map, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[_linear_map] = _jvp
ad.primitive_transposes[_linear_map] = _transpose
batching.primitive_batchers[_linear_map] = _batch
