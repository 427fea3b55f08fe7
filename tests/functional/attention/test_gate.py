"""The output gate of attention: σ(x W_g) ⊙ heads before W_O."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from tests.properties import oracle, tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


@cache
def model_of(**options):
    return tiny.build(attention_gate=True, positions="rotary", **options)


@pytest.mark.parametrize("use_bias", mostly_slow([True, False], True))
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2))
def test_decoder_with_attention_gates_equals_formula(use_bias, seed, segment_ids):
    model = model_of(use_bias=use_bias)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, tiny.LENGTH)
    assert ("bias" in variables["params"]["blocks"]["attention"]["gate"]) == use_bias
    logits = tiny.apply(model)(variables, tokens, segment_ids)
    for found, sequence, ids in zip(logits, tokens, segment_ids, strict=True):
        wanted = oracle.decoder(variables["params"], sequence, ids, model.config)
        tiny.close(found, wanted, where=ids != 0)


def test_captured_head_outputs_include_the_attention_gate():
    """Patches and attributions of heads act behind the gate."""
    model = model_of(num_layers=1)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, tiny.LENGTH)
    seen = jf.inspect(model, variables, tokens, capture=("attention.heads", "attention.output"))
    heads = np.float64(seen.captured["attention.heads"][0])
    output = oracle.float64(variables["params"]["blocks"]["attention"]["output"])
    joined = heads.transpose(0, 2, 1, 3).reshape(2, tiny.LENGTH, -1)
    wanted = joined @ output["kernel"][0] + output["bias"][0]
    tiny.close(seen.captured["attention.output"][0], wanted)


@pytest.mark.slow
def test_cached_decoding_with_attention_gates_equals_one_pass():
    model = model_of()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, tiny.LENGTH)
    whole = tiny.apply(model)(variables, tokens)
    ready = jf.pack_weights(model, variables)
    cache, found = jf.init_cache(model, ready, 2, 16), []
    for part in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        logits, cache = jf.extend(model, ready, part, cache)
        found.append(logits)
    tiny.close(jnp.concatenate(found, axis=1), whole)
