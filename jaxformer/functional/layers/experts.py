"""Mixture of experts: a router sends each token to a few of many feed-forward layers.

    p = softmax(x W_r)
    y = Σ_e p_e FFN_e(x), over the experts e with the largest p

A shared expert, which computes every token, may be added to it: σ(x w_s) FFN_s(x) or FFN_s(x).

Every token is computed by all of its experts: none is dropped, so the output of a token depends
neither on the other tokens nor on their order.

Reference:
    Shazeer et al. 2017 (arXiv:1701.06538); Mixtral, Jiang et al. 2024 (arXiv:2401.04088).
    Shared experts: DeepSeekMoE, Dai et al. 2024 (arXiv:2401.06066); with a gate: Qwen2-MoE.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional.attention.contexts import Pass
from jaxformer.functional.layers.feedforward import FeedForward
from jaxformer.functional.layers.sublayer import At, Initial, Output, SubLayer
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.own_gradient import own_gradient
from jaxformer.functional.row_size import RowSize, product_flops
from jaxformer.functional.symbolic import Size, is_known
from jaxformer.functional.taps import NO_TAP, TapFunction
from jaxformer.functional.trees import Weights

_BLOCKS_PER_EXPERT = 2  # more blocks have fewer rows of zeros and read kernels more often
_OF_ALL = {"router", "shared", "shared_gate"}  # weights without an axis of experts
_GATE_POWER = 0.2934  # E[σ(z)²] for z ~ N(0, 1)


@dataclass(frozen=True)
class ByRow:
    """Rematerialization policy that stores nothing, of a function of rows.

    Row i of the result depends on row i of the last two operands only. `verify.taint` could not see
    this through a sort, so it is stated here.
    """

    def __call__(self, *_: Any, **params: Any) -> bool:
        """Returns whether the result of a primitive is stored."""
        return False


class Routes(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: the indices of the chosen experts.
        shares: the factor of the output of each of them, in float32.
        log_normalizers: log Σ_e exp(logit_e), for `router_z`.
        probabilities: softmax over all experts.
    """

    experts: Int[Array, "*batch chosen"]
    shares: Float[Array, "*batch chosen"]
    log_normalizers: Float[Array, "*batch"]
    probabilities: Float[Array, "*batch experts"]


def route(
    router: Weights,
    x: Float[Array, "*batch dim"],
    experts_per_token: int,
    *,
    renormalises: bool = True,
    tap: TapFunction = NO_TAP,
) -> Routes:
    """Chooses the experts with the largest probabilities, and of equal ones the first.

    Args:
        router: the map from x to one logit for each expert.
        x: the tokens.
        experts_per_token: number of experts of each token.
        renormalises: whether the shares of the chosen experts are divided by their sum.
        tap: see `functional.taps`.
    """
    logits = linear(router, x, jnp.float32)
    probabilities = tap("feedforward.router", jax.nn.softmax(logits))
    experts = jax.lax.top_k(jax.lax.stop_gradient(probabilities), experts_per_token)[1]
    # `checkify` of jax 0.10.2 fails on the gradient of `top_k`, a lookup with batch axes.
    chosen = jax.nn.one_hot(experts, probabilities.shape[-1], dtype=jnp.float32)
    shares = (chosen * probabilities[..., None, :]).sum(axis=-1)
    if renormalises:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    return Routes(experts, shares, jax.nn.logsumexp(logits, axis=-1), probabilities)


def by_expert(
    expert: FeedForward,
    weights: Weights,
    x: Float[Array, "tokens dim"],
    experts: Int[Array, "tokens chosen"],
    num_experts: int,
) -> Float[Array, "tokens chosen dim"]:
    """Computes FFN_e(x[i]) for each token i and each of its experts e.

    Rows are sorted by expert into blocks of one expert each, which are filled up with rows of
    zeros. Number and size of the blocks depend on the shapes only.

    Args:
        expert: the function of one expert.
        weights: the weights of all experts, with the expert as the first axis of each array.
        x: the tokens.
        experts: the indices of the experts of each token.
        num_experts: number of experts.
    """
    function = partial(_sorted_by_expert, expert, num_experts)
    return jax.checkpoint(function, policy=ByRow(), prevent_cse=False)(weights, x, experts)


