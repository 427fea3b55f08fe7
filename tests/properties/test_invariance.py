"""Packing, batching, padding and the execution settings do not change the results."""

from functools import cache
from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxformer.verify import rules
from tests.properties import oracle, tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

BATCH = 2
CONFIGS = {
    "gpt2": {},
    "llama": {
        "positions": "rotary",
        "norm": "rms",
        "activation": "swiglu",
        "use_bias": False,
        "tie_embeddings": False,
        "window": (3, None),
        "rotary_base": (50.0, None),
        "attention_cap": 3.0,
        "query_key_norm": "head",
    },
    "prefix": {"prefix": 3, "positions": "sinusoidal", "activation": "geglu", "head_bias": True},
    "post-norm": {
        "norm_position": "post",
        "activation": "relu",
        "scale_embeddings": True,
        "attention_scale": 0.3,
        "norm_epsilon": 0.1,
    },
    "gemma2": {
        "norm_position": "both",
        "norm": "rms_one_plus",
        "activation": "geglu_tanh",
        "positions": "rotary",
        "query_key_norm": "head",
    },
    "olmo2": {
        "norm_position": "output",
        "norm": "rms",
        "positions": "rotary",
        "query_key_norm": "all",
    },
    "no statistics": {"norm": "dynamic_tanh", "norm_position": "both", "query_key_norm": "head"},
    "neox": {"parallel": "two_norms", "positions": "rotary", "rotary_fraction": 0.5},
    "gpt-j": {"parallel": "one_norm", "positions": "rotary", "rotary_interleaved": True},
    "t5": {
        "positions": "relative",
        "relative_buckets": 4,
        "relative_distance": 5,
        "attention_scale": 1.0,
        "output_scale": 0.3,
        "norm": "rms",
    },
    "alibi": {"positions": "alibi", "num_kv_heads": 1, "attention_cap": 0.5, "logits_cap": 0.4},
    "pattern": {
        "num_layers": 5,
        "positions": "rotary",
        "window": (2, None),
        "rotary_base": (50.0, 7.0),
    },
    "marian": {"positions": "sinusoidal_halves", "norm_position": "post"},
    **{name: MODELS[name] for name in ("mixed experts", "gated delta")},
    "bare": {
        "residual": False,
        "norm": "none",
        "output_activation": True,
        "activation": "gelu",
        "num_kv_heads": 1,
        "positions": "none",
        "tie_embeddings": False,
        "head_bias": True,
    },
}


QUICK = ("gpt2", "mixed experts", "gated delta", "llama", "prefix", "post-norm", "bare", "t5")


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, *QUICK))
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_the_model_is_its_formula(name, seed, segments):
    """Logits equal the oracle's float64 loops, with packed documents and padding anywhere."""
    model = tiny.build(**CONFIGS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segments.shape)
    logits = tiny.apply(model)(variables, tokens, segments)
    for row, ids in enumerate(segments):
        formula = oracle.decoder(variables["params"], tokens[row], ids, model.config)
        tiny.close(logits[row], formula, 2e-5, where=ids != 0)


@pytest.mark.parametrize("name", mostly_slow(["llama", "prefix"], "prefix"))
@given(seed=tiny.seeds, segments=tiny.segment_rows(length=6))
def test_a_document_gives_what_it_gives_alone(name, seed, segments):
    """A document in a packed, padded sequence has the logits of the document alone.

    Padding may be on the left, on the right or inside.
    """
    model, segments = tiny.build(**CONFIGS[name]), np.array(segments)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, len(segments))
    together = np.asarray(tiny.apply(model)(variables, tokens, segments[None]))
    documents, _ = rules.read(segments)
    for document in range(1, documents.max() + 1):
        own = np.flatnonzero(documents == document)
        alone = tiny.apply(model)(variables, tokens[:, own])
        tiny.close(together[:, own], alone)


PLAIN = {"attention": "explicit", "layers": "unrolled", "remat": "none"}
EXECUTIONS = [
    {"attention": "explicit", "layers": "scan", "remat": "full"},
    {"attention": "blockwise", "layers": "scan", "remat": "dots"},
    {"attention": "blockwise", "layers": "unrolled", "remat": "full"},
]


