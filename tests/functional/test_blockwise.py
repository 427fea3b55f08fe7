"""Long rows: attention in a loop over tiles is the formula, and its scores and its program are
those of one tile, however long the row."""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxformer.functional import Causal, Packed, TokenInfo, blockwise
from jaxformer.functional import dot_product_attention as attend
from jaxformer.functional.masks import All, DenseMask
from jaxformer.verify import rules
from tests.functional.test_attention import RULES, agree, program_size, random_inputs
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

# Tiles of 5 queries × 4 keys: the first length is a multiple of neither, the other of both.
LENGTHS = (14, 20)
RAGGED, EVEN = LENGTHS


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Every row is long."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"_LARGEST_TILE": 0, "_LOOP_QUERIES": 5, "_LOOP_KEYS": 4}
        for name, size in sizes.items():
            patch.setattr(blockwise, name, size)
        yield


@cache
def looped(mask=None):
    """(query, key, value, cotangent, query places, key places, table or None) → (output, gradients)
    under the rule, and with the table if there is one; compiled."""

    def run(query, key, value, cotangent, query_info=None, key_info=None, table=None):
        rule = mask if table is None else mask & DenseMask(table)
        told = {"query_info": query_info, "key_info": key_info}
        function = partial(attend, mask=rule, **told, implementation="blockwise")
        output, pull_back = jax.vjp(function, query, key, value)
        return output, pull_back(cotangent)

    return jax.jit(run)


def test_these_rows_are_looped_over():
    """Or nothing below is about the loop."""
    inputs = random_inputs(0, 2, length=RAGGED)
    assert "scan" in str(jax.make_jaxpr(looped(Causal()))(*inputs))


@pytest.mark.parametrize(
    "rule, length", mostly_slow(product(RULES, LENGTHS), *product(RULES, (RAGGED,)))
)
@given(seed=tiny.seeds, size=st.sampled_from([0.1, 1.0, 10.0]))
def test_a_row_in_order_is_its_formula(rule, length, seed, size):
    """Tiles are ruled out while tracing; scores are small and saturated, two queries a key head."""
    mask, numbers = RULES[rule]
    inputs = random_inputs(seed, 2, length, size)
    seen = [rules.visible([1] * length, **numbers)] * 2
    agree(looped(mask)(*inputs), inputs, seen, 1e-5 * max(1.0, size**3))


@pytest.mark.parametrize("rule", RULES)
@given(seed=tiny.seeds, segments=tiny.segment_batches(length=RAGGED))
def test_packed_documents_are_their_formula(rule, seed, segments):
    """Positions and documents are arrays: each tile is asked about as the program runs."""
    mask, numbers = RULES[rule]
    read = [rules.read(ids) for ids in segments]
    documents, positions = (jnp.array(side) for side in zip(*read, strict=True))
    places, inputs = TokenInfo(RAGGED, positions, documents), random_inputs(seed, 2, RAGGED)
    found = looped(mask & Packed())(*inputs, places, places)
    agree(found, inputs, [rules.visible(ids, **numbers) for ids in segments])


@given(seed=tiny.seeds, segments=tiny.segment_batches(length=RAGGED))
def test_padding_is_hidden(seed, segments):
    """A rule that says nothing of padding, its positions known while tracing and its ids not."""
    inputs, places = random_inputs(seed, 2, RAGGED), TokenInfo(RAGGED, None, jnp.asarray(segments))
    inputs[3] *= (segments != 0)[:, None, :, None]
    output, gradients = looped(Causal())(*inputs, places, places)
    tokens = (segments != 0)[:, None, :, None]
    inputs[0] *= tokens  # a query of padding is nothing, and what it gives is not said
    seen = [np.tri(RAGGED, dtype=bool) & (ids != 0) & (ids != 0)[:, None] for ids in segments]
    agree((output * tokens, gradients), inputs, seen)


