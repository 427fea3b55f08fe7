"""The mixture of experts against a loop over tokens and experts in float64."""

import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional.layers.expert_products import by_expert
from jaxformer.functional.layers.experts import Experts, route, router_losses
from jaxformer.functional.layers.feedforward import FeedForward, feed_forward
from jaxformer.functional.layers.sublayer import At, Initial
from jaxformer.verify import assert_dependencies, rules
from jaxformer.verify.taint import taint
from tests.properties import oracle, tiny
from tests.slow import mostly_slow

DIM = 6
# LAYERS: (number of experts, experts of a token, renormalised). LENGTHS: numbers of tokens, from
# one decoding step to blocks of many rows.
LAYERS = [(4, 2, True), (4, 2, False), (5, 1, True), (3, 3, False), (1, 1, True)]
LENGTHS = (1, 5, 64)


@cache
def layer_of(num_experts, chosen, renormalises, activation="swiglu"):
    return Experts(FeedForward(10, activation), num_experts, chosen, renormalises)


@cache
def compiled(layer):
    return jax.jit(lambda weights, x: layer(weights, x, At(None)).x)


def draw_weights(layer, seed):
    shapes = jax.eval_shape(lambda key: layer.init(key, DIM, Initial(1)), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)


def with_router(weights, change):
    """Returns the weights with another kernel of the router."""
    return {**weights, "router": {"kernel": change(weights["router"]["kernel"])}}


def in_float64(layer, weights, x):
    def one(weights, x):
        return oracle.feed_forward(weights, x, layer.expert.activation)

    rows = np.asarray(x, np.float64).reshape(-1, DIM)
    exact = oracle.float64(weights)
    y = oracle.mixture(exact, rows, one, layer.experts_per_token, layer.renormalises)
    return y.reshape(x.shape)


@pytest.mark.parametrize(
    "form",
    mostly_slow([(x,) for x in LAYERS], (LAYERS[0],), slow=[(x,) for x in LAYERS]),
)
@given(seed=tiny.seeds, length=st.sampled_from(LENGTHS))
def test_mixture_of_experts_equals_formula(form, seed, length):
    """Σ p_e FFN_e(x) over the experts with the largest p, with and without renormalised p."""
    layer = layer_of(*form)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 2, length, DIM)
    tiny.close(compiled(layer)(weights, x), in_float64(layer, weights, x), 2e-5)


@pytest.mark.parametrize("chosen", [1, 2, 4])
@given(seed=tiny.seeds)
def test_routing_weights_are_a_softmax_over_the_chosen_logits(chosen, seed):
    """With a bias of the router, which also decides which experts are chosen."""
    layer = Experts(FeedForward(10), 4, chosen, router_bias=True)
    router, x = draw_weights(layer, seed)["router"], 3 * tiny.embeddings(seed, 7, DIM)
    logits = np.float64(x) @ np.float64(router["kernel"]) + np.float64(router["bias"])
    order = np.argsort(-logits, axis=1)[:, :chosen]
    top = np.take_along_axis(logits, order, axis=1)
    routes = route(router, x, chosen)
    np.testing.assert_array_equal(routes.experts, order)
    tiny.close(routes.shares, np.stack([oracle.softmax(x) for x in top]))


SHARED = [
    Experts(FeedForward(10, "swiglu"), 4, 2, True, FeedForward(7, "swiglu"), gates_shared)
    for gates_shared in (True, False)
]


@pytest.mark.parametrize(
    "layer", mostly_slow([(x,) for x in SHARED], (SHARED[0],)), ids=["gated", "not gated"]
)
@given(seed=tiny.seeds)
def test_shared_expert_processes_every_token(layer, seed):
    """The gate, if there is one, is a sigmoid of a linear map of the token."""
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 2, 5, DIM)
    tiny.close(compiled(layer)(weights, x), in_float64(layer, weights, x), 2e-5)


@pytest.mark.slow
@given(seed=tiny.seeds, expert=st.integers(0, 3))
def test_no_token_is_dropped_if_all_choose_one_expert(seed, expert):
    layer = layer_of(4, 1, False)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 2, 64, DIM)
    x = x.at[..., 0].set(1.0)
    weights = with_router(weights, lambda kernel: kernel.at[0, expert].set(100.0))
    tiny.close(compiled(layer)(weights, x), in_float64(layer, weights, x), 2e-5)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_router_prefers_earlier_experts_on_ties(seed):
    layer = layer_of(4, 2, True)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 1, 5, DIM)
    weights = with_router(weights, jnp.zeros_like)
    routes = route(weights["router"], x, 2)
    np.testing.assert_array_equal(routes.experts, np.broadcast_to([0, 1], (1, 5, 2)))
    tiny.close(compiled(layer)(weights, x), in_float64(layer, weights, x), 2e-5)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_expert_outputs_do_not_depend_on_token_order(seed):
    """Permuted tokens have the same outputs, permuted. So has a token alone, and under vmap."""
    layer = layer_of(4, 2, True)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 1, 64, DIM)
    order = np.random.default_rng(seed).permutation(64)
    run = compiled(layer)
    y = run(weights, x)
    tiny.close(run(weights, x[:, order]), y[:, order])
    tiny.close(run(weights, x[:, :1]), y[:, :1])
    each = jax.vmap(lambda x: layer(weights, x[None, None], At(None)).x[0, 0])(x[0, :5])
    tiny.close(each, y[0, :5])


