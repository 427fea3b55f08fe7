"""`generate` packs unpacked weights at every call and never uses stale packed weights."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding import autoregressive
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPTS = tiny.tokens(0, 2, 5)


def log_probs(model, variables):
    how = {"max_new_tokens": 3, "sampler": jf.Sampler(temperature=0.0)}
    return jf.generate(model, variables, PROMPTS, **how).log_probs


@pytest.mark.slow
def test_packed_weights_are_not_packed_again(monkeypatch):
    model, calls = tiny.build(), []
    variables = tiny.weights(model, 0)
    ready, packed = jf.pack_weights(model, variables), autoregressive.packed_weights
    expected = log_probs(model, variables)
    monkeypatch.setattr(autoregressive, "packed_weights", lambda *x: calls.append(x) or packed(*x))
    np.testing.assert_array_equal(log_probs(model, ready), expected)
    jf.beam_search(model, ready, PROMPTS, max_new_tokens=2)
    assert not calls
    log_probs(model, variables)
    assert len(calls) == 1


@pytest.mark.slow
@given(order=st.lists(st.sampled_from(["a", "b", "changed", "other model"]), max_size=8))
def test_generate_never_uses_stale_weights(order):
    """Alternating weights and models give the results of explicitly packed weights."""
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
        ready = jf.pack_weights(which, variables)
        np.testing.assert_array_equal(log_probs(which, variables), log_probs(which, ready))


def test_generate_packs_writable_numpy_weights_at_every_call():
    model = tiny.build()
    variables = jax.tree.map(np.array, tiny.weights(model, 0))
    before = log_probs(model, variables)
    variables["params"]["embedding"]["tokens"] *= 2
    after = log_probs(model, variables)
    assert (before != after).any()
    np.testing.assert_array_equal(after, log_probs(model, jf.pack_weights(model, variables)))


@pytest.mark.slow
def test_generate_frees_packed_weights_on_return():
    model = tiny.build()
    variables = jax.tree.map(jnp.array, tiny.weights(model, 0))
    log_probs(model, variables)
    gc.collect()
    before = len(jax.live_arrays())
    log_probs(model, variables)
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_generate_rejects_parameters_whose_buffers_were_deleted():
    model = tiny.build()
    variables = jax.tree.map(jnp.array, tiny.weights(model, 0))
    log_probs(model, variables)
    jax.tree.leaves(variables)[0].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        log_probs(model, variables)


def test_packed_weights_of_loaded_checkpoint_give_equal_log_probs(tmp_path):
    model = tiny.build()
    variables = tiny.weights(model, 0)
    jf.save(tmp_path / "saved", model, variables)
    ready = jf.load(tmp_path / "saved").packed()
    assert ready.keys() == {"packed"}
    np.testing.assert_array_equal(log_probs(model, ready), log_probs(model, variables))
