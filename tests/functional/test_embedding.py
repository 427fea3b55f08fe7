"""Embeddings: tokens are one-hot features, and both share positions, norm, scale and dropout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional.embedding import Embedding, FeatureVectors, TokenVectors
from jaxformer.functional.hooks import HookPoints
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.norms import LayerNorm, RMSNorm
from jaxformer.functional.position_vectors import LearnedPositions, SinusoidalPositions

VOCAB, DIM, LENGTH = 5, 4, 6
embeddings = st.builds(
    Embedding,
    vectors=st.just(TokenVectors(VOCAB)),
    dim=st.just(DIM),
    max_length=st.just(LENGTH),
    positions=st.sampled_from([None, LearnedPositions(LENGTH, 1), SinusoidalPositions()]),
    num_token_types=st.sampled_from([0, 2]),
    norm=st.sampled_from([None, LayerNorm(1e-5, True), RMSNorm(1e-5)]),
    is_scaled=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    dropout=st.sampled_from([0.0, 0.5]),
)


def run(embedding, tables, inputs):
    weights = {"embedding": tables}
    if embedding.norm is not None:
        weights["embedding_norm"] = embedding.norm.init(DIM)
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    hook = HookPoints()
    return embedding(weights, inputs, positions, jax.random.key(1), hook)


@pytest.mark.slow
@given(embedding=embeddings, seed=st.integers(0, 99), is_padded=st.booleans())
def test_token_embedding_equals_one_hot_features(embedding, seed, is_padded):
    """With the token table as kernel, and without a bias, both give the same vectors."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCAB, (2, LENGTH))
    segment_ids = jnp.asarray(random.integers(0, 2, (2, LENGTH))) if is_padded else None
    tables = dict(embedding.init(jax.random.key(seed)))
    wanted = run(embedding, tables, Inputs(jnp.asarray(ids), segment_ids))
    kernel = tables.pop("tokens")
    tables |= {"kernel": kernel, "bias": jnp.zeros(DIM)}
    features = replace(embedding, vectors=FeatureVectors(VOCAB))
    found = run(features, tables, Inputs(jax.nn.one_hot(ids, VOCAB), segment_ids))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("stddev", [0.02, 0.5])
def test_initial_feature_embeddings_have_the_requested_stddev(stddev):
    embedding = Embedding(FeatureVectors(64), 512, LENGTH, stddev=stddev)
    tables = embedding.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (100, 64)) @ tables["kernel"]
    assert x.std() == pytest.approx(stddev, rel=0.05)
    assert not tables["bias"].any()
