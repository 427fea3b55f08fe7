"""Weights that give NaN raise an error and never give tokens."""

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


@each_model("decoder")
@given(seed=tiny.seeds, which=st.integers(0, 99), ready=st.booleans())
def test_nan_weights_are_named_and_give_no_tokens(name, seed, which, ready):
    """NaN in any one array of the parameters, with and without `prepare`."""
    model = tiny.build(**MODELS[name])
    leaves, treedef = jax.tree.flatten(tiny.weights(model, seed))
    which %= len(leaves)
    leaves[which] = jnp.full_like(leaves[which], jnp.nan)
    variables = treedef.unflatten(leaves)
    source, prompts = tiny.sources(model, seed, 2), tiny.tokens(seed, 2, 5)
    used = jf.prepare(model, variables) if ready else variables
    said = "the logits of row 0 are not finite; nor are the weights"
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
def test_the_error_distinguishes_overflow_from_nan_weights():
    """Finite weights give infinite logits."""
    model = tiny.build()
    variables = jax.tree.map(lambda x: 1e30 * x, tiny.weights(model, 0))
    with pytest.raises(FloatingPointError, match="not finite; the weights are"):
        jf.generate(model, variables, [[1, 2]], max_new_tokens=2, sampler=GREEDY)
