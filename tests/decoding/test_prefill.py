"""Prefill of an empty cache, where the new tokens attend to each other and not to slots."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding.autoregressive import model_weights
from jaxformer.decoding.steps import prefill
from jaxformer.functional.inputs import Inputs
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

LENGTH, CAPACITY = 11, 16
CACHED = {
    name: options
    for name, options in MODELS.items()
    if options.get("kind", jf.DecoderConfig) in (jf.DecoderConfig, jf.EncoderDecoderConfig)
}


@pytest.fixture(scope="module")
def many_queries():
    """Lowers the limit of long prefills, so that eleven tokens take the path of over 64 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxformer.functional.tokens.FEW_QUERIES", 2)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.parametrize("ring", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", mostly_slow(CACHED, slow=("llama",)))
@given(seed=tiny.seeds, padding=st.lists(st.integers(0, LENGTH - 1), min_size=2, max_size=2))
def test_prefill_function_gives_the_same_logits_and_cache_as_the_extend_function(
    name, ring, seed, padding, many_queries
):
    """Prefill of left-padded prompts gives the logits and the cache of `extend`."""
    model = tiny.build(**CACHED[name])
    variables = tiny.weights(model, seed)
    if ring and model.reach is None:
        return
    tokens = tiny.tokens(seed, 2, LENGTH)
    segment_ids = (np.arange(LENGTH) >= np.array(padding)[:, None]).astype(np.int32)
    empty = jf.init_cache(model, variables, 2, CAPACITY, tiny.sources(model, seed, 2), ring=ring)
    logits, expected = jf.extend(model, variables, tokens, empty, segment_ids)
    found = prefill(model, model_weights(variables), Inputs(tokens, segment_ids), empty)
    tiny.close(found.logits, logits[:, -1])
    filled = found.cache
    documents = expected.tables[0].documents
    real = np.asarray(documents != 0)
    np.testing.assert_array_equal(filled.tables[0].documents, documents)
    for got, wanted in zip(filled.key_values, expected.key_values, strict=True):
        for x, y in ((got.keys, wanted.keys), (got.values, wanted.values)):
            tiny.close(np.moveaxis(x, 1, 2)[real], np.moveaxis(y, 1, 2)[real])
    rest = jf.extend(model, variables, tokens[:, :1], expected)[0]
    tiny.close(jf.extend(model, variables, tokens[:, :1], found.cache)[0], rest)
