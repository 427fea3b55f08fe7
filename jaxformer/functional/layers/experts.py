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

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional.layers.expert_products import by_expert
from jaxformer.functional.layers.feedforward import FeedForward
from jaxformer.functional.layers.sublayer import (
    GATE_POWER,
    At,
    Initial,
    Output,
    SubLayer,
    WeightAxis,
)
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.placement import OneDevice, Placement
from jaxformer.functional.row_size import RowSize, product_flops
from jaxformer.functional.taps import NO_TAP, TapFunction
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

_OF_ALL = {"router", "shared", "shared_gate"}  # weights without an axis of experts


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
        renormalises: whether the shares of the chosen experts are divided by their sum. They are
            then the softmax over the logits of the chosen experts alone, as in gpt-oss.
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


def mixture_of_experts(
    weights: Weights,
    x: Float[Array, "*batch dim"],
    routes: Routes,
    expert: FeedForward,
    placement: Placement = OneDevice(),  # noqa: B008 (frozen)
) -> Float[Array, "*batch dim"]:
    """Computes Σ_e share_e FFN_e(x) over the chosen experts e of each token.

    Args:
        weights: the maps of `feed_forward`, with the expert as the first axis of each array.
        x: the tokens.
        routes: their experts; see `route`.
        expert: the function of one expert.
        placement: where experts and tokens lie on devices.

    Returns:
        The output, in the shape and dtype of x.
    """
    num_experts = routes.probabilities.shape[-1]
    experts, shares = (a.reshape(-1, a.shape[-1]) for a in (routes.experts, routes.shares))
    flat = x.reshape(-1, x.shape[-1])
    return by_expert(expert, weights, flat, experts, shares, num_experts, placement).reshape(
        x.shape
    )


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
        router_bias: whether the router has a bias.
    """

    name: ClassVar[str] = "feedforward"
    points: ClassVar[tuple[str, ...]] = ("feedforward.router", "feedforward.output")

    expert: FeedForward
    num_experts: int
    experts_per_token: int
    renormalises: bool = True
    shared: FeedForward | None = None
    gates_shared: bool = False
    router_bias: bool = False

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`."""
        router_key, *keys = jax.random.split(key, 1 + self.num_experts)
        stddev = initial.reading(dim)
        router = init_linear(
            router_key, dim, self.num_experts, use_bias=self.router_bias, stddev=stddev
        )
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
            power = GATE_POWER if self.gates_shared else 1.0
            weights["shared"]["down"]["kernel"] *= (2 * power) ** -0.5
        return weights

    def flops(self, weights: Weights, row: RowSize) -> int:
        """Returns the operations of the router, the shared expert and the chosen experts."""
        of_all = {name: weights[name] for name in weights.keys() & _OF_ALL}
        experts = {name: weights[name] for name in weights.keys() - _OF_ALL}
        chosen = product_flops(experts, row.length) * self.experts_per_token // self.num_experts
        return product_flops(of_all, row.length) + chosen

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        of_expert = self.expert.weight_axes().items()
        axes: dict[str, tuple[WeightAxis, ...]] = {
            path: ("experts", *axes) for path, axes in of_expert
        }
        return axes | {f"shared/{path}": axes for path, axes in of_expert}

    def context(self, tokens: Tokens, shared: Weights) -> Int[Array, "batch length"] | None:
        """Returns the segments of the tokens, which say which are padding."""
        return tokens.new.segments

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """See `mixture_of_experts` and `router_losses`."""
        experts = {name: weights[name] for name in weights.keys() - _OF_ALL}
        routes = route(
            weights["router"], x, self.experts_per_token, renormalises=self.renormalises, tap=at.tap
        )
        y = mixture_of_experts(experts, x, routes, self.expert, at.tap.placement)
        if self.shared is not None:
            y = y + shared_expert(weights, x, self.shared)
        return Output(at.tap("feedforward.output", y), auxiliary=router_losses(routes, at.context))
