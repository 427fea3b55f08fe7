"""Properties of all autoregressive models, tested on one model of each class."""

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
from tests.properties.models import MODELS, centred, each_model
from tests.properties.witness import changed, exactly, jacobian, within

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
BATCH, NEW = 2, 6
each_kind = each_model("llama", "encoder-decoder")
# properties/test_dependency and test_invariance test the same properties of the decoder.
each_other_kind = each_model("lstm")


@each_other_kind
@tiny.many
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_jacobian_is_nonzero_exactly_where_output_may_depend_on_input(name, seed, segment_ids):
    """∂ output i / ∂ input j ≠ 0 exactly where a dependency path leads from j to i."""
    model = tiny.build(**MODELS[name])
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    read = tiny.read(model, tiny.sources(model, seed, BATCH))
    found = jacobian(model)(tiny.weights(model, seed), x, jnp.asarray(segment_ids), None, **read)
    exactly(found, rules.model_rule(model.config, segment_ids))


@each_model("lstm")
@tiny.many
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_changed_input_leaves_independent_outputs_bitwise_equal(name, seed, segment_ids):
    """Outputs that do not depend on the changed input stay bitwise equal."""
    model = tiny.build(**MODELS[name])
    config = model.config
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, config.embed_dim)
    other = tiny.embeddings(seed + 1, config.embed_dim)
    read = tiny.read(model, tiny.sources(model, seed, BATCH))
    found = changed(model)(tiny.weights(model, seed), x, jnp.asarray(segment_ids), other, **read)
    within(found, rules.model_rule(config, segment_ids)[:, :, 0])


@pytest.mark.slow
@tiny.many
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_centred_convolution_is_not_causal(seed, segment_ids):
    """A centred convolution depends on later tokens, as its rule says, and cannot generate."""
    model = centred()
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    variables = tiny.weights(model, seed)
    found = np.asarray(jacobian(model)(variables, x, jnp.asarray(segment_ids), None))
    exactly(found, rules.model_rule(model.config, segment_ids, layers=model.layers))
    for index, ids in enumerate(segment_ids):
        together = np.flatnonzero(np.diff(rules.read(ids)[0][ids != 0]) == 0)
        assert len(together) == 0 or np.triu(found[index, :, index], 1).any()
    for call in (
        lambda: jf.generate(model, variables, [[1]], max_new_tokens=1, key=jax.random.key(0)),
        lambda: jf.init_cache(model, variables, 1, 4),
        lambda: jf.score(model, variables, np.ones((1, 3), np.int32)),
        lambda: jf.pack_weights(model, variables),
    ):
        with pytest.raises(
            ValueError, match=r"not autoregressive .*0 attends to the later position 1"
        ):
            call()


