"""Finite numbers as masks: one counts as a mask only if no score can outweigh it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.verify import assert_dependencies, rules
from jaxformer.verify.bounds import underflow
from jaxformer.verify.taint import follow, taint
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 6
LOWER = np.tril(np.ones((LENGTH, LENGTH), bool))
CAPS = {
    "none": lambda scores: scores,
    "tanh": lambda scores: 30 * jnp.tanh(scores / 30),
    "clip": lambda scores: jnp.clip(scores, -50, 50),
    "sigmoid": lambda scores: 8 * jax.nn.sigmoid(scores) - 4,
}


def attention(number, cap="none", add=False, dtype=jnp.float32):
    """Returns causal attention; `number` replaces later tokens' scores or is added to them."""

    def function(x):
        x = x.astype(dtype)
        scores, mask = CAPS[cap](x @ x.T), jnp.asarray(number, dtype)
        masked = scores + jnp.where(LOWER, jnp.zeros((), dtype), mask)
        return jax.nn.softmax(masked if add else jnp.where(LOWER, scores, mask), axis=-1) @ x

    return function


def leaks(function) -> bool:
    bits, remarks = taint(function, tiny.embeddings(0, LENGTH, 4), 1)
    found = bits.any(axis=1)
    assert not remarks and not (LOWER & ~found).any()
    return bool((found & ~LOWER).any())


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_taint_analysis_finds_leak_if_scores_can_be_below_mask_value(dtype, add):
    """Scores may fall below −10⁴, but not to the lowest number of a dtype."""
    lowest = float(jnp.finfo(dtype).min)
    how = {"add": add, "dtype": dtype}
    assert leaks(attention(-1e4, **how))
    for number in (lowest, lowest / 2, -np.inf):
        assert not leaks(attention(number, **how)), number


@pytest.mark.parametrize("number, within", [(-3e4, True), (-1e6, True), (-1e9, False)])
def test_mask_value_of_minus_a_million_leaks_and_minus_a_billion_does_not(number, within):
    assert leaks(attention(number)) == leaks(attention(number, add=True)) == within


@pytest.mark.parametrize("cap", CAPS)
def test_mask_value_of_minus_250_suffices_for_softcapped_scores(cap):
    for number in (-250.0, -1e4):
        for add in (False, True):
            assert leaks(attention(number, cap, add)) == (cap == "none"), (number, add)
    assert leaks(attention(-90.0, cap))


def test_masked_tokens_get_attention_if_all_scores_are_below_the_finite_mask_value():
    """If scores are −15,258, later tokens that are masked by −10⁴ get all the weight."""
    weights = jax.nn.softmax(jnp.where(LOWER, -15258.0, -1e4), axis=-1)
    assert weights[0, 1] > 0.1


LEAKS = {
    "divided by the largest": lambda x: jnp.cumsum(x, axis=0) / jnp.max(x),
    "divided by the smallest": lambda x: jnp.cumsum(x, axis=0) / jnp.min(-x),
    "near in space": lambda x: jnp.exp(-1e4 * ((x[:, None] - x[None]) ** 2).sum(-1)) @ x,
    "very near in space": lambda x: jnp.exp(-1e9 * jnp.abs(x[:, None] - x[None]).sum(-1)) @ x,
    "powers of two": lambda x: jnp.exp2(-1e4 * jnp.abs(x)) + x.sum(),
    "a threshold": lambda x: jnp.maximum(x.sum(), 2e6) + x,
    "softmax of a large scale": lambda x: jax.nn.softmax(1e5 * (x @ x.T), axis=-1) @ x,
    "a mask that the text decides": lambda x: (
        jax.nn.softmax(jnp.where(LOWER & (x[:, 0] > 0), x @ x.T, -1e9), axis=-1) @ x
    ),
}


@pytest.mark.parametrize("scale", [1.0, 3e4])
@pytest.mark.parametrize("name", LEAKS)
def test_leak_through_finite_mask_is_found_at_every_scale_of_scores(name, scale):
    x = scale * jnp.abs(tiny.embeddings(0, LENGTH, 4))
    bits, _ = taint(LEAKS[name], x, 1)
    assert (bits.reshape(LENGTH, -1, LENGTH).any(axis=1) & ~LOWER).any()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.nn.relu(x.sum(axis=0) - 1e9),
        lambda x: jax.nn.sigmoid(x.sum(axis=0) - 1e9),
        lambda x: (jnp.tanh(x.sum(axis=0)) > 2).astype(x.dtype),
        lambda x: jnp.minimum(jnp.exp(x.sum(axis=0)), -1.0),
        lambda x: jnp.clip(jnp.tanh(x.sum(axis=0)), 2, 3),
        lambda x: jnp.exp(-200 - x.sum(axis=0) ** 2),
    ],
)
def test_constant_output_depends_on_no_input(function):
    assert not taint(function, tiny.embeddings(0, LENGTH, 4), 1)[0].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_exp_is_zero_below_the_computed_underflow_bound(dtype):
    below, tiniest = underflow(dtype), float(jnp.finfo(dtype).smallest_subnormal)
    assert np.exp(np.asarray(below, np.float32).astype(dtype)) == 0
    assert np.exp(below) < tiniest


def test_assertion_message_recommends_masking_with_minus_infinity():
    x = tiny.embeddings(0, LENGTH, 4)
    with pytest.raises(AssertionError, match=r"masked by about -10,000.*Mask by -jnp.inf"):
        assert_dependencies(attention(-1e4), x, rules.causal(LENGTH))
    notes = follow(jax.make_jaxpr(attention(-1e9))(x), x, 1).notes
    assert "score is at most 1,048,576" in notes[0]
    assert not follow(jax.make_jaxpr(attention(-np.inf))(x), x, 1).notes
