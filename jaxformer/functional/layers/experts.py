"""Mixture of experts: a router sends each token to a few of many feed-forward layers.

    p = softmax(x W_r)
    y = Σ_e p_e FFN_e(x), over the experts e with the largest p

The output of a shared expert, which processes every token, may be added to y:
FFN_s(x) or, with a gate, σ(x w_s) FFN_s(x).

Each token is processed by all of its chosen experts; no token is dropped. The output of a token
therefore does not depend on other tokens or on their order.

Reference:
    Shazeer et al. 2017 (arXiv:1701.06538); Mixtral, Jiang et al. 2024 (arXiv:2401.04088).
    Shared experts: DeepSeekMoE, Dai et al. 2024 (arXiv:2401.06066); with a gate: Qwen2-MoE.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional.hooks import NO_HOOK, HookFunction
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
from jaxformer.functional.sequence_size import SequenceSize, product_flops
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

# Names of the weights that do not have an axis of experts.
_OF_ALL = {"router", "shared", "shared_gate"}


class Routes(NamedTuple):
    """Routing decisions of a router: the chosen experts of each token.

    Attributes:
        experts: the indices of the chosen experts.
        shares: the factor of the output of each chosen expert, in float32.
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
    hook: HookFunction = NO_HOOK,
) -> Routes:
    """Chooses the experts with the largest probabilities.

    If several experts have the same probability, the expert with the smallest index is chosen
    first.

    Args:
        router: the linear layer from x to one logit per expert.
        x: the tokens.
        experts_per_token: number of experts that each token is sent to.
        renormalises: whether the probabilities of the chosen experts are divided by their sum. The
            quotients equal a softmax over the logits of the chosen experts alone, as in gpt-oss.
        hook: see `functional.hooks`.
    """
    logits = linear(router, x, jnp.float32)
    probabilities = hook("feedforward.router", jax.nn.softmax(logits))
    experts = jax.lax.top_k(jax.lax.stop_gradient(probabilities), experts_per_token)[1]
    # The gradient of `top_k` is a lookup with batch axes, on which `checkify` of jax 0.10.2 fails.
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
        weights: the weights of `feed_forward`, with the expert as the first axis of each array.
        x: the tokens.
        routes: the experts of the tokens; see `route`.
        expert: the feed-forward layer of one expert.
        placement: how experts and tokens are sharded over devices.

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
        weights: the weights of `feed_forward` in "shared" and, with a gate, w in "shared_gate".
        x: the tokens.
        expert: FFN.
    """
    y = expert(weights["shared"], x, At(None)).x
    if "shared_gate" not in weights:
        return y
    return (jax.nn.sigmoid(linear(weights["shared_gate"], x, jnp.float32)) * y).astype(y.dtype)


def router_losses(
    routes: Routes, segment_ids: Int[Array, "*batch"] | None = None
) -> dict[str, Float[Array, ""]]:
    """Returns the two usual auxiliary losses of a router, averaged over all tokens except padding.

    balance: num_experts · Σ_e f_e P_e, where f_e is the fraction of tokens sent to expert e, and
        P_e is the mean probability of expert e. This loss is 1 if f and P are uniform (Fedus et al.
        2021).
    router_z: the mean of (log Σ_e exp(logit_e))² (Zoph et al. 2022).

    Args:
        routes: the experts of the tokens.
        segment_ids: 0 for padding; None without padding.
    """
    num_experts, chosen = routes.probabilities.shape[-1], routes.experts.shape[-1]
    real = (
        jnp.ones(routes.experts.shape[:-1], jnp.float32)
        if segment_ids is None
        else segment_ids != 0
    )
    real = real.reshape(-1, 1).astype(jnp.float32) / jnp.maximum(real.sum(), 1)
    index = routes.experts.reshape(-1, chosen)
    fractions = jnp.zeros(num_experts, jnp.float32).at[index].add(real / chosen)
    means = (real * routes.probabilities.reshape(-1, num_experts)).sum(axis=0)
    squares = jnp.square(routes.log_normalizers).reshape(-1, 1)
    return {"balance": num_experts * fractions @ means, "router_z": (real * squares).sum()}


@dataclass(frozen=True)
class Experts(SubLayer):
    """Mixture of experts, a sub-layer that replaces the feed-forward layer.

    Attributes:
        expert: one expert.
        num_experts: number of experts.
        experts_per_token: number of experts that each token is sent to.
        renormalises: whether the probabilities of a token's chosen experts are rescaled to sum to
            1.
        shared: an expert that processes every token, or None.
        gates_shared: whether the output of the shared expert has a gate.
        router_bias: whether the router has a bias.
    """

    name: ClassVar[str] = "feedforward"
    hook_points: ClassVar[tuple[str, ...]] = ("feedforward.router", "feedforward.output")

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
        stddev, num_parts = initial.reading(dim), 1 if self.shared is None else 2
        router = init_linear(
            router_key, dim, self.num_experts, use_bias=self.router_bias, stddev=stddev
        )
        experts = jax.vmap(lambda key: self.expert.init(key, dim, initial))(jnp.stack(keys))
        # Assume that the outputs of the chosen experts are independent and have mean square 1, and
        # that each has the weight `share`. `power` is then the mean square of their weighted sum.
        share = 1 / (self.experts_per_token if self.renormalises else self.num_experts)
        power = self.experts_per_token * share**2
        experts["down"]["kernel"] *= initial.gain(num_parts * power)
        weights = {"router": router, **experts}
        if self.shared is None:
            return weights
        shared_key, gate_key = jax.random.split(jax.random.fold_in(key, self.num_experts))
        shared = self.shared.init(shared_key, dim, initial)
        power = GATE_POWER if self.gates_shared else 1.0
        shared["down"]["kernel"] *= initial.gain(num_parts * power)
        if self.gates_shared:
            weights["shared_gate"] = init_linear(gate_key, dim, 1, use_bias=False, stddev=stddev)
        return {**weights, "shared": shared}

    def flops(self, weights: Weights, size: SequenceSize) -> int:
        """Returns the FLOPs of the router, the shared expert and the chosen experts."""
        of_all = {name: weights[name] for name in weights.keys() & _OF_ALL}
        experts = {name: weights[name] for name in weights.keys() - _OF_ALL}
        chosen = product_flops(experts, size.length) * self.experts_per_token // self.num_experts
        return product_flops(of_all, size.length) + chosen

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        of_expert = self.expert.weight_axes().items()
        axes: dict[str, tuple[WeightAxis, ...]] = {
            path: ("experts", *axes) for path, axes in of_expert
        }
        return axes | {f"shared/{path}": axes for path, axes in of_expert}

    def chosen_experts(self) -> int:
        """See `SubLayer`."""
        return self.experts_per_token

    def context(self, tokens: Tokens, shared: Weights) -> Int[Array, "batch length"] | None:
        """Returns the segment ids of the tokens, which mark padding."""
        return tokens.new.segment_ids

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """See `mixture_of_experts` and `router_losses`."""
        experts = {name: weights[name] for name in weights.keys() - _OF_ALL}
        routes = route(
            weights["router"],
            x,
            self.experts_per_token,
            renormalises=self.renormalises,
            hook=at.hook,
        )
        y = mixture_of_experts(experts, x, routes, self.expert, at.hook.placement)
        if self.shared is not None:
            y = y + shared_expert(weights, x, self.shared)
        return Output(at.hook("feedforward.output", y), auxiliary=router_losses(routes, at.context))