@each_model("llama")
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH), chunks=cuts())
def test_logits_of_cached_chunks_equal_single_pass(name, seed, segment_ids, chunks):
    """Prefill, chunks and single steps give the logits of one pass.

    The cases are packed weights with random documents and padding, and unpacked weights without
    segment_ids.
    """
    model = tiny.build(**MODELS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    source = tiny.sources(model, seed, BATCH)
    read = tiny.read(model, source)
    whole = tiny.apply(model)(variables, tokens, segment_ids, **read)
    ready = jf.pack_weights(model, variables)
    logits, _ = chunked(model, ready, tokens, chunks, segment_ids, source=source)
    # The gated delta rule inverts a matrix, which enlarges rounding errors.
    tolerance = 3e-5 if name == "gated delta" else 1e-5
    tiny.close(logits, whole, tolerance, where=segment_ids != 0)
    plain, _ = chunked(model, variables, tokens, chunks, source=source)
    tiny.close(plain, tiny.apply(model)(variables, tokens, **read), tolerance)


@pytest.mark.slow
@each_kind
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_packed_document_has_the_logits_of_a_separate_document(name, seed, segment_ids):
    """A document inside a packed, padded batch has the logits of the document alone.

    The document alone is at the start of its sequence, where later tokens have no effect.
    """
    model = tiny.build(**MODELS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    source = tiny.sources(model, seed, len(segment_ids))
    together = tiny.apply(model)(variables, tokens, segment_ids, **tiny.read(model, source))
    together = np.asarray(together)
    for index, ids in enumerate(segment_ids):
        documents, _ = rules.read(ids)
        for document in range(1, documents.max() + 1):
            own = np.flatnonzero(documents == document)
            text = np.zeros_like(tokens)
            text[0, : len(own)] = tokens[index, own]
            read = tiny.read(model, source and [source[index]] * len(segment_ids))
            alone = np.asarray(tiny.apply(model)(variables, text, **read))[0, : len(own)]
            tiny.close(together[index, own], alone)


@pytest.mark.slow
@each_model("encoder-decoder")
@given(seed=tiny.seeds)
def test_prompts_of_different_lengths_generate_the_same_text_as_each_alone(name, seed):
    """Prompts and sources of different lengths generate the same texts as each prompt alone.

    Tokens and log probabilities agree, and each token is the argmax of a forward pass over the
    preceding tokens.
    """
    model, greedy = tiny.build(**MODELS[name]), jf.Sampler(temperature=0.0)
    source, how = tiny.sources(model, seed, 3), {"max_new_tokens": NEW, "sampler": greedy}
    variables, rng = tiny.weights(model, seed), np.random.default_rng(seed)
    prompts = [tiny.tokens(seed + i, n).tolist() for i, n in enumerate(rng.integers(1, 9, 3))]
    together = jf.generate(model, variables, prompts, source=source, **how)
    for index, prompt in enumerate(prompts):
        times = 1 if name == "decoder" else 3  # repeated for one batch shape, so one program
        own = source and [source[index]]
        again = source and own * times
        alone = jf.generate(model, variables, [prompt] * times, source=again, **how)
        np.testing.assert_array_equal(together.tokens[index], alone.tokens[0])
        tiny.close(together.log_probs[index], alone.log_probs[0])
        text = np.zeros((1, model.config.max_length), np.int32)
        text[0, : len(prompt) + NEW] = [*prompt, *together.tokens[index]]
        logits = np.asarray(tiny.apply(model)(variables, text, **tiny.read(model, own)))[0]
        from_here = logits[len(prompt) - 1 : len(prompt) + NEW - 1]
        np.testing.assert_array_equal(from_here.argmax(axis=-1), together.tokens[index])


@cache
def step(model):
    return jax.jit(lambda variables, token, cache: jf.extend(model, variables, token, cache))


@pytest.mark.slow
@each_model("encoder-decoder")
@given(seed=tiny.seeds)
def test_score_is_sum_of_stepwise_log_probabilities(name, seed):
    """log P(x₁ … x_m) = Σ log P(x_i | x_<i), with stepwise logits and x₁ as the condition."""
    model = tiny.build(**MODELS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    source, total = tiny.sources(model, seed, BATCH), np.zeros(BATCH)
    cache = jf.init_cache(model, variables, BATCH, tiny.LENGTH, source)
    for t in range(tiny.LENGTH - 1):
        logits, cache = step(model)(variables, tokens[:, t : t + 1], cache)
        log_probs = np.asarray(jax.nn.log_softmax(logits[:, 0]), np.float64)
        total += log_probs[np.arange(BATCH), tokens[:, t + 1]]
    tiny.close(jf.score(model, variables, tokens, source=source), total, 2e-5)


@each_model("lstm", "dilated cnn")
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_nan_in_padding_changes_neither_logits_nor_gradients(name, seed, segment_ids):
    """NaN in padding leaves logits and gradients unchanged and finite; padding has gradient 0."""
    model, segment_ids = tiny.build(**MODELS[name]), jnp.asarray(segment_ids)
    variables, clean = tiny.weights(model, seed), tiny.embeddings(seed, *segment_ids.shape, 8)
    x = jnp.where((segment_ids != 0)[..., None], clean, jnp.nan)
    read = tiny.read(model, tiny.sources(model, seed, BATCH))
    found, wanted = (
        tiny.loss_and_gradients(model)(variables, x, segment_ids, **read) for x in (x, clean)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), found))
    assert not np.asarray(found[1][1])[np.asarray(segment_ids) == 0].any()
