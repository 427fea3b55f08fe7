"""Interface through which the functions of this package shard values over devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, DTypeLike, Float, Int


@runtime_checkable
class Placement(Protocol):
    """Sharding of activations over devices; see `models.sharding.activations`.

    Attributes:
        fused_kernels: the fused attention kernels of the platform (`fused_kernels.FusedKernel`), in
            order of preference.
        fuses_projections: whether the query, key and value projections may be fused. If the outputs
            of kernels are sharded, the shards of a fused kernel would not match the shards of the
            separate kernels.
    """

    @property
    def fused_kernels(self) -> tuple[Any, ...]:
        """See `Placement`."""

    @property
    def fuses_projections(self) -> bool:
        """See `Placement`."""

    def for_stack(self, units: tuple[int, ...]) -> "Placement":
        """Returns the `Placement` for a stack; tensor parallelism splits each size in `units`."""

    def place(self, name: str, value: Array) -> Array:
        """Constrains the sharding of the value at a hook point."""

    def look_up(
        self,
        take: Callable[[Int[Array, "*batch"]], Float[Array, "*batch dim"]],
        index: Int[Array, "*batch"],
        num_vectors: int,
        dtype: DTypeLike,
    ) -> Float[Array, "*batch dim"]:
        """Returns `take(index)` in `dtype`; `take` reads vectors of a table that may be sharded."""

    def per_device(
        self,
        function: Callable[..., Array],
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        *arrays: Array,
    ) -> Array:
        """Calls a function of attention heads on each device's shard.

        Args:
            function: function (query, key, *arrays) → array [batch, heads, queries, …], such as a
                kernel that XLA cannot shard.
            query: the queries.
            key: the keys.
            *arrays: the values [batch, kv_heads, keys, d], and arrays [batch, length] such as
                segment ids.
        """

    def per_expert(
        self,
        function: Callable[..., Array],
        num_experts: int,
        weights: Any,
        x: Float[Array, "tokens dim"],
        experts: Int[Array, "tokens chosen"],
        shares: Float[Array, "tokens chosen"],
    ) -> Float[Array, "tokens dim"]:
        """Calls a function with the experts of each device, and sums the results over devices.

        Args:
            function: function (weights, x, experts, shares) → array [tokens, dim], which sums the
                outputs of the experts in `weights`. `experts` are indices into `weights`.
            num_experts: number of all experts.
            weights: the weights of all experts, with the expert as the first axis of each array.
            x: the tokens.
            experts: the indices of the experts of each token.
            shares: the factors that multiply the outputs of the chosen experts.
        """


@dataclass(frozen=True)
class OneDevice:
    """Placement without a mesh, which leaves all values unchanged."""

    fused_kernels: tuple[Any, ...] = ()
    fuses_projections: bool = True

    def for_stack(self, units: tuple[int, ...]) -> "OneDevice":
        """See `Placement`."""
        return self

    def place(self, name: str, value: Array) -> Array:
        """See `Placement`."""
        return value

    def look_up(
        self,
        take: Callable[[Int[Array, "*batch"]], Float[Array, "*batch dim"]],
        index: Int[Array, "*batch"],
        num_vectors: int,
        dtype: DTypeLike,
    ) -> Float[Array, "*batch dim"]:
        """See `Placement`."""
        return take(index).astype(dtype)

    def per_device(
        self,
        function: Callable[..., Array],
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        *arrays: Array,
    ) -> Array:
        """See `Placement`."""
        return function(query, key, *arrays)

    def per_expert(
        self,
        function: Callable[..., Array],
        num_experts: int,
        weights: Any,
        x: Float[Array, "tokens dim"],
        experts: Int[Array, "tokens chosen"],
        shares: Float[Array, "tokens chosen"],
    ) -> Float[Array, "tokens dim"]:
        """See `Placement`."""
        return function(weights, x, experts, shares)


def vary_alike(*trees: Any) -> Any:
    """Casts the arrays inside a `shard_map` so that all vary over the same mesh axes.

    Loops need this cast, because JAX requires that the initial carry varies over the same axes as
    the final carry. The gradient of an array that was equal on all devices before the cast is
    summed over the devices. Outside of `shard_map`, the trees are returned unchanged.
    """

    def varying(x: Any) -> frozenset[Any]:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*map(varying, jax.tree.leaves(trees)))

    def cast(x: Any) -> Any:
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, trees)
