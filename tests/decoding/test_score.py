"""`score` sums log probabilities over the tokens and agrees with `generate`."""

from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from jaxformer.decoding import batches
from jaxformer.verify import rules
from tests.properties import oracle, tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [0, 3])
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2))
def test_score_is_the_sum_of_log_probabilities_over_documents(prefix, seed, segment_ids):
    """The score is Σ log P(x_i | x_<i) over documents, without the first token or the prefix."""
    model = tiny.build(prefix=prefix)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    scores = jf.score(model, variables, tokens, segment_ids=segment_ids)
    for index, ids in enumerate(segment_ids):
        logits = oracle.decoder(variables["params"], tokens[index], ids, model.config)
        log_probs = oracle.log_softmax(logits)
        documents, _ = rules.read(ids)
        expected = 0.0
        for document in range(1, documents.max() + 1):
            own = np.flatnonzero(documents == document)
            predicted = list(pairwise(own))[max(0, prefix - 1) :]
            expected += sum(log_probs[i, tokens[index, j]] for i, j in predicted)
        tiny.close(scores[index], expected, 2e-5)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_log_probabilities_of_generated_tokens_sum_to_the_score(seed):
    """score(prompt + generated) − score(prompt) = Σ log_probs for any sampler."""
    model = tiny.build(num_layers=1, max_length=40, window=5)
    variables = tiny.weights(model, seed)
    prompts = tiny.tokens(seed, 3, 8)
    how = {"sampler": jf.Sampler(temperature=0.5, top_k=5), "key": jax.random.key(seed)}
    out = jf.generate(model, variables, prompts, max_new_tokens=16, **how)
    whole = jf.score(model, variables, np.concatenate([prompts, out.tokens], axis=1))
    tiny.close(whole - jf.score(model, variables, prompts), out.log_probs.sum(axis=1), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(["decoder", "encoder-decoder"], "decoder"))
def test_score_in_several_batches_equals_score_in_one_batch(kind, monkeypatch):
    """The batch size is given by the caller, or limited to 1 by the token limit."""
    model = tiny.build(**MODELS[kind])
    variables, tokens = tiny.weights(model, 3), tiny.tokens(3, 5, 8)
    segment_ids = np.array([[1] * 5 + [2] * 3, [1] * 4 + [0] * 4] * 2 + [[1] * 8])
    source = None if kind == "decoder" else [sequence[::-1].tolist() for sequence in tokens]

    def call(batch_size):
        return jf.score(model, variables, tokens, segment_ids, source, batch_size=batch_size)

    at_once = call(None)
    with monkeypatch.context() as patched:
        patched.setattr(batches, "BATCH_TOKENS", 1)
        for scores in (call(2), call(None)):
            tiny.close(scores, at_once, 1e-5)


def test_score_error_for_nan_logits_names_the_batch_element():
    model = tiny.build(tie_embeddings=False)
    variables, tokens = tiny.weights(model, 3), np.full((5, 8), 2)
    tokens[3, 1] = 7
    table = variables["params"]["embedding"]["tokens"]
    variables["params"]["embedding"]["tokens"] = table.at[7].set(np.nan)
    with pytest.raises(FloatingPointError, match="logits of batch element 3 are not finite"):
        jf.score(model, variables, tokens, batch_size=2)


def test_score_rejects_ids_outside_the_vocabulary():
    """An id outside the vocabulary raises ValueError, and gives NaN inside jit."""
    model = tiny.build()
    variables, tokens = (
        tiny.weights(model, 0),
        tiny.tokens(0, 1, 11),
    )  # the last token is in the last block of the chunked loss
    for bad in (-1, 13):
        tokens[0, -1] = bad
        with pytest.raises(ValueError, match=f"tokens contain id {bad}, but vocab_size is 13"):
            jf.score(model, variables, tokens)
        assert np.isnan(jax.jit(lambda tokens: jf.score(model, variables, tokens))(tokens)).all()


def test_score_rejects_packed_weights():
    model = tiny.build()
    ready = jf.pack_weights(model, tiny.weights(model, 0))
    with pytest.raises(ValueError, match="contain packed; they must contain 'params'"):
        jf.score(model, ready, tiny.tokens(0, 1, 11))
