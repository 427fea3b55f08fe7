"""Looks up vectors in tables of tokens, of positions or of token types."""

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.linear.kernels import Int8Table
from jaxformer.functional.placement import OneDevice, Placement


def look_up(
    table: Float[Array, "words dim"] | Int8Table,
    index: Int[Array, "*batch"],
    dtype: DTypeLike,
    placement: Placement,
) -> Float[Array, "*batch dim"]:
    """Looks up rows of a table, which may be sharded; rows outside the table are NaN."""
    in_table = (index >= 0) & (index < table.shape[0])
    # `jnp.take` would count a negative index from the end of the table.
    index = jnp.where(in_table, index, table.shape[0])

    def take(index: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
        if isinstance(table, Int8Table):
            return table.take(index)
        return jnp.take(table, index, axis=0, mode="fill", fill_value=jnp.nan)

    return placement.look_up(take, index, table.shape[0], dtype)


@checks_arguments()
def embed(
    table: Float[Array, "words dim"], tokens: Int[Array, "*batch length"]
) -> Float[Array, "*batch length dim"]:
    """Looks up the vectors e_i of token ids; the vector of an id outside the table is NaN."""
    return look_up(table, jnp.asarray(tokens), table.dtype, OneDevice())