@given(
    seed=tiny.seeds,
    kv_heads=st.sampled_from([1, 2, 4]),
    table=arrays(bool, (2, RAGGED, RAGGED), elements=st.booleans()),
)
def test_a_table_is_its_formula(seed, kv_heads, table):
    """Any bool array, alone and together with a rule; some queries and some tiles see nothing."""
    table[:, ::5], table[:, :9, 5:] = False, False
    inputs = random_inputs(seed, kv_heads, RAGGED)
    agree(looped(All())(*inputs, None, None, table), inputs, table)
    causal = table & np.tri(RAGGED, dtype=bool)
    agree(looped(Causal())(*inputs, None, None, table), inputs, causal)


@pytest.mark.parametrize("rule", ["causal", "window"])
@given(seed=tiny.seeds, start=st.integers(0, EVEN - 7))
def test_queries_may_stand_anywhere(rule, seed, start):
    """Seven queries at positions `start` … against twenty stored keys, as in a cache."""
    mask, numbers = RULES[rule]
    query, key, value, cotangent = random_inputs(seed, 2, EVEN)
    inputs = query[:, :, :7], key, value, cotangent[:, :, :7]
    places = TokenInfo(7, start + jnp.arange(7)), TokenInfo(EVEN, jnp.arange(EVEN))
    seen = rules.visible([1] * EVEN, **numbers)[start : start + 7]
    agree(looped(mask)(*inputs, *places), inputs, [seen] * 2)


@given(seed=tiny.seeds)
def test_a_tile_in_which_no_one_is_seen_is_not_computed(seed):
    """NaN in the keys and values of a document that fills its tiles: 0 × NaN would reach those
    whose tiles were computed all the same."""
    segments = np.repeat([[1] * 8 + [2] * 12], 2, axis=0)
    places = TokenInfo(EVEN, None, jnp.asarray(segments))
    query, key, value, cotangent = random_inputs(seed, 2, EVEN)
    clean = looped(Packed())(query, key, value, cotangent, places, places)
    key, value = (np.where(segments[:, None, :, None] == 2, np.nan, x) for x in (key, value))
    dirty = looped(Packed())(query, key, value, cotangent, places, places)
    # Queries 5 … 9 share a tile with some of the other document, the first five do not.
    for found, expected in ((dirty[0], clean[0]), (dirty[1][0], clean[1][0])):
        np.testing.assert_array_equal(found[:, :, :5], expected[:, :, :5])
        assert np.isnan(found[:, :, 10:]).all()


@given(seed=tiny.seeds, segments=tiny.segment_batches(length=RAGGED))
def test_nan_of_padding_reaches_nothing(seed, segments):
    """Output and gradients are the same to the last bit, and finite."""
    run = looped(Causal() & Packed())
    places = TokenInfo(RAGGED, None, jnp.array([rules.read(ids)[0] for ids in segments]))
    *given, cotangent = random_inputs(seed, 2, RAGGED)
    dirty = [np.where((segments == 0)[:, None, :, None], np.nan, x) for x in given]
    expected = run(*given, cotangent, places, places)
    found = run(*dirty, cotangent, places, places)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), expected))


def test_bfloat16_sums_are_float32():
    """Sums over tiles too: many tiles are no less exact than the one of a short row."""
    length, dtypes = 200, (jnp.float32, jnp.bfloat16)
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in random_inputs(0, 2, length)]
    exact, found = (looped(Causal())(*(x.astype(dtype) for x in inputs)) for dtype in dtypes)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(found))
    tiny.all_close(found, exact, 0.01)