@pytest.mark.parametrize(
    "form", mostly_slow([(x,) for x in (*LAYERS[:2], (6, 4, False))], slow=[(LAYERS[0],)])
)
@given(seed=tiny.seeds, length=st.sampled_from(LENGTHS))
def test_expert_outputs_summed_over_devices_equal_those_of_one_device(form, seed, length):
    """The experts that a device lacks add 0. It may have fewer experts than a token chooses."""
    layer = layer_of(*form)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, length, DIM)
    routes = route(weights.pop("router"), x, layer.experts_per_token)
    half = layer.num_experts // 2

    def part(first):
        own = jax.tree.map(lambda leaf: leaf[first : first + half], weights)
        experts = routes.experts - first
        return by_expert(layer.expert, own, x, experts, routes.shares, layer.num_experts)

    whole = by_expert(layer.expert, weights, x, routes.experts, routes.shares, layer.num_experts)
    tiny.close(part(0) + part(half), whole, 2e-5)


def dense(layer, weights, x):
    """The same sum, with all experts computing all tokens."""
    routes = route(weights["router"], x, layer.experts_per_token, renormalises=layer.renormalises)
    experts = {name: branch for name, branch in weights.items() if name != "router"}
    each = jax.vmap(lambda one: feed_forward(one, x, layer.expert.activation))(experts)
    shares = jax.nn.one_hot(routes.experts, layer.num_experts) * routes.shares[..., None]
    return jnp.einsum("...ke,e...d->...d", shares, each)


@pytest.mark.slow
@pytest.mark.parametrize("form", [LAYERS[1], LAYERS[2]])
@given(seed=tiny.seeds)
def test_expert_gradients_equal_those_of_computing_all_experts(form, seed):
    """In reverse mode along a random direction of the outputs, and in forward mode."""
    layer = layer_of(*form)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 2, 20, DIM)
    toward = tiny.embeddings(seed + 1, 2, 20, DIM)

    def loss(function):
        return lambda weights, x: (function(weights, x) * toward).sum()

    arguments = weights, x
    both = compiled(layer), lambda weights, x: dense(layer, weights, x)
    found, expected = (jax.grad(loss(function), (0, 1))(*arguments) for function in both)
    tiny.all_close(found, expected, 2e-5)
    # The tangents are compared one by one: their sum may cancel, and leave only rounding errors.
    found, expected = (jax.jvp(function, arguments, arguments)[1] for function in both)
    tiny.close(found, expected, 2e-5)


def test_mixture_of_experts_never_computes_all_experts_on_all_tokens():
    """Neither pass computes or stores all experts on all tokens."""
    layer, length = Experts(FeedForward(8), 16, 2), 512
    weights = draw_weights(layer, 0)

    def loss(weights, x):
        return jnp.square(layer(weights, x, At(None)).x).sum()

    x = jax.ShapeDtypeStruct((1, length, DIM), jnp.float32)
    program = jax.jit(jax.grad(loss, (0, 1))).lower(weights, x).compile().as_text()
    shapes = re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", program)
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest < 16 * length * DIM / 2


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches())
def test_router_losses_average_over_tokens_without_padding(seed, segment_ids):
    layer = layer_of(4, 2, True)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, *segment_ids.shape, DIM)
    found = router_losses(route(weights["router"], x, 2), jnp.asarray(segment_ids))
    logits = np.float64(x)[segment_ids != 0] @ np.float64(weights["router"]["kernel"])
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    count = np.bincount(np.argsort(-p, axis=1)[:, :2].ravel(), minlength=4)
    balance = 4 * (count / max(1, count.sum()) * p.sum(axis=0) / max(1, len(p))).sum()
    square = (np.log(np.exp(logits).sum(axis=1)) ** 2).sum() / max(1, len(p))
    tiny.close(found["balance"], balance)
    tiny.close(found["router_z"], square)


@pytest.mark.slow
def test_a_decoder_with_experts_depends_on_earlier_tokens_only():
    model = tiny.build(num_experts=4, num_layers=1)
    variables, x = tiny.weights(model, 0), tiny.embeddings(0, 8, 8)

    def hidden(variables, x):
        return model.apply(variables, x[None], method="hidden_states")[0]

    assert_dependencies(hidden, x, rules.causal(8), weights=variables)


@pytest.mark.slow
def test_taint_analysis_follows_tokens_through_sorting_by_expert():
    """Also its choice of experts: a choice that depends on the next token marks that token."""
    layer = layer_of(4, 2, True)
    weights = draw_weights(layer, 0)
    experts = {name: branch for name, branch in weights.items() if name != "router"}
    x = tiny.embeddings(0, 6, DIM)

    def run(x, seen):
        routes = route(weights["router"], seen, 2)
        return by_expert(layer.expert, experts, x, routes.experts, routes.shares, 4)

    bits, remarks = taint(lambda x: run(x, x), x, 1)
    assert not remarks
    np.testing.assert_array_equal(bits.any(axis=1), np.eye(6, dtype=bool))
    bits, _ = taint(lambda x: run(x, jnp.roll(x, -1, axis=0)), x, 1)
    both = np.eye(6) + np.roll(np.eye(6), 1, axis=1) > 0
    np.testing.assert_array_equal(bits.any(axis=1), both)
