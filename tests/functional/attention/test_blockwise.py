"""Attention over long sequences, computed in a loop over tiles.

It equals the formula, and neither its score arrays nor its program grow with the length.
"""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxformer.functional import Causal, Packed, TokenInfo
from jaxformer.functional import dot_product_attention as attend
from jaxformer.functional.attention import blockwise, long_sequences
from jaxformer.functional.attention.masks import All, DenseMask
from jaxformer.verify import rules
from tests.functional.attention.test_attention import RULES, agree, program_size, random_inputs
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

# Tiles have 5 queries × 4 keys: RAGGED is a multiple of neither, EVEN of both.
LENGTHS = (14, 20)
RAGGED, EVEN = LENGTHS


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Shrinks the tiles so that every sequence counts as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_LARGEST_TILE", 0)
        patch.setattr(long_sequences, "_LOOP_QUERIES", 5)
        patch.setattr(long_sequences, "_LOOP_KEYS", 4)
        yield


@cache
def looped(mask=None):
    """Compiles (query, key, value, cotangent, infos, table) → (output, gradients).

    The mask is `mask`, combined with the table if there is one.
    """

    def run(query, key, value, cotangent, query_info=None, key_info=None, table=None):
        rule = mask if table is None else mask & DenseMask(table)
        told = {"query_info": query_info, "key_info": key_info}
        function = partial(attend, mask=rule, **told, implementation="blockwise")
        output, pull_back = jax.vjp(function, query, key, value)
        return output, pull_back(cotangent)

    return jax.jit(run)


def test_attention_over_long_sequences_loops_over_tiles():
    """Guards the tests below, which are about the loop."""
    inputs = random_inputs(0, 2, length=RAGGED)
    assert "scan" in str(jax.make_jaxpr(looped(Causal()))(*inputs))


@pytest.mark.parametrize(
    "rule, length", mostly_slow(product(RULES, LENGTHS), *product(RULES, (RAGGED,)))
)
@given(seed=tiny.seeds, size=st.sampled_from([0.1, 1.0, 10.0]))
def test_tiled_attention_equals_numpy_reference(rule, length, seed, size):
    """Tiles are skipped while tracing. Scores may saturate. Two query heads share a key head."""
    mask, numbers = RULES[rule]
    inputs = random_inputs(seed, 2, length, size)
    seen = [rules.visible([1] * length, **numbers)] * 2
    agree(looped(mask)(*inputs), inputs, seen, 1e-5 * max(1.0, size**3))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(length=RAGGED))
def test_tiled_attention_of_packed_documents_equals_numpy_reference(rule, seed, segment_ids):
    """Positions and documents are arrays, so the program evaluates the rule tile by tile."""
    mask, numbers = RULES[rule]
    read = [rules.read(ids) for ids in segment_ids]
    documents, positions = (jnp.array(side) for side in zip(*read, strict=True))
    places, inputs = TokenInfo(RAGGED, positions, documents), random_inputs(seed, 2, RAGGED)
    found = looped(mask & Packed())(*inputs, places, places)
    agree(found, inputs, [rules.visible(ids, **numbers) for ids in segment_ids])


@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(length=RAGGED))
def test_padding_is_masked_in_long_sequences(seed, segment_ids):
    """The rule ignores padding; positions are known while tracing, segment ids are not."""
    inputs, places = (
        random_inputs(seed, 2, RAGGED),
        TokenInfo(RAGGED, None, jnp.asarray(segment_ids)),
    )
    inputs[3] *= (segment_ids != 0)[:, None, :, None]
    output, gradients = looped(Causal())(*inputs, places, places)
    tokens = (segment_ids != 0)[:, None, :, None]
    inputs[0] *= tokens  # the output of a padding query is unspecified: compare none
    seen = [np.tri(RAGGED, dtype=bool) & (ids != 0) & (ids != 0)[:, None] for ids in segment_ids]
    agree((output * tokens, gradients), inputs, seen)


