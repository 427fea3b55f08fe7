"""Tiny models, whose examples run in milliseconds, and random inputs for them.

Each function compiles once per model and is cached: hypothesis draws values (weights, tokens,
segment_ids) but never shapes.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.models.parameters import init

LENGTH = 12
SIZES = {
    "vocab_size": 13,
    "max_length": 16,
    "num_layers": 2,
    "embed_dim": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "mlp_dim": 12,
}
EXECUTION = ("attention", "layers", "remat")


@cache
def build(kind=jf.DecoderConfig, **options):
    """Builds a tiny model from fields of its config, fields of `Execution`, and `mask`."""
    execution = {name: options.pop(name) for name in EXECUTION if name in options}
    own = {name: options.pop(name) for name in ("mask",) if name in options}
    sizes = {name: size for name, size in SIZES.items() if name in kind.__dataclass_fields__}
    return jf.build(kind(**{**sizes, **options}).resolved, jf.Execution(**execution), **own)


@cache
def shapes(model):
    return jax.eval_shape(lambda key: init(model, key), jax.random.key(0))


def weights(model, seed):
    """Draws variables, biases and scales included, so that every weight affects the output."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name == "scale":
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32)
        deviation = 1 / np.sqrt(leaf.shape[-2]) if name == "kernel" else 0.5
        return jnp.asarray(deviation * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes(model))


@cache
def apply(model):
    """Compiles (variables, tokens, segment_ids, source=…, source_segment_ids=…) → logits."""

    def run(variables, tokens, segment_ids=None, **read):
        return model.apply(variables, tokens, segment_ids, **read)

    return jax.jit(run)


@cache
def loss_and_gradients(model):
    """Compiles (variables, x, segment_ids, …) → (loss, gradients for variables and x).

    The loss depends on all logits except those at padding.
    """

    def loss(variables, x, segment_ids, **read):
        log_probs = jax.nn.log_softmax(model.apply(variables, x, segment_ids, **read))
        products = log_probs * log_probs[..., ::-1]
        return jnp.where((segment_ids != 0)[..., None], products, 0.0).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def sources(model, seed, batch):
    """Draws one source of 1 to 8 positions per batch element; None if the model reads none."""
    if not model.config.reads_source:
        return None
    lengths = np.random.default_rng(seed).integers(1, 9, batch)
    return [source(model, seed + i, n) for i, n in enumerate(lengths)]


def source(model, seed, *shape):
    """Draws a source: ids, or features."""
    if model.config.source_features is not None:
        size = *shape, model.config.source_features
        return np.random.default_rng(seed).normal(size=size).astype(np.float32)
    return tokens(seed, *shape, vocab_size=model.config.source_vocab_size)


def source_vectors(model, seed, *shape):
    """Draws a source of floats: features, or embeddings of ids."""
    return embeddings(seed, *shape, model.config.source_features or model.config.embed_dim)


def read(model, sources):
    """Returns the keyword arguments of `apply` for these sources."""
    if sources is None:
        return {}
    read = model.read_source(sources)
    return {"source": read.tokens, "source_segment_ids": read.segment_ids}


def tokens(seed, *shape, vocab_size=SIZES["vocab_size"]):
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def embeddings(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Examples of the dependency property cost milliseconds, so it runs more of them.
many = settings(max_examples=max(40, settings().max_examples))
seeds = st.integers(0, 2**32 - 1)


@st.composite
def segment_sequences(draw, length=LENGTH, ids=(1, 2, 3)):
    """Draws segment ids of one sequence: packed documents with padding around and inside them."""
    # Each id occurs once and fills at most half, so most sequences hold several documents.
    run = st.tuples(st.sampled_from((*ids, 0)), st.integers(1, -(-length // 2)))
    runs = draw(st.lists(run, min_size=1, max_size=4, unique_by=lambda run: run[0]))
    segments = [segment for segment, count in runs for _ in range(count)][:length]
    segments += [draw(st.sampled_from(ids))] * (length - len(segments))
    holes = draw(st.sets(st.integers(0, length - 1), max_size=3))
    return [0 if index in holes else segment for index, segment in enumerate(segments)]


def segment_batches(batch=2, **options):
    return st.lists(segment_sequences(**options), min_size=batch, max_size=batch).map(np.array)


def close(actual, expected, tolerance=1e-5, where=None):
    """Asserts |actual − expected| ≤ tolerance · max(1, max|expected|), where `where` is True.

    The maximum runs over the finite values; infinities must be equal.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    if where is not None:
        actual, expected = actual[where], expected[where]
    if expected.size:
        largest = abs(expected).max(initial=1.0, where=np.isfinite(expected))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * largest)


def all_close(actual, expected, tolerance=1e-5):
    """Applies `close` to each leaf of two trees of the same structure."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, e: close(a, e, tolerance), actual, expected)
