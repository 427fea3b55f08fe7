"""Reading prompts into an empty cache, where the tokens attend to each other and not to slots."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding.autoregressive import weights_of
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
    """Eleven tokens count as many, as more than 64 do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxformer.functional.tokens.FEW_QUERIES", 2)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.parametrize("ring", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", mostly_slow(CACHED, slow=("llama",)))
@given(seed=tiny.seeds, padding=st.lists(st.integers(0, LENGTH - 1), min_size=2, max_size=2))
def test_it_reads_what_advance_reads(name, ring, seed, padding, many_queries):
    """Logits, keys, values and the rest of the cache, for prompts that are padded on the left."""
    model = tiny.build(**CACHED[name])
    variables = tiny.weights(model, seed)
    if ring and model.reach is None:
        return
    tokens = tiny.tokens(seed, 2, LENGTH)
    segments = (np.arange(LENGTH) >= np.array(padding)[:, None]).astype(np.int32)
    empty = jf.start(model, variables, 2, CAPACITY, tiny.sources(model, seed, 2), ring=ring)
    logits, expected = jf.advance(model, variables, tokens, empty, segments)
    found = prefill(model, weights_of(variables), Inputs(tokens, segments), empty)
    tiny.close(found.logits, logits[:, -1])
    filled = found.cache
    documents = expected.tables[0].documents
    real = np.asarray(documents != 0)
    np.testing.assert_array_equal(filled.tables[0].documents, documents)
    for got, wanted in zip(filled.slots, expected.slots, strict=True):
        for x, y in ((got.keys, wanted.keys), (got.values, wanted.values)):
            tiny.close(np.moveaxis(x, 1, 2)[real], np.moveaxis(y, 1, 2)[real])
    rest = jf.advance(model, variables, tokens[:, :1], expected)[0]
    tiny.close(jf.advance(model, variables, tokens[:, :1], found.cache)[0], rest)
