"""The output gate of attention: σ(x W_g) ⊙ heads before W_O."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from tests.properties import oracle, tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")


@cache
def model_of(**options):
    return tiny.build(attention_gate=True, positions="rotary", **options)


@pytest.mark.parametrize("use_bias", [True, False])
@given(seed=tiny.seeds, segments=tiny.segment_batches(2))
def test_a_decoder_with_gates_is_its_formula(use_bias, seed, segments):
    model = model_of(use_bias=use_bias)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, tiny.LENGTH)
    assert ("bias" in variables["params"]["blocks"]["attention"]["gate"]) == use_bias
    logits = tiny.apply(model)(variables, tokens, segments)
    for found, row, ids in zip(logits, tokens, segments, strict=True):
        wanted = oracle.decoder(variables["params"], row, ids, model.config)
        tiny.close(found, wanted, where=ids != 0)


def test_the_captured_heads_are_what_the_output_projection_reads():
    """Patches and attributions of heads act behind the gate."""
    model = model_of(num_layers=1)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, tiny.LENGTH)
    seen = jf.inspect(model, variables, tokens, capture=("attention.heads", "attention.output"))
    heads = np.float64(seen.captured["attention.heads"][0])
    output = oracle.float64(variables["params"]["blocks"]["attention"]["output"])
    joined = heads.transpose(0, 2, 1, 3).reshape(2, tiny.LENGTH, -1)
    wanted = joined @ output["kernel"][0] + output["bias"][0]
    tiny.close(seen.captured["attention.output"][0], wanted)


def test_a_cache_and_prepared_weights_give_the_logits_of_one_pass():
    model = model_of()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, tiny.LENGTH)
    whole = tiny.apply(model)(variables, tokens)
    ready = jf.prepare(model, variables)
    cache, found = jf.start(model, ready, 2, 16), []
    for part in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        logits, cache = jf.advance(model, ready, part, cache)
        found.append(logits)
    tiny.close(jnp.concatenate(found, axis=1), whole)
