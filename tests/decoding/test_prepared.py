"""`generate` packs the weights once for as long as they stay the same, and never uses old ones."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding import prepared
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPTS = tiny.tokens(0, 2, 5)


def log_probs(model, variables):
    how = {"max_new_tokens": 3, "sampler": jf.Sampler(temperature=0.0)}
    return jf.generate(model, variables, PROMPTS, **how).log_probs


@pytest.fixture
def packed(monkeypatch):
    """The variables that were packed, in order."""
    calls, prepare = [], prepared.prepare

    def counted(model, variables):
        calls.append(variables)
        return prepare(model, variables)

    monkeypatch.setattr(prepared, "prepare", counted)
    monkeypatch.setattr(prepared, "_LAST", prepared.LastPrepared())
    return calls


@pytest.mark.slow
def test_the_same_weights_are_packed_once(packed):
    model = tiny.build()
    variables = tiny.weights(model, 0)
    first = log_probs(model, variables)
    again = {"params": dict(variables["params"])}  # another dict of the same arrays
    np.testing.assert_array_equal(log_probs(model, again), first)
    jf.beam_search(model, variables, PROMPTS, max_new_tokens=2)
    log_probs(jf.Decoder(model.config, execution=model.execution), variables)
    assert len(packed) == 1


@given(order=st.lists(st.sampled_from(["a", "b", "changed", "other model"]), max_size=8))
def test_what_is_used_is_what_was_given(order):
    """Weights and models in any order: each call as if it were the first."""
    model, other = tiny.build(), tiny.build(dtype="bfloat16")
    a = tiny.weights(model, 0)
    changed = {
        "params": {**a["params"], "embedding": tiny.weights(model, 9)["params"]["embedding"]}
    }
    cases = {
        "a": (model, a),
        "b": (model, tiny.weights(model, 1)),
        "changed": (model, changed),
        "other model": (other, a),
    }
    for name in order:
        which, variables = cases[name]
        ready = jf.prepare(which, variables)
        np.testing.assert_array_equal(log_probs(which, variables), log_probs(which, ready))


def test_arrays_that_may_be_written_to_are_packed_anew():
    model = tiny.build()
    variables = jax.tree.map(np.array, tiny.weights(model, 0))
    before = log_probs(model, variables)
    variables["params"]["embedding"]["tokens"] *= 2
    after = log_probs(model, variables)
    assert (before != after).any()
    np.testing.assert_array_equal(after, log_probs(model, jf.prepare(model, variables)))


def test_nothing_is_kept_beyond_the_parameters():
    """The packed copy goes with any one of the arrays that it was made of."""
    model = tiny.build()
    variables = jax.tree.map(jnp.array, tiny.weights(model, 0))
    log_probs(model, variables)
    kept = prepared.prepared_variables(model, variables)
    leaf = weakref.ref(jax.tree.leaves(kept)[0])
    del kept
    gc.collect()
    assert leaf() is not None
    variables["params"]["final_norm"] = tiny.weights(model, 1)["params"]["final_norm"]
    gc.collect()
    assert leaf() is None


def test_donated_parameters_are_not_used_through_their_copy():
    model = tiny.build()
    variables = jax.tree.map(jnp.array, tiny.weights(model, 0))
    log_probs(model, variables)
    jax.tree.leaves(variables)[0].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        log_probs(model, variables)
