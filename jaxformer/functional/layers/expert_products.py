"""Applies chosen experts to tokens, in blocks of rows that are sorted by expert.

Each token is processed only by its chosen experts, and the shapes of arrays do not depend on the
choice. Each row is a copy of a token for one of its chosen experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from jaxformer.functional.layers.feedforward import FeedForward
from jaxformer.functional.layers.sublayer import At
from jaxformer.functional.own_gradient import own_gradient
from jaxformer.functional.placement import OneDevice, Placement
from jaxformer.functional.symbolic import Size, is_known
from jaxformer.functional.trees import Weights

# With more blocks per expert, fewer rows of zeros are multiplied, but each kernel is read more
# often.
_BLOCKS_PER_EXPERT = 2


@dataclass(frozen=True)
class ByRow:
    """Rematerialization policy that stores nothing, for functions that act on rows independently.

    Row i of the result of `by_expert` depends only on row i of `x`, `experts` and `shares`. The
    dependency analysis of `verify` cannot derive this fact, because `by_expert` sorts the rows.
    `verify` therefore treats the rows of a function with this policy as independent.
    """

    def __call__(self, *_: Any, **params: Any) -> bool:
        """Returns False, so that the backward pass recomputes the results of all primitives."""
        return False


def by_expert(
    expert: FeedForward,
    weights: Weights,
    x: Float[Array, "tokens dim"],
    experts: Int[Array, "tokens chosen"],
    shares: Float[Array, "tokens chosen"],
    num_experts: int,
    placement: Placement = OneDevice(),  # noqa: B008 (frozen)
) -> Float[Array, "tokens dim"]:
    """Computes Σ_e share_e FFN_e(x[i]) over the chosen experts e of each token i.

    Args:
        expert: the feed-forward layer of one expert.
        weights: the weights of all experts, with the expert as the first axis of each array.
        x: the tokens.
        experts: the indices of the experts of each token.
        shares: the factor of the output of each chosen expert.
        num_experts: number of experts.
        placement: how experts and tokens are sharded over devices.
    """
    function = partial(_sorted_by_expert, expert, num_experts)
    on_devices = partial(placement.per_expert, function, num_experts)
    return jax.checkpoint(on_devices, policy=ByRow(), prevent_cse=False)(
        weights, x, experts, shares
    )


@partial(jax.jit, static_argnums=(0, 1))
def _sorted_by_expert(
    expert: FeedForward,
    num_experts: int,
    weights: Weights,
    x: Float[Array, "tokens dim"],
    experts: Int[Array, "tokens chosen"],
    shares: Float[Array, "tokens chosen"],
) -> Float[Array, "tokens dim"]:
    """Computes the sum of `by_expert`, restricted to the experts in `weights`.

    Rows are sorted by expert and packed into blocks of one expert each, padded with rows of zeros.
    The number and the size of blocks depend only on the shapes. Empty blocks are skipped.

    Args:
        expert: the feed-forward layer of one expert.
        num_experts: number of all experts.
        weights: the weights of some or all experts, with the expert as the first axis.
        x: the tokens.
        experts: the indices into `weights` of the experts of each token; an index outside `weights`
            contributes 0 to the sum.
        shares: the factor of the output of each chosen expert.
    """
    num_here, chosen = len(jax.tree.leaves(weights)[0]), experts.shape[-1]
    index, num_rows = experts.reshape(-1), experts.size
    index = jnp.where((index >= 0) & (index < num_here), index, num_here)
    block, num_blocks = _block_sizes(len(x), chosen, num_experts, num_here)
    counts = jnp.zeros(num_here + 1, jnp.int32).at[index].add(1)
    num_of_expert = -(-counts[:-1] // block)
    ends = num_of_expert.cumsum()
    order = jnp.argsort(index)
    own = index[order]
    place = jnp.arange(num_rows, dtype=jnp.int32) - (counts.cumsum() - counts)[own]
    # The rows of experts that are not in `weights` get indices after the last block. With the mode
    # "drop", the scatter below ignores these indices.
    place += block * jnp.append(ends - num_of_expert, num_blocks)[own]
    number = jnp.full(num_blocks * block, num_rows, order.dtype)
    number = number.at[place].set(order, mode="drop")
    # For the unused rows of a block, `number` is num_rows, which selects the appended row of zeros.
    rows = jnp.pad(x, ((0, 1), (0, 0)))[number // chosen]
    factors = jnp.pad(shares.reshape(-1), (0, 1))[number]
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    # `owners` contains the expert of each block, or `num_here` for an empty block. `searchsorted`
    # would compute the owners, but with jax 0.10.2 it raises an error in `shard_map`.
    owners = (ends <= blocks[:, None]).sum(axis=1, dtype=jnp.int32)
    y = _map_blocks(expert)(
        weights, rows.reshape(num_blocks, block, -1), factors.reshape(num_blocks, block, 1), owners
    )
    places = jnp.zeros_like(place).at[order].set(place)
    y = y.reshape(num_blocks * block, -1).at[places].get(mode="fill", fill_value=0)
    return y.reshape(*experts.shape, -1).astype(jnp.float32).sum(axis=-2).astype(x.dtype)


def _block_sizes(
    num_tokens: Size, chosen: int, num_experts: int, num_here: int
) -> tuple[Size, Size]:
    """Returns the number of rows per block, and the largest number of blocks that can be needed.

    Args:
        num_tokens: number of tokens.
        chosen: number of experts of each token.
        num_experts: number of all experts.
        num_here: number of experts in the weights. The blocks contain only rows of these experts.
    """
    block = -(-num_tokens * chosen // (_BLOCKS_PER_EXPERT * num_experts))
    # A token chooses each expert at most once, so it has at most `num_here` rows in the blocks.
    num_rows = num_tokens * min(chosen, num_here)
    # The loop over the blocks needs a static number of blocks.
    if not is_known(num_tokens):
        return block, _BLOCKS_PER_EXPERT * num_experts + num_here
    return block, (num_rows + num_here * (block - 1)) // block


def _map_blocks(expert: FeedForward) -> Callable[..., Float[Array, "blocks rows dim"]]:
    """Returns the function (weights, rows, factors, owners) → outputs of all rows.

    `owners` contains the expert of each block of rows.

    The loop over the blocks reads the kernels without copying them. One batched product of all
    blocks would copy the kernels; it took 2 to 5 times as long as the loop on two busy cores.
    """

    def one(
        weights: Weights, rows: Float[Array, "rows dim"], factors: Float[Array, "rows 1"]
    ) -> Float[Array, "rows dim"]:
        y = expert(weights, rows, At(None)).x
        return (factors * y).astype(y.dtype)

    def owned_weights(weights: Weights, owner: Int[Array, ""]) -> Weights:
        return jax.tree.map(lambda leaf: leaf[owner], weights)

    def is_empty(weights: Weights, owner: Int[Array, ""]) -> Bool[Array, ""]:
        return owner == len(jax.tree.leaves(weights)[0])

    def forward_map(
        weights: Weights,
        rows: Float[Array, "blocks rows dim"],
        factors: Float[Array, "blocks rows 1"],
        owners: Int[Array, " blocks"],
    ) -> Float[Array, "blocks rows dim"]:
        def step(each: tuple) -> Float[Array, "rows dim"]:
            owner, rows, factors = each
            return jax.lax.cond(
                is_empty(weights, owner),
                lambda: jnp.zeros_like(rows),
                lambda: one(owned_weights(weights, owner), rows, factors),
            )

        return jax.lax.map(step, (owners, rows, factors))

    def backward(residuals: tuple, cotangent: Float[Array, "blocks rows dim"]) -> tuple:
        weights, rows, factors, owners = residuals

        # In JAX's gradient of the loop, each block would add an array of the size of all experts'
        # kernels.
        def step(gradient: Weights, each: tuple) -> tuple[Weights, tuple[Array, Array]]:
            owner, rows, factors, cotangent = each
            operands = owned_weights(weights, owner), rows, factors

            def add(total: Array, x: Array) -> Array:
                return total.at[owner].add(x)

            def compute() -> tuple[Weights, Array, Array]:
                found = jax.vjp(one, *operands)[1](cotangent)
                return jax.tree.map(_zeros_of_integers, found, operands)

            # The sums are computed outside `cond`, because `cond` would copy its results.
            of_weights, *of_rows = jax.lax.cond(
                is_empty(weights, owner), lambda: jax.tree.map(jnp.zeros_like, operands), compute
            )
            return jax.tree.map(add, gradient, of_weights), tuple(of_rows)

        sums = jax.tree.map(lambda x: jnp.zeros_like(x, _dtype_of_sums(x)), weights)
        sums, of_rows = jax.lax.scan(step, sums, (owners, rows, factors, cotangent))
        of_weights = jax.tree.map(lambda total, x: total.astype(x.dtype), sums, weights)
        return of_weights, *of_rows, None

    return own_gradient(
        forward_map, lambda *arguments: (forward_map(*arguments), arguments), backward
    )


def _zeros_of_integers(gradient: Array, x: Array) -> Array:
    """Returns the gradient, or zeros for the integers of a quantized kernel."""
    return jnp.zeros_like(x) if gradient.dtype == jax.dtypes.float0 else gradient


def _dtype_of_sums(x: Array) -> DTypeLike:
    """Returns the dtype in which gradients with respect to x are summed."""
    return (
        jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype
    )
