"""Attention in one tile of queries × keys: scores, sums and gradients, for `blockwise`."""

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
    """Queries in the groups that share a key head, keys and values, of a row or of a tile."""

    query: Float[Array, "*batch kv_heads group queries d"]
    key: Float[Array, "*batch kv_heads keys d"]
    value: Float[Array, "*batch kv_heads keys v"]


class Upstream(NamedTuple):
    """What the backward pass knows of each query.

    Attributes:
        d_output: the gradient of its output.
        products: D, its output times that gradient.
        log_total: log Σ exp(score).
    """

    d_output: Output
    products: PerQuery
    log_total: PerQuery


class Places(NamedTuple):
    """Which of the keys each query sees, and the positions and documents of both."""

    mask: Mask
    queries: TokenInfo
    keys: TokenInfo


class Gradients(NamedTuple):
    """Gradients in float32 of queries, keys, values and the learned parts of the scores."""

    query: Float[Array, "*batch kv_heads group queries d"]
    key: Float[Array, "*batch kv_heads keys d"]
    value: Float[Array, "*batch kv_heads keys v"]
    scores: Scores


def key_ranges(places: Places, block: int) -> Iterator[tuple[slice, slice]]:
    """Yields (queries, keys) as slices, block by block: the queries see no other keys."""
    mask, query_info, key_info = places
    in_order = query_info.positions is None and key_info.positions is None
    for start in range(0, query_info.length, block):
        stop = min(start + block, query_info.length)
        low, high = 0, key_info.length
        if in_order:
            low, high = mask.key_range(start, stop, key_info.length)
        if low < high:
            yield slice(start, stop), slice(low, high)


def products_of(
    query: Float[Array, "*batch kv_heads group queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
) -> Tile:
    """Computes q·k [*batch, kv_heads, group, queries, keys] in float32."""
    return contract("...kgqd,...ksd->...kgqs", query, key, jnp.float32)


def masked(scores: Tile, visible: Visible | None) -> Tile:
    """Sets the scores of pairs that are not visible to −∞; None: all are visible."""
    return scores if visible is None else jnp.where(over_heads(visible), scores, -jnp.inf)


def powers_of(
    scores: Float[Array, "*rows n"], largest: Float[Array, "*rows"]
) -> Float[Array, "*rows n"]:
    """Computes exp(score − largest); 0 where both are −∞, for a query that sees no key."""
    return jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest)[..., None])


def weighted_sum(
    powers: Tile,
    value: Float[Array, "*batch kv_heads keys v"],
) -> Output:
    """Computes Σ_s powers_s v_s in float32."""
    powers = powers.astype(value.dtype)
    return contract("...kgqs,...ksd->...kgqd", powers, value, jnp.float32)


def log_total_of(
    largest: Float[Array, "*rows"], total: Float[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Computes log Σ exp(score) from the largest score and the sum relative to it."""
    # +inf for a query that sees no key: its weights in the backward pass are exp(−inf) = 0.
    return jnp.where(total == 0.0, jnp.inf, largest + jnp.log(total))


def tile_of(operands: Operands, rows: Part, columns: Part) -> Operands:
    """Returns some of the queries and some of the keys and values."""
    query, key, value = operands
    return Operands(cut(query, rows, -2), cut(key, columns, -2), cut(value, columns, -2))


def of_queries(upstream: Upstream, rows: Part) -> Upstream:
    """Returns what the backward pass knows of some of the queries."""
    d_output, products, log_total = upstream
    return Upstream(cut(d_output, rows, -2), cut(products, rows), cut(log_total, rows))


def gradients_of(
    operands: Operands,
    upstream: Upstream,
    visible: Visible | None,
    scores: Scores,
    tile: Callable[[Scores, Tile], Tile],
) -> Gradients:
    """Returns a tile's contributions to the gradients.

    Args:
        operands: the tile's queries, keys and values.
        upstream: what is known of its queries.
        visible: which pairs are visible; None: all.
        scores: scale, cap and bias.
        tile: (scores, products) → the scores of the tile.
    """
    query, key, value = operands
    d_output, products, log_total = upstream
    adjusted, pull_back = jax.vjp(tile, scores, products_of(query, key))
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


def scores_of(places: Places, rows: Part, columns: Part) -> Callable[[Scores, Tile], Tile]:
    """Returns (scores, products) → the scores of the tile at these queries and keys."""

    def tile(scores: Scores, products: Tile) -> Tile:
        return scores.tile(products, places.queries, places.keys, rows, columns)

    return tile


def zero_gradients(scores: Scores) -> Scores:
    """Returns zero gradients in float32 for the learned parts of the scores."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), scores)


def add_gradients(scores: Scores, more: Scores) -> Scores:
    """Adds gradients of the learned parts of the scores."""
    return jax.tree.map(jnp.add, scores, more)
