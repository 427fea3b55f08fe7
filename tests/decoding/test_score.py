"""`score` sums log probabilities over the tokens and agrees with those of `generate`."""

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
@given(seed=tiny.seeds, segments=tiny.segment_batches(2))
def test_score_is_the_sum_over_documents(prefix, seed, segments):
    """Σ log P(x_i | x_<i) over documents; the first token or the prefix is the condition."""
    model = tiny.build(prefix=prefix)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segments.shape)
    scores = jf.score(model, variables, tokens, segments=segments)
    for row, ids in enumerate(segments):
        logits = oracle.decoder(variables["params"], tokens[row], ids, model.config)
        log_probs = oracle.log_softmax(logits)
        documents, _ = rules.read(ids)
        expected = 0.0
        for document in range(1, documents.max() + 1):
            own = np.flatnonzero(documents == document)
            predicted = list(pairwise(own))[max(0, prefix - 1) :]
            expected += sum(log_probs[i, tokens[row, j]] for i, j in predicted)
        tiny.close(scores[row], expected, 2e-5)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_log_probs_add_up_to_scores(seed):
    """score(prompt + generated) − score(prompt) = Σ log_probs for any sampler."""
    model = tiny.build(num_layers=1, max_length=40, window=5)
    variables = tiny.weights(model, seed)
    prompts = tiny.tokens(seed, 3, 8)
    how = {"sampler": jf.Sampler(temperature=0.5, top_k=5), "key": jax.random.key(seed)}
    out = jf.generate(model, variables, prompts, max_new_tokens=16, **how)
    whole = jf.score(model, variables, np.concatenate([prompts, out.tokens], axis=1))
    tiny.close(whole - jf.score(model, variables, prompts), out.log_probs.sum(axis=1), 2e-5)


@pytest.mark.parametrize("kind", mostly_slow(["decoder", "encoder-decoder"], "decoder"))
def test_scores_in_batches_are_those_of_one_batch(kind, monkeypatch):
    """In batches of a given size, and of as many rows as the bound allows: one here."""
    model = tiny.build(**MODELS[kind])
    variables, tokens = tiny.weights(model, 3), tiny.tokens(3, 5, 8)
    segments = np.array([[1] * 5 + [2] * 3, [1] * 4 + [0] * 4] * 2 + [[1] * 8])
    source = None if kind == "decoder" else [row[::-1].tolist() for row in tokens]

    def call(batch_size):
        return jf.score(model, variables, tokens, segments, source, batch_size=batch_size)

    at_once = call(None)
    with monkeypatch.context() as patched:
        patched.setattr(batches, "BATCH_TOKENS", 1)
        for scores in (call(2), call(None)):
            tiny.close(scores, at_once, 1e-5)


def test_a_broken_row_of_a_later_batch_is_named_by_its_number():
    model = tiny.build(tie_embeddings=False)
    variables, tokens = tiny.weights(model, 3), np.full((5, 8), 2)
    tokens[3, 1] = 7
    table = variables["params"]["embedding"]["tokens"]
    variables["params"]["embedding"]["tokens"] = table.at[7].set(np.nan)
    with pytest.raises(FloatingPointError, match="logits of row 3 are not finite"):
        jf.score(model, variables, tokens, batch_size=2)


def test_score_refuses_a_token_that_is_none():
    """An id outside the vocabulary raises ValueError, and gives NaN inside jit."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 11)  # the last one: its own block
    for bad in (-1, 13):
        tokens[0, -1] = bad
        with pytest.raises(ValueError, match=f"tokens hold id {bad}; vocab_size is 13"):
            jf.score(model, variables, tokens)
        assert np.isnan(jax.jit(lambda tokens: jf.score(model, variables, tokens))(tokens)).all()


def test_score_says_that_it_needs_the_params():
    model = tiny.build()
    ready = jf.prepare(model, tiny.weights(model, 0))
    with pytest.raises(ValueError, match="hold prepared; they must hold 'params'"):
        jf.score(model, ready, tiny.tokens(0, 1, 11))
