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
        "attention_softcap": 3.0,
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
        "norm_position": "sandwich",
        "norm": "rms_one_plus",
        "activation": "geglu_tanh",
        "positions": "rotary",
        "query_key_norm": "head",
    },
    "olmo2": {
        "norm_position": "post_sublayer",
        "norm": "rms",
        "positions": "rotary",
        "query_key_norm": "all",
    },
    "no statistics": {
        "norm": "dynamic_tanh",
        "norm_position": "sandwich",
        "query_key_norm": "head",
    },
    "neox": {"parallel_block": "separate_norms", "positions": "rotary", "rotary_fraction": 0.5},
    "gpt-j": {"parallel_block": "shared_norm", "positions": "rotary", "rotary_interleaved": True},
    "t5": {
        "positions": "relative",
        "relative_buckets": 4,
        "relative_distance": 5,
        "attention_scale": 1.0,
        "output_scale": 0.3,
        "norm": "rms",
    },
    "alibi": {
        "positions": "alibi",
        "num_kv_heads": 1,
        "attention_softcap": 0.5,
        "logits_softcap": 0.4,
    },
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


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        CONFIGS,
        "llama",
        slow=("gated delta", "mixed experts", "gpt2", "prefix", "post-norm", "bare"),
    ),
)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_decoder_logits_equal_float64_reference_loops(name, seed, segment_ids):
    """Logits equal the oracle's float64 loops, with packed documents and padding anywhere."""
    model = tiny.build(**CONFIGS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    logits = tiny.apply(model)(variables, tokens, segment_ids)
    for index, ids in enumerate(segment_ids):
        formula = oracle.decoder(variables["params"], tokens[index], ids, model.config)
        tiny.close(logits[index], formula, 2e-5, where=ids != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "prefix"])
@given(seed=tiny.seeds, segment_ids=tiny.segment_sequences(length=6))
def test_packed_document_has_the_logits_of_the_document_alone(name, seed, segment_ids):
    """A document in a packed, padded sequence has the logits of the document alone.

    Padding may be on the left, on the right or inside.
    """
    model, segment_ids = tiny.build(**CONFIGS[name]), np.array(segment_ids)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, len(segment_ids))
    together = np.asarray(tiny.apply(model)(variables, tokens, segment_ids[None]))
    documents, _ = rules.read(segment_ids)
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


@pytest.mark.parametrize(
    "execution", mostly_slow([PLAIN, EXECUTIONS[1]], EXECUTIONS[1]), ids=["explicit", "blockwise"]
)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_nan_in_padding_changes_neither_loss_nor_gradients(execution, seed, segment_ids):
    """NaN in padding leaves loss and gradients unchanged; gradients for padding are 0."""
    model = tiny.build(**CONFIGS["llama"], **execution)
    variables, segment_ids = tiny.weights(model, seed), jnp.asarray(segment_ids)
    clean = tiny.embeddings(seed, *segment_ids.shape, model.config.embed_dim)
    x = jnp.where((segment_ids != 0)[..., None], clean, jnp.nan)
    loss, gradients = tiny.loss_and_gradients(model)(variables, x, segment_ids)
    expected, expected_gradients = tiny.loss_and_gradients(model)(variables, clean, segment_ids)
    assert loss == expected
    jax.tree.map(np.testing.assert_array_equal, gradients, expected_gradients)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), gradients))
    assert not np.asarray(gradients[1])[np.asarray(segment_ids) == 0].any()


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_embedding_rows_as_inputs_give_the_logits_of_their_tokens(seed, segment_ids):
    """Rows of the embedding table give the logits of their ids, scaling included."""
    model = tiny.build(**CONFIGS["post-norm"])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    vectors = variables["params"]["embedding"]["tokens"][tokens]
    by_id, by_vector = (tiny.apply(model)(variables, x, segment_ids) for x in (tokens, vectors))
    tiny.close(by_vector, by_id, where=segment_ids != 0)


@cache
def sequence_by_sequence(model):
    def run(variables, tokens, segment_ids):
        def one(tokens, segment_ids):
            return model.apply(variables, tokens[None], segment_ids[None])[0]

        return jax.vmap(one)(tokens, segment_ids)

    return jax.jit(run)


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(3))
def test_vmap_over_batch_elements_gives_the_logits_of_the_batch(seed, segment_ids):
    """vmap over single batch elements gives the logits of the batch."""
    model = tiny.build(**CONFIGS["llama"])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    batched = tiny.apply(model)(variables, tokens, segment_ids)
    tiny.close(
        sequence_by_sequence(model)(variables, tokens, segment_ids), batched, where=segment_ids != 0
    )


@pytest.mark.parametrize(
    "name, execution",
    mostly_slow(product(("llama", "pattern"), EXECUTIONS), slow=[("llama", EXECUTIONS[1])]),
    ids=lambda given: given if isinstance(given, str) else "-".join(given.values()),
)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_execution_options_do_not_change_loss_and_gradients(name, execution, seed, segment_ids):
    """All executions share parameters, loss and gradients with the plain one.

    They scan or unroll layers, rematerialize or not, and use blockwise or explicit attention.
    """
    plain, other = (tiny.build(**CONFIGS[name], **options) for options in (PLAIN, execution))
    chex.assert_trees_all_equal_shapes_and_dtypes(tiny.shapes(plain), tiny.shapes(other))
    variables, segment_ids = tiny.weights(plain, seed), jnp.asarray(segment_ids)
    x = tiny.embeddings(seed, *segment_ids.shape, plain.config.embed_dim)
    expected, actual = (
        tiny.loss_and_gradients(model)(variables, x, segment_ids) for model in (plain, other)
    )
    tiny.all_close(actual, expected, 3e-5)


@pytest.mark.slow
class CompiledOrNot(chex.TestCase):
    """Compares the compiled and the uncompiled model with the oracle."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_logits_equal_reference_loops_with_and_without_jit(self):
        self.check("llama", "scan")

    @chex.variants(with_jit=True, without_jit=True)
    def test_prefix_model_equals_reference_loops_with_packing_and_padding(self):
        self.check("prefix", "unrolled")

    def check(self, name, layers):
        model = tiny.build(layers=layers, **{**CONFIGS[name], "num_layers": 1})
        variables = tiny.weights(model, 7)
        tokens = jnp.asarray(tiny.tokens(7, 1, tiny.LENGTH))
        segment_ids = np.array([1, 1, 1, 0, 1, 1, 2, 2, 2, 0, 0, 3])
        run = self.variant(lambda *arguments: model.apply(*arguments))
        logits = run(variables, tokens, jnp.asarray(segment_ids)[None])
        formula = oracle.decoder(variables["params"], tokens[0], segment_ids, model.config)
        tiny.close(logits[0], formula, where=segment_ids != 0)
