"""Placement of the values of a pass on devices, as far as the formulas see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, DTypeLike, Float, Int


@runtime_checkable
class Placement(Protocol):
    """Constrains values at named points to the devices; see `models.activation_sharding`.

    Attributes:
        fused_kernels: the fused attention kernels of the platform (`fused_kernels.FusedKernel`);
            the first that supports the arguments computes attention.
        fuses_projections: whether the maps to query, key and value may be fused. Where the outputs
            of a kernel are sharded, the parts of a fused one would be sharded differently.
    """

    @property
    def fused_kernels(self) -> tuple[Any, ...]:
        """See `Placement`."""

    @property
    def fuses_projections(self) -> bool:
        """See `Placement`."""

    def of_stack(self, units: tuple[int, ...]) -> "Placement":
        """Returns the placement in a stack whose sub-layers have these units."""

    def place(self, name: str, value: Array) -> Array:
        """Returns the value at a point, constrained to its devices."""

    def look_up(
        self,
        take: Callable[[Int[Array, "*batch"]], Float[Array, "*batch dim"]],
        index: Int[Array, "*batch"],
        num_vectors: int,
        dtype: DTypeLike,
    ) -> Float[Array, "*batch dim"]:
        """Returns take(index) in `dtype`, from a table of `num_vectors` that may be sharded."""

    def per_device(
        self,
        function: Callable[..., Array],
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        *arrays: Array,
    ) -> Array:
        """Calls a function of heads on the part of each device, for kernels that are not sharded.

        Args:
            function: (query, key, *arrays) → array [batch, heads, queries, …].
            query: the queries.
            key: the keys.
            *arrays: values, of the axes of the keys, and arrays [batch, length].
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
        """Calls a function of tokens with the experts of each device, and adds the results.

        Args:
            function: (weights, x, experts, shares) → array [tokens, dim]: a sum over the experts
                whose weights it is given, by their numbers among them.
            num_experts: number of all experts.
            weights: their weights, with the expert as the first axis of each array.
            x: the tokens.
            experts: the indices of the experts of each token.
            shares: their shares.
        """


@dataclass(frozen=True)
class OneDevice:
    """The placement without a mesh: values are where they are computed."""

    fused_kernels: tuple[Any, ...] = ()
    fuses_projections: bool = True

    def of_stack(self, units: tuple[int, ...]) -> "OneDevice":
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
    """Casts the arrays inside a `shard_map` so that all arrays vary over the same mesh axes.

    The initial carry of a loop must have the type of its final carry. The gradient with respect to
    an array that was equal on all devices is then summed over them. Outside of `shard_map` the
    trees are returned unchanged.
    """

    def varying(x: Any) -> frozenset[Any]:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*map(varying, jax.tree.leaves(trees)))

    def cast(x: Any) -> Any:
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, trees)