@pytest.mark.parametrize("execution", [PLAIN, EXECUTIONS[1]], ids=["explicit", "blockwise"])
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_padding_reaches_nothing(execution, seed, segments):
    """NaN in padding leaves loss and gradients unchanged; gradients for padding are 0."""
    model = tiny.build(**CONFIGS["llama"], **execution)
    variables, segments = tiny.weights(model, seed), jnp.asarray(segments)
    clean = tiny.embeddings(seed, *segments.shape, model.config.embed_dim)
    x = jnp.where((segments != 0)[..., None], clean, jnp.nan)
    loss, gradients = tiny.loss_and_gradients(model)(variables, x, segments)
    expected, expected_gradients = tiny.loss_and_gradients(model)(variables, clean, segments)
    assert loss == expected
    jax.tree.map(np.testing.assert_array_equal, gradients, expected_gradients)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), gradients))
    assert not np.asarray(gradients[1])[np.asarray(segments) == 0].any()


@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_embeddings_stand_where_tokens_do(seed, segments):
    """Rows of the embedding table give the logits of their ids, scaling included."""
    model = tiny.build(**CONFIGS["post-norm"])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segments.shape)
    rows = variables["params"]["embedding"]["tokens"][tokens]
    by_id, by_row = (tiny.apply(model)(variables, x, segments) for x in (tokens, rows))
    tiny.close(by_row, by_id, where=segments != 0)


@cache
def row_by_row(model):
    def run(variables, tokens, segments):
        def one(tokens, segments):
            return model.apply(variables, tokens[None], segments[None])[0]

        return jax.vmap(one)(tokens, segments)

    return jax.jit(run)


@pytest.mark.slow
@given(seed=tiny.seeds, segments=tiny.segment_batches(3))
def test_vmap_over_rows_is_the_batch(seed, segments):
    """vmap over single batch elements gives the logits of the batch."""
    model = tiny.build(**CONFIGS["llama"])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segments.shape)
    batched = tiny.apply(model)(variables, tokens, segments)
    tiny.close(row_by_row(model)(variables, tokens, segments), batched, where=segments != 0)


@pytest.mark.parametrize(
    "name, execution",
    mostly_slow(product(("llama", "pattern"), EXECUTIONS), ("llama", EXECUTIONS[1])),
    ids=lambda given: given if isinstance(given, str) else "-".join(given.values()),
)
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_how_a_model_runs_changes_nothing(name, execution, seed, segments):
    """All executions share parameters, loss and gradients with the plain one.

    They scan or unroll layers, rematerialize or not, and use blockwise or explicit attention.
    """
    plain, other = (tiny.build(**CONFIGS[name], **options) for options in (PLAIN, execution))
    chex.assert_trees_all_equal_shapes_and_dtypes(tiny.shapes(plain), tiny.shapes(other))
    variables, segments = tiny.weights(plain, seed), jnp.asarray(segments)
    x = tiny.embeddings(seed, *segments.shape, plain.config.embed_dim)
    expected, actual = (
        tiny.loss_and_gradients(model)(variables, x, segments) for model in (plain, other)
    )
    tiny.all_close(actual, expected, 3e-5)


class CompiledOrNot(chex.TestCase):
    """Compares the compiled and the uncompiled model with the oracle."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_with_and_without_jit_the_model_is_the_formula(self):
        self.check("llama", "scan")

    @chex.variants(with_jit=True, without_jit=True)
    @pytest.mark.slow
    def test_the_same_with_a_prefix(self):
        self.check("prefix", "unrolled")

    def check(self, name, layers):
        model = tiny.build(layers=layers, **{**CONFIGS[name], "num_layers": 1})
        variables = tiny.weights(model, 7)
        tokens = jnp.asarray(tiny.tokens(7, 1, tiny.LENGTH))
        segments = np.array([1, 1, 1, 0, 1, 1, 2, 2, 2, 0, 0, 3])
        run = self.variant(lambda *arguments: model.apply(*arguments))
        logits = run(variables, tokens, jnp.asarray(segments)[None])
        formula = oracle.decoder(variables["params"], tokens[0], segments, model.config)
        tiny.close(logits[0], formula, where=segments != 0)