@partial(jax.jit, static_argnums=(0, 1))
def _sorted_by_expert(
    expert: FeedForward,
    num_experts: int,
    weights: Weights,
    x: Float[Array, "tokens dim"],
    experts: Int[Array, "tokens chosen"],
) -> Float[Array, "tokens chosen dim"]:
    index = experts.reshape(-1)
    num_rows = index.shape[0]
    block, num_blocks = _block_sizes(num_rows, num_experts)
    counts = jnp.zeros(num_experts, jnp.int32).at[index].add(1)
    num_of_expert = -(-counts // block)
    ends = num_of_expert.cumsum()
    order = jnp.argsort(index)  # stable
    own = index[order]
    place = (
        jnp.arange(num_rows, dtype=jnp.int32) - (counts.cumsum() - counts)[own]
    )  # among the expert's rows
    place += block * (ends - num_of_expert)[own]
    number = jnp.full(num_blocks * block, num_rows, order.dtype).at[place].set(order)
    rows = jnp.pad(x, ((0, 1), (0, 0)))[number // experts.shape[-1]]  # the last row is zeros
    owners = jnp.searchsorted(ends, jnp.arange(num_blocks, dtype=jnp.int32), side="right").clip(
        max=num_experts - 1
    )
    y = _map_blocks(expert)(weights, rows.reshape(num_blocks, block, -1), owners)
    places = jnp.zeros_like(place).at[order].set(place)
    return y.reshape(num_blocks * block, -1)[places].reshape(*experts.shape, -1)


def _block_sizes(num_rows: Size, num_experts: int) -> tuple[Size, int]:
    """Returns the rows of a block, and the most blocks that any distribution of rows needs."""
    block = -(-num_rows // (_BLOCKS_PER_EXPERT * num_experts))
    if not is_known(num_rows):  # a loop needs a known number of blocks
        return block, (1 + _BLOCKS_PER_EXPERT) * num_experts
    return block, (num_rows + num_experts * (block - 1)) // block


def _map_blocks(expert: FeedForward) -> Callable[..., Float[Array, "blocks rows dim"]]:
    """Returns (weights, rows [blocks, rows, dim], expert of each block) → the outputs of all rows.

    A loop over the blocks reads the kernels where they are. One batched product of all blocks, for
    which the kernels are copied, took 2 to 5 times as long on two busy cores.
    """

    def one(weights: Weights, rows: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
        return expert(weights, rows, At(None)).x

    def of_owner(weights: Weights, owner: Int[Array, ""]) -> Weights:
        return jax.tree.map(lambda leaf: leaf[owner], weights)

    def forward_map(
        weights: Weights, rows: Float[Array, "blocks rows dim"], owners: Int[Array, " blocks"]
    ) -> Float[Array, "blocks rows dim"]:
        return jax.lax.map(lambda each: one(of_owner(weights, each[0]), each[1]), (owners, rows))

    def backward(residuals: tuple, cotangent: Float[Array, "blocks rows dim"]) -> tuple:
        weights, rows, owners = residuals

        # JAX's gradient would add an array of all experts' kernels for each block.
        def step(gradient: Weights, each: tuple) -> tuple[Weights, Float[Array, "rows dim"]]:
            owner, rows, cotangent = each
            of_weights, of_rows = jax.vjp(one, of_owner(weights, owner), rows)[1](cotangent)

            def add(total: Array, x: Array) -> Array:  # integers of a quantized kernel have none
                return total if x.dtype == jax.dtypes.float0 else total.at[owner].add(x)

            return jax.tree.map(add, gradient, of_weights), of_rows

        zeros = jax.tree.map(jnp.zeros_like, weights)
        of_weights, of_rows = jax.lax.scan(step, zeros, (owners, rows, cotangent))
        return of_weights, of_rows, None

    return own_gradient(
        forward_map, lambda *arguments: (forward_map(*arguments), arguments), backward
    )


def mixture_of_experts(
    weights: Weights,
    x: Float[Array, "*batch dim"],
    routes: Routes,
    expert: FeedForward,
) -> Float[Array, "*batch dim"]:
    """Computes Σ_e share_e FFN_e(x) over the chosen experts e of each token.

    Args:
        weights: the maps of `feed_forward`, with the expert as the first axis of each array.
        x: the tokens.
        routes: their experts; see `route`.
        expert: the function of one expert.

    Returns:
        The output, in the shape and dtype of x.
    """
    experts, num_experts = routes.experts, routes.probabilities.shape[-1]
    flat = experts.reshape(-1, experts.shape[-1])
    y = by_expert(expert, weights, x.reshape(-1, x.shape[-1]), flat, num_experts)
    y = (routes.shares[..., None] * y.reshape(*experts.shape, -1)).sum(axis=-2)
    return y.astype(x.dtype)


def shared_expert(
    weights: Weights, x: Float[Array, "*batch dim"], expert: FeedForward
) -> Float[Array, "*batch dim"]:
    """Computes σ(x w) FFN(x), or FFN(x) without a gate.

    Args:
        weights: the maps of `feed_forward` in "shared" and, with a gate, w in "shared_gate".
        x: the tokens.
        expert: FFN.
    """
    y = expert(weights["shared"], x, At(None)).x
    if "shared_gate" not in weights:
        return y
    return (jax.nn.sigmoid(linear(weights["shared_gate"], x, jnp.float32)) * y).astype(y.dtype)


def router_losses(
    routes: Routes, segments: Int[Array, "*batch"] | None = None
) -> dict[str, Float[Array, ""]]:
    """Returns the two usual losses of a router, as means over the tokens that are not padding.

    balance: num_experts · Σ_e f_e P_e, for the fraction f_e of all choices that fall on expert e
        and the mean P_e of its probability. It is 1 if both are uniform (Fedus et al. 2021).
    router_z: the mean of (log Σ_e exp(logit_e))² (Zoph et al. 2022).

    Args:
        routes: the experts of the tokens.
        segments: 0 for padding; None: there is none.
    """
    num_experts, chosen = routes.probabilities.shape[-1], routes.experts.shape[-1]
    real = jnp.ones(routes.experts.shape[:-1], jnp.float32) if segments is None else segments != 0
    real = real.reshape(-1, 1).astype(jnp.float32) / jnp.maximum(real.sum(), 1)
    index = routes.experts.reshape(-1, chosen)
    fractions = jnp.zeros(num_experts, jnp.float32).at[index].add(real / chosen)
    means = (real * routes.probabilities.reshape(-1, num_experts)).sum(axis=0)
    squares = jnp.square(routes.log_normalizers).reshape(-1, 1)
    return {"balance": num_experts * fractions @ means, "router_z": (real * squares).sum()}


@dataclass(frozen=True)
class Experts(SubLayer):
    """A mixture of experts in the place of the feed-forward layer.

    Attributes:
        expert: one expert.
        num_experts: number of experts.
        experts_per_token: number of experts that compute a token.
        renormalises: whether the shares of the experts of a token sum to 1.
        shared: an expert that computes every token, or None.
        gates_shared: whether the output of the shared expert has a gate.
    """

    name: ClassVar[str] = "feedforward"
    points: ClassVar[tuple[str, ...]] = ("feedforward.router", "feedforward.output")

    expert: FeedForward
    num_experts: int
    experts_per_token: int
    renormalises: bool = True
    shared: FeedForward | None = None
    gates_shared: bool = False

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`."""
        router_key, *keys = jax.random.split(key, 1 + self.num_experts)
        stddev = initial.reading(dim)
        router = init_linear(router_key, dim, self.num_experts, use_bias=False, stddev=stddev)
        experts = jax.vmap(lambda key: self.expert.init(key, dim, initial))(jnp.stack(keys))
        if initial.num_layers is None:  # a mean of k independent outputs has 1/k of their variance
            total = 1.0 if self.renormalises else self.num_experts / self.experts_per_token
            experts["down"]["kernel"] *= total * self.experts_per_token**0.5
        if self.shared is None:
            return {"router": router, **experts}
        shared = self._init_shared(self.shared, experts, key, dim, initial)
        return {"router": router, **experts, **shared}

    def _init_shared(
        self, shared: FeedForward, experts: Weights, key: PRNGKeyArray, dim: int, initial: Initial
    ) -> Weights:
        """Returns the weights of the shared expert.

        Without a residual, the outputs of the shared and of the other experts are scaled so that
        their sum has variance 1.
        """
        shared_key, gate_key = jax.random.split(jax.random.fold_in(key, self.num_experts))
        weights = {"shared": shared.init(shared_key, dim, initial)}
        if self.gates_shared:
            stddev = initial.reading(dim)
            weights["shared_gate"] = init_linear(gate_key, dim, 1, use_bias=False, stddev=stddev)
        if initial.num_layers is None:
            experts["down"]["kernel"] *= 0.5**0.5
            power = _GATE_POWER if self.gates_shared else 1.0
            weights["shared"]["down"]["kernel"] *= (2 * power) ** -0.5
        return weights

    def flops(self, weights: Weights, row: RowSize) -> int:
        """Returns the operations of the router, the shared expert and the chosen experts."""
        of_all = {name: weights[name] for name in weights.keys() & _OF_ALL}
        experts = {name: weights[name] for name in weights.keys() - _OF_ALL}
        chosen = product_flops(experts, row.length) * self.experts_per_token // self.num_experts
        return product_flops(of_all, row.length) + chosen

    def context(self, tokens: Pass, shared: Weights) -> Int[Array, "batch length"] | None:
        """Returns the segments of the tokens, which say which are padding."""
        return tokens.new.segments

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """See `mixture_of_experts` and `router_losses`."""
        experts = {name: weights[name] for name in weights.keys() - _OF_ALL}
        routes = route(
            weights["router"], x, self.experts_per_token, renormalises=self.renormalises, tap=at.tap
        )
        y = mixture_of_experts(experts, x, routes, self.expert)
        if self.shared is not None:
            y = y + shared_expert(weights, x, self.shared)
        return Output(at.tap("feedforward.output", y), auxiliary=router_losses(routes, at.context))
