"""A user's script that calls every public function that other projects rely on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf

pytestmark = pytest.mark.slow
TOKENS = jnp.array([[1, 2, 3, 4, 5, 6, 7, 8], [3, 1, 4, 1, 5, 9, 2, 6]], jnp.int32)
SEGMENT_IDS = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)
SIZES = {"vocab_size": 300, "max_length": 24, "num_layers": 2, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(scope="module")
def decoder():
    model = jf.Decoder(jf.DecoderConfig(**SIZES, dropout=0.1))
    return model, model.init(jax.random.key(0), TOKENS)


@pytest.fixture(scope="module")
def translator():
    model = jf.build(jf.EncoderDecoderConfig(**SIZES))
    return model, model.init(jax.random.key(0), TOKENS, source=TOKENS)


def test_a_model_is_built_initialized_and_applied(decoder):
    model, variables = decoder
    assert isinstance(jf.build(jf.preset("gpt2-124m")), jf.Decoder)
    same = jf.Decoder(
        model.config, execution=jf.Execution(attention="auto", layers="auto", remat="none")
    )
    logits = jax.jit(same.apply)(variables, TOKENS)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 8, 300)
    packed = model.apply(variables, TOKENS, segment_ids=SEGMENT_IDS)
    assert not np.allclose(packed[0], logits[0]) and np.allclose(packed[1], logits[1], atol=1e-5)
    trained = model.apply(variables, TOKENS, rngs={"dropout": jax.random.key(1)})
    assert not np.allclose(trained, logits)
    hidden = model.apply(variables, TOKENS, method="hidden_states")
    assert hidden.shape == (2, 8, 16)
    embeddings = variables["params"]["embedding"]["tokens"][TOKENS]
    np.testing.assert_allclose(model.apply(variables, embeddings), logits, atol=1e-5)
    inspected, captured = model.apply(
        variables, TOKENS, capture=("attention.weights",), patch={}, method="inspect"
    )
    np.testing.assert_allclose(inspected, logits, atol=1e-5)
    np.testing.assert_allclose(captured["attention.weights"].sum(axis=-1), 1, atol=1e-5)


def test_key_value_cache_can_be_created_extended_and_inspected(decoder):
    model, variables = decoder
    logits = model.apply(variables, TOKENS)
    cache = jf.init_cache(model, variables, 2, 16)
    first, cache = jf.extend(model, variables, TOKENS[:, :5], cache)
    seen = jf.inspect(
        model, variables, TOKENS[:, 5:], cache=cache, capture=("block.output",), patch={}
    )
    np.testing.assert_allclose(jnp.concatenate([first, seen.logits], 1), logits, atol=1e-5)
    assert seen.captured["block.output"].shape == (2, 2, 3, 16) and seen.cache is not None
    plain = jf.inspect(model, variables, TOKENS, segment_ids=SEGMENT_IDS)
    assert plain.cache is None
    packed = jf.pack_weights(model, variables)
    again, _ = jf.extend(
        model, packed, TOKENS, jf.init_cache(model, packed, 2, 16), segment_ids=SEGMENT_IDS
    )
    np.testing.assert_allclose(again[0, :7], plain.logits[0, :7], atol=1e-5)


def test_decoding_functions_accept_their_documented_arguments(decoder, translator):
    model, variables = decoder
    counted = []
    out = jf.generate(
        model,
        variables,
        [[1, 2, 3], [4, 5]],
        max_new_tokens=6,
        sampler=jf.Sampler(temperature=0.8, top_k=50, top_p=0.95, min_p=0.0),
        key=jax.random.key(2),
        stop_tokens=(0,),
        source=None,
        on_tokens=counted.append,
        capture=("block.output",),
        patch={},
    )
    assert out.tokens.shape == out.log_probs.shape == (2, 6) and out.lengths.shape == (2,)
    assert out.captured["block.output"].shape[:3] == (2, 2, 6) and counted
    pairs, weights = translator
    found = jf.beam_search(pairs, weights, [[0], [0]], source=[[1, 2], [3]], max_new_tokens=4)
    assert found.tokens.shape[0] == 2
    assert jf.score(model, variables, TOKENS).shape == (2,)
    read = jf.init_cache(pairs, weights, 2, 8, source=TOKENS)
    logits, _ = jf.extend(pairs, weights, TOKENS, read)
    wanted = pairs.apply(weights, TOKENS, source=TOKENS, source_segment_ids=None)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


def test_a_model_is_saved_loaded_and_exported(decoder, tmp_path):
    model, variables = decoder
    jf.save(tmp_path / "folder", model, variables, tokenizer=None)
    checkpoint = jf.load(tmp_path / "folder")
    assert checkpoint.model == model and checkpoint.tokenizer is None
    jf.export(tmp_path / "theirs", model, variables, tokenizer=None)
    again = jf.load(tmp_path / "theirs")
    expected = model.apply(variables, TOKENS)
    for loaded in (checkpoint, again):
        np.testing.assert_allclose(
            loaded.model.apply(loaded.variables, TOKENS), expected, atol=1e-4
        )


def test_public_functions_and_verify_rules_can_be_imported_and_called():
    from jaxformer.functional import (
        Causal,
        Window,
        cross_entropy,
        dot_product_attention,
        layer_norm,
    )
    from jaxformer.verify import assert_dependencies, dependency_matrix, rules

    x = jnp.linspace(-1, 1, 48).reshape(6, 8)
    rule = rules.causal(np.ones(6, int))
    assert_dependencies(lambda x: dot_product_attention(x, x, x, Causal()), x, rule)
    with pytest.raises(AssertionError, match="missing"):
        assert_dependencies(lambda x: dot_product_attention(x, x, x, Causal() & Window(3)), x, rule)
    assert dependency_matrix(lambda x: layer_norm(x, jnp.ones(8)), x) is not None
    assert cross_entropy(x, jnp.zeros(6, jnp.int32)) > 0
