"""Helpers of blockwise attention: scores, sums and gradients of one tile of queries × keys."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.attention.heads import over_heads
from jaxformer.functional.attention.masks import Mask, Visible
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import Part, TokenInfo, cut
from jaxformer.functional.linear.products import contract

Tile = Float[Array, "*batch kv_heads group queries keys"]
Output = Float[Array, "*batch kv_heads group queries v"]
PerQuery = Float[Array, "*batch kv_heads group queries"]


class Operands(NamedTuple):
    """Queries (grouped by key head), keys and values of a sequence or of a tile."""

    query: Float[Array, "*batch kv_heads group queries d"]
    key: Float[Array, "*batch kv_heads keys d"]
    value: Float[Array, "*batch kv_heads keys v"]


class Upstream(NamedTuple):
    """Residuals of the backward pass, per query.

    Attributes:
        d_output: the gradient of the query's output.
        products: D, the dot product of the output and its gradient.
        log_total: log Σ exp(score).
    """

    d_output: Output
    products: PerQuery
    log_total: PerQuery


class Places(NamedTuple):
    """The mask, and positions and documents of queries and keys."""

    mask: Mask
    queries: TokenInfo
    keys: TokenInfo


class Gradients(NamedTuple):
    """Float32 gradients of queries, keys, values and the arrays in `Scores`, such as a bias."""

    query: Float[Array, "*batch kv_heads group queries d"]
    key: Float[Array, "*batch kv_heads keys d"]
    value: Float[Array, "*batch kv_heads keys v"]
    scores: Scores


def key_ranges(places: Places, block: int) -> Iterator[tuple[slice, slice]]:
    """Yields (slice of a block of queries, slice of the keys that these queries may attend to)."""
    mask, query_info, key_info = places
    in_order = query_info.positions is None and key_info.positions is None
    for start in range(0, query_info.length, block):
        stop = min(start + block, query_info.length)
        low, high = 0, key_info.length
        if in_order:
            low, high = mask.key_range(start, stop, key_info.length)
        if low < high:
            yield slice(start, stop), slice(low, high)


def query_key_products(
    query: Float[Array, "*batch kv_heads group queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
) -> Tile:
    """Computes q·k [*batch, kv_heads, group, queries, keys] in float32."""
    return contract("...kgqd,...ksd->...kgqs", query, key, jnp.float32)


def masked(scores: Tile, visible: Visible | None) -> Tile:
    """Sets the scores of invisible pairs to −∞; all pairs are visible if `visible` is None."""
    return scores if visible is None else jnp.where(over_heads(visible), scores, -jnp.inf)


def exp_scores(
    scores: Float[Array, "*rows n"], largest: Float[Array, "*rows"]
) -> Float[Array, "*rows n"]:
    """Computes exp(score − largest); 0 if both are −∞ (a query without visible keys)."""
    return jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest)[..., None])


def weighted_sum(
    powers: Tile,
    value: Float[Array, "*batch kv_heads keys v"],
) -> Output:
    """Computes Σ_s powers_s v_s over the keys s, in float32."""
    powers = powers.astype(value.dtype)
    return contract("...kgqs,...ksd->...kgqd", powers, value, jnp.float32)


def log_sum_exp(
    largest: Float[Array, "*rows"], total: Float[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Computes log Σ exp(score) from the largest score and total = Σ exp(score − largest)."""
    # For a query without visible keys, the result is +inf, so that its attention weights in the
    # backward pass are 0.
    return jnp.where(total == 0.0, jnp.inf, largest + jnp.log(total))


def slice_operands(operands: Operands, rows: Part, columns: Part) -> Operands:
    """Selects a part of the queries and a part of the keys and values."""
    query, key, value = operands
    return Operands(cut(query, rows, -2), cut(key, columns, -2), cut(value, columns, -2))


def slice_upstream(upstream: Upstream, rows: Part) -> Upstream:
    """Selects the residuals of the backward pass for a part of the queries."""
    d_output, products, log_total = upstream
    return Upstream(cut(d_output, rows, -2), cut(products, rows), cut(log_total, rows))


def tile_gradients(
    operands: Operands,
    upstream: Upstream,
    visible: Visible | None,
    scores: Scores,
    tile: Callable[[Scores, Tile], Tile],
) -> Gradients:
    """Computes the contributions of a tile to the gradients.

    Args:
        operands: the tile's queries, keys and values.
        upstream: the residuals of the backward pass for the tile's queries.
        visible: which pairs of query and key are visible; all if None.
        scores: scale, soft cap and bias.
        tile: function (scores, products) → scores of the tile.
    """
    query, key, value = operands
    d_output, products, log_total = upstream
    adjusted, pull_back = jax.vjp(tile, scores, query_key_products(query, key))
    weights = jnp.exp(masked(adjusted, visible) - log_total[..., None])
    d_weights = contract("...kgqd,...ksd->...kgqs", d_output, value, jnp.float32)
    d_scores, d_products = pull_back(weights * (d_weights - products[..., None]))
    weights, d_products = weights.astype(value.dtype), d_products.astype(key.dtype)
    return Gradients(
        contract("...kgqs,...ksd->...kgqd", d_products, key, jnp.float32),
        contract("...kgqs,...kgqd->...ksd", d_products, query, jnp.float32),
        contract("...kgqs,...kgqd->...ksd", weights, d_output, jnp.float32),
        d_scores,
    )


def bind_score_tile(places: Places, rows: Part, columns: Part) -> Callable[[Scores, Tile], Tile]:
    """Returns the function (scores, products) → scores for this tile."""

    def tile(scores: Scores, products: Tile) -> Tile:
        return scores.tile(products, places.queries, places.keys, rows, columns)

    return tile


def zero_gradients(scores: Scores) -> Scores:
    """Returns zero gradients in float32 for the arrays in `scores`, such as a bias."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), scores)


def add_gradients(scores: Scores, more: Scores) -> Scores:
    """Adds gradients with respect to the arrays in `Scores`, such as a bias."""
    return jax.tree.map(jnp.add, scores, more)
