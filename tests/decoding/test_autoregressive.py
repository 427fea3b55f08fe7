"""Properties of every autoregressive model, tested on one model of each kind."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from jaxformer.verify import rules
from tests.properties import tiny
from tests.properties.chunks import chunked, cuts
from tests.properties.models import MODELS, each_model
from tests.properties.witness import changed, exactly, jacobian, within

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
BATCH, NEW = 2, 6
each_kind = each_model("llama", "encoder-decoder")
# properties/test_dependency and test_invariance test the same of the decoder.
each_other_kind = each_model("lstm", "encoder-decoder")


@each_other_kind
@tiny.many
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_jacobian_is_the_composed_rule(name, seed, segments):
    """∂ output i / ∂ input j ≠ 0 exactly where a dependency path leads from j to i."""
    model = tiny.build(**MODELS[name])
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    read = tiny.read(model, tiny.sources(model, seed, BATCH))
    found = jacobian(model)(tiny.weights(model, seed), x, jnp.asarray(segments), None, **read)
    exactly(found, rules.of(model.config, segments))


@each_model("lstm")
@tiny.many
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_another_input_changes_nothing_beyond_the_rule(name, seed, segments):
    """Outputs to which no path leads from the changed input stay bitwise equal."""
    model = tiny.build(**MODELS[name])
    config = model.config
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, config.embed_dim)
    other = tiny.embeddings(seed + 1, config.embed_dim)
    read = tiny.read(model, tiny.sources(model, seed, BATCH))
    found = changed(model)(tiny.weights(model, seed), x, jnp.asarray(segments), other, **read)
    within(found, rules.of(config, segments)[:, :, 0])


@tiny.many
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_a_centred_convolution_sees_what_is_to_come(seed, segments):
    """A model that is not causal obeys its rule, sees later tokens and cannot generate."""
    model = tiny.build(kind=jf.ConvolutionalConfig, causal=False, activation="gelu")
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    variables = tiny.weights(model, seed)
    found = np.asarray(jacobian(model)(variables, x, jnp.asarray(segments), None))
    exactly(found, rules.of(model.config, segments))
    for row, ids in enumerate(segments):
        together = np.flatnonzero(np.diff(rules.read(ids)[0][ids != 0]) == 0)
        assert len(together) == 0 or np.triu(found[row, :, row], 1).any()
    for call in (
        lambda: jf.generate(model, variables, [[1]], max_new_tokens=1, key=jax.random.key(0)),
        lambda: jf.start(model, variables, 1, 4),
        lambda: jf.score(model, variables, np.ones((1, 3), np.int32)),
        lambda: jf.prepare(model, variables),
    ):
        with pytest.raises(ValueError, match=r"not autoregressive .*centred"):
            call()


@each_model("llama")
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH), chunks=cuts())
def test_any_chunking_is_one_pass(name, seed, segments, chunks):
    """Prefill, chunks and single steps give the logits of one pass.

    Tested with prepared weights and random documents and padding, and with plain params and no
    segments.
    """
    model = tiny.build(**MODELS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segments.shape)
    source = tiny.sources(model, seed, BATCH)
    read = tiny.read(model, source)
    whole = tiny.apply(model)(variables, tokens, segments, **read)
    ready = jf.prepare(model, variables)
    logits, _ = chunked(model, ready, tokens, chunks, segments, source=source)
    tiny.close(logits, whole, where=segments != 0)
    plain, _ = chunked(model, variables, tokens, chunks, source=source)
    tiny.close(plain, tiny.apply(model)(variables, tokens, **read))


@each_kind
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_a_document_gives_what_it_gives_alone(name, seed, segments):
    """A document inside a packed, padded batch has the logits of the document alone.

    In the comparison the document starts its sequence; the tokens after it do not matter.
    """
    model = tiny.build(**MODELS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segments.shape)
    source = tiny.sources(model, seed, len(segments))
    together = tiny.apply(model)(variables, tokens, segments, **tiny.read(model, source))
    together = np.asarray(together)
    for row, ids in enumerate(segments):
        documents, _ = rules.read(ids)
        for document in range(1, documents.max() + 1):
            own = np.flatnonzero(documents == document)
            text = np.zeros_like(tokens)
            text[0, : len(own)] = tokens[row, own]
            read = tiny.read(model, source and [source[row]] * len(segments))
            alone = np.asarray(tiny.apply(model)(variables, text, **read))[0, : len(own)]
            tiny.close(together[row, own], alone)


@each_model("encoder-decoder")
@given(seed=tiny.seeds)
def test_a_ragged_batch_is_each_row_alone(name, seed):
    """Prompts and sources of different lengths generate the same texts as each prompt alone.

    Tokens and log probabilities agree, and each token is the argmax of a pass over its prefix.
    """
    model, greedy = tiny.build(**MODELS[name]), jf.Sampler(temperature=0.0)
    source, how = tiny.sources(model, seed, 3), {"max_new_tokens": NEW, "sampler": greedy}
    variables, rng = tiny.weights(model, seed), np.random.default_rng(seed)
    prompts = [tiny.tokens(seed + i, n).tolist() for i, n in enumerate(rng.integers(1, 9, 3))]
    together = jf.generate(model, variables, prompts, source=source, **how)
    for row, prompt in enumerate(prompts):
        times = 1 if name == "decoder" else 3  # repeated for one batch shape, so one program
        own = source and [source[row]]
        again = source and own * times
        alone = jf.generate(model, variables, [prompt] * times, source=again, **how)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        tiny.close(together.log_probs[row], alone.log_probs[0])
        text = np.zeros((1, model.config.max_length), np.int32)
        text[0, : len(prompt) + NEW] = [*prompt, *together.tokens[row]]
        logits = np.asarray(tiny.apply(model)(variables, text, **tiny.read(model, own)))[0]
        from_here = logits[len(prompt) - 1 : len(prompt) + NEW - 1]
        np.testing.assert_array_equal(from_here.argmax(axis=-1), together.tokens[row])


@cache
def step(model):
    return jax.jit(lambda variables, token, cache: jf.advance(model, variables, token, cache))


@each_model("encoder-decoder")
@given(seed=tiny.seeds)
def test_score_is_the_sum_of_stepwise_log_probabilities(name, seed):
    """log P(x₁ … x_m) = Σ log P(x_i | x_<i), with stepwise logits and x₁ as the condition."""
    model = tiny.build(**MODELS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    source, total = tiny.sources(model, seed, BATCH), np.zeros(BATCH)
    cache = jf.start(model, variables, BATCH, tiny.LENGTH, source)
    for t in range(tiny.LENGTH - 1):
        logits, cache = step(model)(variables, tokens[:, t : t + 1], cache)
        log_probs = np.asarray(jax.nn.log_softmax(logits[:, 0]), np.float64)
        total += log_probs[np.arange(BATCH), tokens[:, t + 1]]
    tiny.close(jf.score(model, variables, tokens, source=source), total, 2e-5)


@each_model("lstm", "dilated cnn")
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_nan_in_padding_reaches_nothing(name, seed, segments):
    """Logits and gradients are unchanged and finite; gradients for padding are 0."""
    model, segments = tiny.build(**MODELS[name]), jnp.asarray(segments)
    variables, clean = tiny.weights(model, seed), tiny.embeddings(seed, *segments.shape, 8)
    x = jnp.where((segments != 0)[..., None], clean, jnp.nan)
    read = tiny.read(model, tiny.sources(model, seed, BATCH))
    found, wanted = (
        tiny.loss_and_gradients(model)(variables, x, segments, **read) for x in (x, clean)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), found))
    assert not np.asarray(found[1][1])[np.asarray(segments) == 0].any()