def test_vmap_remat_and_leading_axes_agree():
    """Rows of one batch, one by one, mapped over with places of their own, and computed again."""
    inputs = [jnp.asarray(x) for x in random_inputs(0, 2, RAGGED, batch=4)]
    segments = np.sort(np.random.default_rng(0).integers(1, 4, (4, RAGGED)))
    places = TokenInfo(RAGGED, None, jnp.asarray(segments))
    run = looped(Causal() & Packed())
    batched = run(*inputs, places, places)

    def one(query, key, value, cotangent, ids):
        return run(query, key, value, cotangent, *[TokenInfo(RAGGED, None, ids)] * 2)

    mapped = jax.vmap(one)(*inputs, places.segments)
    two = [x.reshape(2, 2, *x.shape[1:]) for x in (*inputs, places.segments)]
    split = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), one(*two))
    again = jax.checkpoint(run)(*inputs, places, places)
    for other in (mapped, split, again):
        tiny.all_close(other, batched)


def test_a_table_is_no_part_of_the_gradient():
    """It is an array among arrays, under jit and grad, and none is asked of it."""
    query, key, value, cotangent = map(jnp.asarray, random_inputs(0, 2, RAGGED))
    table = jnp.asarray(np.tri(RAGGED, dtype=bool))

    @jax.jit
    def loss(query, table):
        output = attend(query, key, value, table, implementation="blockwise")
        return (output * cotangent).sum()

    expected = looped(Causal())(query, key, value, cotangent)[1][0]
    tiny.close(jax.grad(loss)(query, table), expected)


# ---- at the sizes in use


@pytest.fixture
def real_tiles(monkeypatch):
    sizes = {"_SMALLEST_BLOCK": 64, "_LARGEST_TILE": 2**18}
    sizes |= {"_LOOP_QUERIES": 256, "_LOOP_KEYS": 512}
    for name, size in sizes.items():
        monkeypatch.setattr(blockwise, name, size)


def sizes_of(mask, length, places=None, *, gradients=True):
    """What `program_size` finds for one head of 8 features."""

    def run(query, key, value, places):
        told = {"query_info": places, "key_info": places}
        return attend(query, key, value, mask, **told, implementation="blockwise").sum()

    x = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)
    function = jax.grad(run, argnums=(0, 1, 2)) if gradients else run
    return program_size(function, x, x, x, places)


SHARES = {"causal": (Causal(), 0.54), "window": (RULES["window"][0], 0.04)}


@pytest.mark.parametrize("rule", mostly_slow(RULES, "prefix+window"))
def test_no_array_is_larger_than_a_tile_or_a_row(rule, real_tiles):
    """Never [length, length], nor a share of it: twice the length, at most twice the largest array,
    where positions are known and where they are arrays."""
    for length in (2048, 4096, 8192, 16384):
        ids = jax.ShapeDtypeStruct((length,), jnp.int32)
        for places in (None, TokenInfo(length, ids, ids)):
            largest = sizes_of(RULES[rule][0], length, places)[0]
            assert largest <= max(2**18, 8 * length)


@pytest.mark.parametrize("rule", SHARES)
@pytest.mark.parametrize("passes", [1, 2])
def test_what_is_ruled_out_costs_nothing(rule, passes, real_tiles):
    """The exponentials are those that the rule lets through and a margin, forward and back."""
    (mask, share), length = SHARES[rule], 16384
    exponentials = sizes_of(mask, length, gradients=passes == 2)[1]
    assert exponentials <= passes * share * length**2


@pytest.mark.parametrize("rule", mostly_slow(RULES, "prefix+window"))
def test_the_program_is_as_small_for_any_length(rule, real_tiles):
    """What is compiled does not grow, and is smaller than what is spelled out for a short row."""
    mask = RULES[rule][0]
    at_8k, at_32k = (sizes_of(mask, length)[2] for length in (8192, 32768))
    assert at_32k == at_8k


def test_memory_of_the_compiled_program_is_linear(real_tiles):
    """Twice the length takes at most twice the memory: the compiler copies no sums in the loop."""

    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 64), jnp.float32)
        compiled = jax.jit(looped(Causal())).lower(x, x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(32768) <= 2 * temporary(16384) <= 4 * temporary(8192)
