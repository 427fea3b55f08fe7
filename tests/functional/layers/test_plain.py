"""Layers without residuals: their formulas, initial weights and dependencies."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional import (
    Convolution,
    Experts,
    FeedForward,
    Initial,
    LayerNorm,
    Packed,
    Plain,
    Residual,
    RMSNorm,
    Tokens,
    block,
    feed_forward,
)
from jaxformer.functional.inputs import Inputs, Run
from jaxformer.functional.layers.feedforward import ACTIVATIONS
from jaxformer.functional.layers.layer import init_layer
from jaxformer.functional.layers.plain import ActivatedFeedForward, MatchedAttention, Preserving
from jaxformer.models.config import Execution
from jaxformer.verify import rules
from tests.models import own_stacks
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
DIM, WIDTH = 64, 256


def run(layer, weights, x):
    return block(weights, x, layer, Tokens.from_sequences(Inputs(x), Run(Execution()))).x


@pytest.mark.slow
@pytest.mark.parametrize("output_norm", [None, RMSNorm()])
@pytest.mark.parametrize("position", ["pre", "post", "post_sublayer"])
@given(seed=tiny.seeds)
def test_layer_without_residual_equals_formula(position, output_norm, seed):
    """F(Norm(x)), Norm(F(x)) or a norm on both sides, of x [batch, length, dim]."""
    part = Plain(FeedForward(12), LayerNorm(), position, output_norm)
    shapes = jax.eval_shape(lambda key: init_layer((part,), Initial(1), 8, key), jax.random.key(0))
    rng = np.random.default_rng(seed)
    weights = jax.tree.map(lambda leaf: jnp.float32(rng.normal(size=leaf.shape)), shapes)
    x = tiny.embeddings(seed, 2, 3, 8)

    def norm(x):
        return part.norm(weights["feedforward_norm"], x)

    y = feed_forward(weights["feedforward"], norm(x) if position == "pre" else x)
    y = norm(y) if position == "post_sublayer" else y
    y = y if output_norm is None else output_norm(weights["feedforward_output_norm"], y)
    y = norm(y) if position == "post" else y
    tiny.close(run((part,), weights, x), y)


PRESERVED = {
    **{f"feed-forward {name}": FeedForward(WIDTH, name) for name in ACTIVATIONS},
    "activated twice": ActivatedFeedForward(WIDTH, "relu"),
    "one expert": Experts(FeedForward(WIDTH), 8, 1),
    "experts": Experts(FeedForward(WIDTH), 8, 4),
    "experts that share less than 1": Experts(FeedForward(WIDTH), 8, 4, renormalises=False),
    "a shared expert": Experts(FeedForward(WIDTH), 8, 4, shared=FeedForward(WIDTH)),
    "a gated one": Experts(FeedForward(WIDTH), 8, 4, True, FeedForward(WIDTH), gates_shared=True),
    "attention": MatchedAttention(4, 2, 16),
    "gated attention": MatchedAttention(4, 4, 16, has_gate=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    mostly_slow(PRESERVED, *(x for x in PRESERVED if "expert" not in x), "experts", slow=PRESERVED),
)
def test_initial_weights_of_layers_without_residual_preserve_mean_square(name):
    """The features of a token have the mean square 1 before and after the layer.

    A token's experts have equal shares here, as the initial weights assume.
    """
    part = Plain(PRESERVED[name], LayerNorm())
    weights = init_layer((part,), Initial(12), DIM, jax.random.key(0))
    if "router" in weights.get("feedforward", {}):
        weights["feedforward"]["router"] = {"kernel": jnp.zeros((DIM, 8))}
    x = jax.random.normal(jax.random.key(1), (512, 1, DIM))
    np.testing.assert_allclose(np.square(run((part,), weights, x)).mean(), 1.0, rtol=0.3)


@given(power=st.floats(0.01, 100.0), fan_in=st.integers(1, 4096))
def test_initial_gain_gives_outputs_of_variance_1_for_any_input_power(power, fan_in):
    """W x has the variance stddev² · fan_in · power = 1; with a residual, power has no effect."""
    initial = Preserving(3)
    stddev = initial.writing(fan_in) * initial.gain(power)
    np.testing.assert_allclose(stddev**2 * fan_in * power, 1.0)
    assert Initial(3).gain(power) == 1.0


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_each_query_scores_its_own_key_highest_at_initialization_without_residuals(num_kv_heads):
    """Its score with itself is above those with others, by what the heads of a group share."""
    sublayer = MatchedAttention(4, num_kv_heads, 16, mask=Packed())
    weights = Plain(sublayer).init(jax.random.key(0), DIM, Initial(1))["attention"]
    x = jax.random.normal(jax.random.key(1), (8, 16, DIM))
    query, key = (x @ weights[name]["kernel"] for name in ("query", "key"))
    query = query.reshape(8, 16, num_kv_heads, -1, 16)
    tiny.close(key, query.sum(axis=3).reshape(key.shape) / query.shape[3] ** 0.5, 1e-4)
    scores = jnp.einsum("bqngd,bknd->qk", query, key.reshape(8, 16, num_kv_heads, 16))
    scores = np.asarray(scores) / (8 * 4 * 4)  # the mean over rows and heads, times 1/√head_dim
    own, others = scores.diagonal(), scores[~np.eye(16, dtype=bool)]
    assert own.min() > others.max() and own.mean() > 1.5


@pytest.mark.parametrize(
    "kinds",
    mostly_slow(
        [((Plain, Plain),), ((Plain, Residual),), ((Residual, Plain),)],
        ((Plain, Residual),),
        slow=[((Plain, Plain),)],
    ),
)
def test_dependencies_of_layers_match_their_masks_and_residuals(kinds):
    """Without a residual, a convolution of the token before depends on no other token."""
    config = tiny.build().config
    layers = tuple(
        (
            kind(Convolution((-1,), "gelu"), LayerNorm()),
            Residual(FeedForward(8), LayerNorm()),
        )
        for kind in kinds
    )
    model = jf.Decoder(config, layers=layers)
    own_stacks.dependencies_are_the_rules(model)
    rule = rules.model_rule(config, np.ones((1, 4), int), layers=layers)[0, :, 0]
    assert rule.diagonal().any() == (Plain not in kinds)


HALF_BUILT = {"residual": False, "norm": "none", "output_activation": True}


@pytest.mark.slow
def test_config_without_residual_builds_layers_without_residual_connections(tmp_path):
    """The half-built decoder of lecture 10 is a stack of them; saved, they are named."""
    model = tiny.build(**HALF_BUILT)
    layers = model.architecture.stack.layers
    for layer in layers:
        assert [type(part) for part in layer] == [Plain, Plain]
        assert [type(x.sublayer) for x in layer] == [MatchedAttention, ActivatedFeedForward]
    own = replace(model, layers=layers)
    own_stacks.a_saved_model_is_equal(tmp_path / "half-built", own)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, tiny.LENGTH)
    tiny.close(own.apply(variables, tokens), model.apply(variables, tokens), 0.0)