@pytest.mark.slow
@given(
    seed=tiny.seeds,
    kv_heads=st.sampled_from([1, 2, 4]),
    table=arrays(bool, (2, RAGGED, RAGGED), elements=st.booleans()),
)
def test_tiled_attention_with_mask_array_equals_numpy_reference(seed, kv_heads, table):
    """Any bool array, alone and with a rule. Some queries and some tiles are fully masked."""
    table[:, ::5], table[:, :9, 5:] = False, False
    inputs = random_inputs(seed, kv_heads, RAGGED)
    agree(looped(All())(*inputs, None, None, table), inputs, table)
    causal = table & np.tri(RAGGED, dtype=bool)
    agree(looped(Causal())(*inputs, None, None, table), inputs, causal)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["causal", "window"])
@given(seed=tiny.seeds, start=st.integers(0, EVEN - 7))
def test_tiled_attention_accepts_queries_at_any_positions(rule, seed, start):
    """Seven queries at positions `start` to `start + 6` attend to twenty cached keys."""
    mask, numbers = RULES[rule]
    query, key, value, cotangent = random_inputs(seed, 2, EVEN)
    inputs = query[:, :, :7], key, value, cotangent[:, :, :7]
    places = TokenInfo(7, start + jnp.arange(7)), TokenInfo(EVEN, jnp.arange(EVEN))
    seen = rules.visible([1] * EVEN, **numbers)[start : start + 7]
    agree(looped(mask)(*inputs, *places), inputs, [seen] * 2)


@given(seed=tiny.seeds)
def test_attention_loop_skips_fully_masked_tiles(seed):
    """Masked tiles are skipped, so NaN in their keys and values cannot spread.

    In a computed tile, 0 × NaN would reach the output of every query of the tile.
    """
    segment_ids = np.repeat([[1] * 8 + [2] * 12], 2, axis=0)
    places = TokenInfo(EVEN, None, jnp.asarray(segment_ids))
    query, key, value, cotangent = random_inputs(seed, 2, EVEN)
    clean = looped(Packed())(query, key, value, cotangent, places, places)
    key, value = (np.where(segment_ids[:, None, :, None] == 2, np.nan, x) for x in (key, value))
    dirty = looped(Packed())(query, key, value, cotangent, places, places)
    # Queries 5 to 9 share a tile with queries of the other document; queries 0 to 4 do not.
    for found, expected in ((dirty[0], clean[0]), (dirty[1][0], clean[1][0])):
        np.testing.assert_array_equal(found[:, :, :5], expected[:, :, :5])
        assert np.isnan(found[:, :, 10:]).all()


@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(length=RAGGED))
def test_nan_in_padding_changes_neither_outputs_nor_gradients(seed, segment_ids):
    """Outputs and gradients are bitwise equal to those without NaN, and finite."""
    run = looped(Causal() & Packed())
    places = TokenInfo(RAGGED, None, jnp.array([rules.read(ids)[0] for ids in segment_ids]))
    *given, cotangent = random_inputs(seed, 2, RAGGED)
    dirty = [np.where((segment_ids == 0)[:, None, :, None], np.nan, x) for x in given]
    expected = run(*given, cotangent, places, places)
    found = run(*dirty, cotangent, places, places)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), expected))


@pytest.mark.slow
def test_blockwise_attention_sums_bfloat16_inputs_in_float32():
    """Summing over many tiles is as exact as one tile over a short sequence."""
    length, dtypes = 200, (jnp.float32, jnp.bfloat16)
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in random_inputs(0, 2, length)]
    exact, found = (looped(Causal())(*(x.astype(dtype) for x in inputs)) for dtype in dtypes)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(found))
    tiny.all_close(found, exact, 0.01)


@pytest.mark.slow
def test_vmap_and_remat_do_not_change_results_of_tiled_attention():
    """Compares a batch with vmap over its elements, two batch axes, and rematerialization."""
    inputs = [jnp.asarray(x) for x in random_inputs(0, 2, RAGGED, batch=4)]
    segment_ids = np.sort(np.random.default_rng(0).integers(1, 4, (4, RAGGED)))
    places = TokenInfo(RAGGED, None, jnp.asarray(segment_ids))
    run = looped(Causal() & Packed())
    batched = run(*inputs, places, places)

    def one(query, key, value, cotangent, ids):
        return run(query, key, value, cotangent, *[TokenInfo(RAGGED, None, ids)] * 2)

    mapped = jax.vmap(one)(*inputs, places.segment_ids)
    two = [x.reshape(2, 2, *x.shape[1:]) for x in (*inputs, places.segment_ids)]
    split = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), one(*two))
    again = jax.checkpoint(run)(*inputs, places, places)
    for other in (mapped, split, again):
        tiny.all_close(other, batched)


