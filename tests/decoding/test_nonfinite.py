"""Weights with NaN raise an error instead of producing tokens."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from tests.properties import tiny
from tests.properties.models import MODELS, each_model

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
GREEDY = jf.Sampler(temperature=0.0)


@pytest.mark.slow
@each_model("decoder")
@given(seed=tiny.seeds, which=st.integers(0, 99), ready=st.booleans())
def test_nan_weights_raise_error_that_names_the_weights(name, seed, which, ready):
    """NaN in a single parameter array raises an error, with and without `pack_weights`."""
    model = tiny.build(**MODELS[name])
    leaves, treedef = jax.tree.flatten(tiny.weights(model, seed))
    which %= len(leaves)
    leaves[which] = jnp.full_like(leaves[which], jnp.nan)
    variables = treedef.unflatten(leaves)
    source, prompts = tiny.sources(model, seed, 2), tiny.tokens(seed, 2, 5)
    used = jf.pack_weights(model, variables) if ready else variables
    said = "the logits of batch element 0 are not finite; these weights are not finite:"
    how = {"max_new_tokens": 3, "source": source}
    with pytest.raises(FloatingPointError, match=said):
        jf.generate(model, used, prompts, sampler=GREEDY, **how)
    with pytest.raises(FloatingPointError, match=said):
        jf.generate(model, used, prompts, key=jax.random.key(0), **how)
    with pytest.raises(FloatingPointError, match=said):
        jf.beam_search(model, used, prompts, beam_width=2, **how)
    with pytest.raises(FloatingPointError, match=said):
        jf.score(model, variables, prompts, source=source)


@pytest.mark.slow
def test_error_for_overflowing_logits_says_that_all_weights_are_finite():
    """If finite weights overflow to infinite logits, the error says that all weights are finite."""
    model = tiny.build()
    variables = jax.tree.map(lambda x: 1e30 * x, tiny.weights(model, 0))
    with pytest.raises(FloatingPointError, match="not finite; all weights are finite"):
        jf.generate(model, variables, [[1, 2]], max_new_tokens=2, sampler=GREEDY)
