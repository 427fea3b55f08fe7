"""The encoder: bidirectional attention within each document, and masking of tokens for training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from jaxformer.functional.losses.token_masking import mask_tokens
from jaxformer.verify import rules
from tests.properties import oracle, tiny
from tests.properties.witness import exactly, jacobian
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
BATCH = 2
MODELS = {
    "bert": {
        "norm_position": "post",
        "embedding_norm": True,
        "activation": "gelu",
        "num_token_types": 2,
        "position_offset": 2,
    },
    "pre-norm": {
        "positions": "rotary",
        "norm": "rms",
        "activation": "swiglu",
        "tie_embeddings": False,
        "window": (2, None),
        "first_attention_norm": False,
    },
}
each_model = pytest.mark.parametrize("name", mostly_slow(MODELS, "bert"))


def build(name):
    return tiny.build(kind=jf.EncoderConfig, **MODELS[name])


@pytest.mark.slow
@each_model
@tiny.many
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_encoder_output_depends_on_its_whole_document(name, seed, segment_ids):
    """∂ output i / ∂ input j ≠ 0 exactly where i and j are tokens of the same document."""
    model = build(name)
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    found = jacobian(model)(tiny.weights(model, seed), x, jnp.asarray(segment_ids), None)
    exactly(found, rules.model_rule(model.config, segment_ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_packed_document_has_the_encoder_outputs_of_the_document_alone(name, seed, segment_ids):
    """A packed or padded document gives the same vectors and logits as the document alone."""
    model = build(name)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    together = both(model)(variables, tokens, segment_ids)
    for index, ids in enumerate(segment_ids):
        documents, _ = rules.read(ids)
        for document in range(1, documents.max() + 1):
            own = np.flatnonzero(documents == document)
            text, real = np.zeros((2, *tokens.shape), np.int32)
            text[0, : len(own)], real[0, : len(own)] = tokens[index, own], 1
            alone = both(model)(variables, text, real)
            for some, other in zip(together, alone, strict=True):
                tiny.close(some[index, own], other[0, : len(own)])


@pytest.mark.parametrize("name", mostly_slow(MODELS, "pre-norm"))
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_encoder_outputs_equal_float64_reference_loops(name, seed, segment_ids):
    """Vectors and logits equal the oracle's float64 loops, with two token types for "bert"."""
    model = build(name)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    types = None
    if model.config.num_token_types:
        types = np.random.default_rng(seed).integers(0, 2, segment_ids.shape)
    found = both(model)(variables, tokens, segment_ids, types)
    for index, ids in enumerate(segment_ids):
        own = None if types is None else types[index]
        formula = oracle.encoder(variables["params"], tokens[index], ids, model.config, own)
        for some, other in zip(found, formula, strict=True):
            tiny.close(some[index], other, 2e-5, where=ids != 0)


def test_encoder_rejects_invalid_token_type_ids():
    """Out-of-range types, a wrong shape, and types for a model that has none."""
    model = build("bert")
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 4)
    for types, said in (
        ([[0, 1, 2, 0]], "num_token_types is 2"),
        ([[0, 1]], "token_type_ids have"),
    ):
        with pytest.raises(ValueError, match=said):
            model.apply(variables, tokens, token_type_ids=types)
    plain = build("pre-norm")
    with pytest.raises(ValueError, match="num_token_types of this model is 0"):
        plain.apply(tiny.weights(plain, 0), tokens, token_type_ids=[[0, 0, 0, 0]])


@tiny.cache
def both(model):
    def run(variables, tokens, segment_ids, types=None):
        vectors = model.apply(variables, tokens, segment_ids, types, method="encode")
        return vectors, model.apply(variables, tokens, segment_ids, types)

    return jax.jit(run)


@pytest.mark.slow
@each_model
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_nan_in_padding_changes_neither_encoder_loss_nor_gradients(name, seed, segment_ids):
    model, segment_ids = build(name), jnp.asarray(segment_ids)
    variables, clean = tiny.weights(model, seed), tiny.embeddings(seed, *segment_ids.shape, 8)
    x = jnp.where((segment_ids != 0)[..., None], clean, jnp.nan)
    found, wanted = (tiny.loss_and_gradients(model)(variables, x, segment_ids) for x in (x, clean))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), found))


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH, ids=(1,)))
def test_pooler_output_is_computed_from_the_first_token(seed, segment_ids):
    """tanh(W h + b) of the first vector that is not padding; without segment_ids, of vector 0."""
    model = build("bert")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    vectors, _ = both(model)(variables, tokens, segment_ids)
    pooled = pool(model)(variables, tokens, segment_ids)
    weights = oracle.float64(variables["params"]["pooler"])
    for index, ids in enumerate(segment_ids):
        first = np.argmax(ids != 0)
        tiny.close(
            pooled[index], np.tanh(oracle.linear(weights, np.float64(vectors[index, first])))
        )
    whole = pool(model)(variables, tokens, None)
    tiny.close(pool(model)(variables, tokens, np.ones_like(segment_ids)), whole)


@tiny.cache
def pool(model):
    return jax.jit(lambda *given: model.apply(*given, method="pooled"))


@pytest.mark.slow
def test_training_tokens_are_masked_with_the_frequencies_of_bert():
    """15% of the tokens are chosen: of these 80% are masked, 10% random and 10% unchanged.

    Padding and special tokens are never chosen and never drawn. Counts agree within 5 σ.
    """
    number, rate, vocab_size, mask, special = 100_000, 0.15, 50, 49, (0, 3, 4, 48)
    segment_ids = (jnp.arange(number) % 2) * 3
    tokens = jnp.where(jnp.arange(number) % 10 == 1, 3, 7)  # a tenth is special
    inputs, weights = mask_tokens(
        jax.random.key(0),
        tokens,
        mask,
        vocab_size,
        rate=rate,
        segment_ids=segment_ids,
        special=special,
    )
    inputs, weights, segment_ids = (np.asarray(x) for x in (inputs, weights, segment_ids))
    assert not weights[segment_ids == 0].any() and set(np.unique(weights)) == {0.0, 1.0}
    assert not weights[tokens == 3].any()
    np.testing.assert_array_equal(inputs[weights == 0], tokens[weights == 0])
    chosen = inputs[weights == 1]
    for found, expected, among in (
        (len(chosen), rate, number * 0.4),
        ((chosen == mask).sum(), 0.8, len(chosen)),
        ((chosen == 7).sum(), 0.1 + 0.1 / (vocab_size - 5), len(chosen)),
    ):
        assert abs(found - expected * among) <= 5 * np.sqrt(among * expected * (1 - expected))
    assert set(np.unique(chosen)) == set(range(vocab_size)) - set(special)
    everything = {"vocab_size": vocab_size, "special": range(vocab_size)}
    with pytest.raises(ValueError, match="special has all 50 ids"):
        mask_tokens(jax.random.key(0), tokens, mask, **everything)
    for name, change in (("rate", {"rate": 0.0}), ("mask_token", {"mask_token": 50})):
        options = {"mask_token": mask, "rate": rate, **change}
        with pytest.raises(ValueError, match=f"{name} is {change[name]}"):
            mask_tokens(jax.random.key(0), tokens, vocab_size=vocab_size, **options)