def test_mask_array_gets_no_gradient():
    """A mask array passes through jit and grad like any other array and gets no gradient."""
    query, key, value, cotangent = map(jnp.asarray, random_inputs(0, 2, RAGGED))
    table = jnp.asarray(np.tri(RAGGED, dtype=bool))

    @jax.jit
    def loss(query, table):
        output = attend(query, key, value, table, implementation="blockwise")
        return (output * cotangent).sum()

    expected = looped(Causal())(query, key, value, cotangent)[1][0]
    tiny.close(jax.grad(loss)(query, table), expected)


# ---- with the production tile sizes


@pytest.fixture
def real_tiles(monkeypatch):
    monkeypatch.setattr(blockwise, "_SMALLEST_BLOCK", 64)
    monkeypatch.setattr(blockwise, "_LARGEST_TILE", 2**18)
    monkeypatch.setattr(long_sequences, "_LOOP_QUERIES", 256)
    monkeypatch.setattr(long_sequences, "_LOOP_KEYS", 512)


def sizes_of(mask, length, places=None, *, gradients=True):
    """Returns `program_size` for one head of 8 features."""

    def run(query, key, value, places):
        told = {"query_info": places, "key_info": places}
        return attend(query, key, value, mask, **told, implementation="blockwise").sum()

    x = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)
    function = jax.grad(run, argnums=(0, 1, 2)) if gradients else run
    return program_size(function, x, x, x, places)


SHARES = {"causal": (Causal(), 0.54), "window": (RULES["window"][0], 0.04)}


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_slow(RULES, "prefix+window"))
def test_largest_array_of_attention_grows_linearly_with_length(rule, real_tiles):
    """No array has [length, length] elements or a fixed share of them.

    Doubling the length at most doubles the largest array, with static and with traced positions.
    """
    for length in (2048, 4096, 8192, 16384):
        ids = jax.ShapeDtypeStruct((length,), jnp.int32)
        for places in (None, TokenInfo(length, ids, ids)):
            largest = sizes_of(RULES[rule][0], length, places)[0]
            assert largest <= max(2**18, 8 * length)


@pytest.mark.parametrize("rule", SHARES)
@pytest.mark.parametrize("passes", [1, 2])
def test_attention_computes_exponentials_of_unmasked_tiles_only(rule, passes, real_tiles):
    """The exponentials are those that the rule allows plus a margin, forward and backward."""
    (mask, share), length = SHARES[rule], 16384
    exponentials = sizes_of(mask, length, gradients=passes == 2)[1]
    assert exponentials <= passes * share * length**2


@pytest.mark.parametrize("rule", mostly_slow(RULES, "prefix+window"))
def test_size_of_attention_program_does_not_grow_with_the_length(rule, real_tiles):
    """The number of equations is the same for 8,192 and 32,768 tokens."""
    mask = RULES[rule][0]
    at_8k, at_32k = (sizes_of(mask, length)[2] for length in (8192, 32768))
    assert at_32k == at_8k


def test_memory_of_compiled_attention_is_linear_in_the_length(real_tiles):
    """Doubling the length at most doubles the memory: the compiler copies no sums in the loop."""

    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 64), jnp.float32)
        compiled = jax.jit(looped(Causal())).lower(x, x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(32768) <= 2 * temporary(16384) <= 4 * temporary(8192)


@pytest.mark.slow
def test_document_masks_are_not_stored_for_all_layers_at_once(real_tiles):
    """Layers that are recomputed need as much memory with packed documents as without."""
    length = 4096

    def loss(x, segment_ids):
        info = TokenInfo(length, None, segment_ids)
        mask = Causal() if segment_ids is None else Causal() & Packed()
        attention = partial(attend, mask=mask, query_info=info, key_info=info)

        @jax.checkpoint
        def layer(x, _):
            return x + attention(x, x, x, implementation="blockwise"), None

        return jax.lax.scan(layer, x, None, length=2)[0].sum()

    def temporary(segment_ids):
        x = jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(x, segment_ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    packed = jax.ShapeDtypeStruct((1, length), jnp.int32)
    assert temporary(packed) - temporary(None) < length**2 / 8
