"""Blockwise and explicit attention equal the float64 formula for every rule, with gradients."""

from functools import cache
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import Causal, Packed, Prefix, TokenInfo, Window
from jaxformer.functional import dot_product_attention as attend
from jaxformer.functional.attention import blockwise, platforms
from jaxformer.verify import rules
from tests.properties import oracle, tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
HEADS, LENGTH, HEAD_DIM, VALUE_DIM = 4, 12, 4, 3
IMPLEMENTATIONS = ("explicit", "blockwise")
RULES = {
    "causal": (Causal(), {}),
    "window": (Causal() & Window(3), {"window": 3}),
    "prefix": (Prefix(7), {"prefix": 7}),  # longer than a block
    "prefix+window": (Prefix(7) & Window(5), {"prefix": 7, "window": 5}),
}


def random_inputs(seed, kv_heads, length=LENGTH, size=1.0, batch=2):
    """Returns NumPy float32 query, key, value and output cotangent, scaled by `size`."""
    rng = np.random.default_rng(seed)
    shapes = [(HEADS, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, VALUE_DIM), (HEADS, VALUE_DIM)]
    return [
        np.float32(size * rng.normal(size=(batch, heads, length, dim))) for heads, dim in shapes
    ]


@cache
def with_gradients(mask, implementation):
    """Compiles (query, key, value, cotangent, token info or table) → (output, gradients)."""

    def run(query, key, value, cotangent, told):
        table = mask is None

        def output(query, key, value):
            return attend(
                query,
                key,
                value,
                told if table else mask,
                query_info=None if table else told,
                key_info=None if table else told,
                implementation=implementation,
            )

        y, pull_back = jax.vjp(output, query, key, value)
        return y, pull_back(cotangent)

    return jax.jit(run)


def check(mask, implementation, inputs, told, seen, tolerance=1e-5):
    """Compares output and gradients with the oracle. `seen` is bool [batch, queries, keys]."""
    agree(
        with_gradients(mask, implementation)(*map(jnp.asarray, inputs), told),
        inputs,
        seen,
        tolerance,
    )


def agree(found, inputs, seen, tolerance=1e-5):
    """Compares `found`, (output, gradients), with the oracle, one batch element at a time."""
    for index in range(len(inputs[0])):
        query, key, value, cotangent = (x[index] for x in inputs)
        output = oracle.attention(query, key, value, seen[index])
        gradients = oracle.attention_gradients(query, key, value, seen[index], cotangent)
        tiny.all_close(jax.tree.map(lambda x: x[index], found), (output, gradients), tolerance)  # noqa: B023


@pytest.mark.parametrize(
    "implementation", mostly_slow(IMPLEMENTATIONS, "blockwise", slow=IMPLEMENTATIONS)
)
@pytest.mark.parametrize("rule", RULES)
@given(
    seed=tiny.seeds,
    segment_ids=tiny.segment_batches(),
    size=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_attention_equals_formula_for_every_mask(rule, implementation, seed, segment_ids, size):
    """Packed documents under each rule, unsaturated and saturated scores, grouped key heads."""
    mask, numbers = RULES[rule]
    read = [rules.read(ids) for ids in segment_ids]
    documents, positions = (jnp.array(side) for side in zip(*read, strict=True))
    inputs = random_inputs(seed, 2, size=size)
    seen = [rules.visible(ids, **numbers) for ids in segment_ids]
    places = TokenInfo(LENGTH, positions, documents)
    # Scores of magnitude size² lose their last digits to rounding, and gradients amplify the error.
    # At size 10 it reached 1.1e-3 of the largest gradient, which saturation can make small.
    check(mask & Packed(), implementation, inputs, places, seen, 1e-5 * max(1.0, size**3))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@given(seed=tiny.seeds)
def test_attention_without_explicit_positions_equals_formula(rule, seed):
    """With positions 0, 1, 2, … known while tracing, masked blocks are skipped."""
    mask, numbers = RULES[rule]
    seen = [rules.visible([1] * LENGTH, **numbers)] * 2
    check(mask, "blockwise", random_inputs(seed, 2), None, seen)


@pytest.mark.parametrize("rule", ["causal", "window", "prefix"])
def test_attention_in_blocks_of_64_queries_equals_formula(rule, monkeypatch):
    """150 queries make three blocks of the production size; the last block is ragged."""
    monkeypatch.setattr(blockwise, "_SMALLEST_BLOCK", 64)
    mask, numbers = RULES[rule]
    inputs = random_inputs(0, 2, length=150, batch=1)
    check(mask, "blockwise", inputs, None, [rules.visible([1] * 150, **numbers)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches())
def test_padding_keys_are_masked_although_the_mask_does_not_mention_padding(
    implementation, seed, segment_ids
):
    """Padding keys are masked although the rule itself does not mention padding."""
    inputs = random_inputs(seed, 2)
    places = TokenInfo(LENGTH, None, jnp.asarray(segment_ids))
    found = under_causal(implementation)(*map(jnp.asarray, inputs[:3]), places)
    for index, ids in enumerate(segment_ids):
        seen = np.tri(LENGTH, dtype=bool) & (ids != 0)
        wanted = oracle.attention(*(x[index] for x in inputs[:3]), seen)
        tiny.close(np.asarray(found)[index][:, ids != 0], wanted[:, ids != 0])


@cache
def under_causal(implementation):
    def run(query, key, value, places):
        both = {"query_info": places, "key_info": places}
        return attend(query, key, value, Causal(), implementation=implementation, **both)

    return jax.jit(run)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(seed=tiny.seeds, start=st.integers(0, LENGTH - 5))
def test_attention_accepts_queries_at_any_positions(implementation, seed, start):
    """Five queries at positions `start` to `start + 4` attend to twelve cached keys."""
    query, key, value, cotangent = random_inputs(seed, 2)
    seen = rules.visible([1] * LENGTH, window=3)[start : start + 5]
    five = [query[:, :, :5], key, value, cotangent[:, :, :5]]
    places = jnp.arange(start, start + 5), jnp.arange(LENGTH)
    found = offset(implementation)(*map(jnp.asarray, five[:3]), *places)
    for index in range(2):
        tiny.close(found[index], oracle.attention(*(x[index] for x in five[:3]), seen))


@cache
def offset(implementation):
    def run(query, key, value, query_positions, key_positions):
        return attend(
            query,
            key,
            value,
            Causal() & Window(3),
            query_info=TokenInfo(len(query_positions), query_positions),
            key_info=TokenInfo(len(key_positions), key_positions),
            implementation=implementation,
        )

    return jax.jit(run)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_query_without_visible_keys_gives_zeros_and_finite_gradients(implementation):
    """Queries whose keys are all masked give output 0, not NaN, and pass no gradient."""
    inputs = random_inputs(0, 2)
    for table in (np.zeros((2, LENGTH, LENGTH), bool), np.tri(LENGTH, k=-4, dtype=bool)[None]):
        run = with_gradients(None, implementation)
        output, gradients = run(*map(jnp.asarray, inputs), jnp.asarray(table))
        blind = ~table.any(axis=-1)[0]
        assert not np.asarray(output)[:, :, blind].any()
        assert not np.asarray(gradients[0])[:, :, blind].any()
        assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), gradients))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches())
def test_nan_in_padding_does_not_change_the_output_and_gradients_of_attention(
    implementation, seed, segment_ids
):
    """NaN in the padding of query, key and value leaves output and gradients bitwise equal."""
    run = with_gradients(RULES["causal"][0] & Packed(), implementation)
    documents = jnp.array([rules.read(ids)[0] for ids in segment_ids])
    places = TokenInfo(LENGTH, None, documents)
    query, key, value, cotangent = map(jnp.asarray, random_inputs(seed, 2))
    padding = (segment_ids == 0)[:, None, :, None]
    dirty = [jnp.where(padding, jnp.nan, x) for x in (query, key, value)]
    expected = run(query, key, value, cotangent, places)
    jax.tree.map(np.testing.assert_array_equal, run(*dirty, cotangent, places), expected)
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), expected))


@pytest.mark.parametrize(
    "implementation", mostly_slow(IMPLEMENTATIONS, "explicit", slow=IMPLEMENTATIONS)
)
def test_attention_scores_and_softmax_of_bfloat16_inputs_are_float32(implementation):
    """For large scores with small differences, the only error is rounding the weights once."""
    mask, seen = Causal(), rules.visible([1] * LENGTH)
    query, key, value, _ = (jnp.asarray(x, jnp.bfloat16) for x in random_inputs(0, 2))
    output = attend(query * 8, key + 8, value, mask, implementation=implementation)
    assert output.dtype == jnp.bfloat16
    for index in range(2):
        expected = oracle.attention((query * 8)[index], (key + 8)[index], value[index], seen)
        tiny.close(output[index], expected, 0.01)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_with_leading_axes_equals_vmapped_attention(implementation):
    """Attention accepts any number of leading axes: none, one, two, or one removed by vmap."""
    inputs = [jnp.asarray(x) for x in random_inputs(0, 2, batch=4)[:3]]

    def one(query, key, value):
        return attend(query, key, value, Causal(), implementation=implementation)

    def every_way(query, key, value):
        two = one(*(x.reshape(2, 2, *x.shape[1:]) for x in (query, key, value)))
        alone = jnp.stack([one(query[i], key[i], value[i]) for i in range(4)])
        return jax.vmap(one)(query, key, value), alone, two.reshape(alone.shape)

    batched = jax.jit(one)(*inputs)
    for way in jax.jit(every_way)(*inputs):
        tiny.close(way, batched)


def program_size(function, *arguments):
    """Measures the program of `function`.

    Returns the size of its largest array, the number of exponentials and the number of equations.
    A loop counts its exponentials once per iteration and its equations once.
    """
    largest = exponentials = equations = 0
    programs = [(jax.make_jaxpr(function)(*arguments).jaxpr, 1)]
    while programs:
        program, times = programs.pop()
        for equation in program.eqns:
            size = max(variable.aval.size for variable in equation.outvars)
            largest, equations = max(largest, size), equations + 1
            exponentials += times * size if equation.primitive.name == "exp" else 0
            steps = (
                times * equation.params["length"] if equation.primitive.name == "scan" else times
            )
            inner = jax.tree.leaves(
                [*equation.params.values()], is_leaf=lambda p: hasattr(p, "jaxpr")
            )
            programs += [(p.jaxpr, steps) for p in inner if hasattr(p, "jaxpr")]
    return largest, exponentials, equations


@pytest.mark.parametrize("mask, share", [(Causal(), 0.54), (Causal() & Window(64), 0.13)])
def test_attention_does_not_compute_fully_masked_blocks(mask, share, monkeypatch):
    """Blockwise attention over 2048 tokens never holds all scores at once.

    The exponentials are those that the rule allows plus a margin, forward and with gradients.
    """
    monkeypatch.setattr(blockwise, "_SMALLEST_BLOCK", 64)
    length = 2048
    x = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)

    def run(query, key, value):
        return attend(query, key, value, mask, implementation="blockwise").sum()

    largest, exponentials, _ = program_size(run, x, x, x)
    assert largest <= length**2 / 16 and exponentials <= share * length**2
    largest, exponentials, _ = program_size(jax.grad(run, argnums=(0, 1, 2)), x, x, x)
    assert largest <= length**2 / 16 and exponentials <= 2 * share * length**2


@pytest.mark.slow
def test_fused_attention_rejects_arguments_that_cudnn_does_not_support(monkeypatch):
    """On a GPU, "auto" falls back to blockwise for them."""
    query, key, value, _ = map(jnp.asarray, random_inputs(0, 2))
    expected = attend(query, key, value, implementation="explicit")
    monkeypatch.setattr(platforms, "platform", lambda: "gpu")
    with pytest.raises(ValueError, match="cuDNN: the kernel needs bfloat16"):
        attend(query, key, value, implementation="fused")
    tiny.close(attend(query, key, value, implementation="auto"), expected)


def test_error_for_unsupported_attention_arguments_states_the_reason():
    """Each error message states the reason.

    The cases: "fused" without a GPU (in a function and in a model), an unknown implementation, key
    heads that do not divide the query heads, and incompatible shapes.
    """
    query, key, value, _ = map(jnp.asarray, random_inputs(0, 2))
    with pytest.raises(ValueError, match="fused kernels need a GPU or a TPU, not 'cpu'"):
        attend(query, key, value, implementation="fused")
    model = tiny.build(attention="fused")
    with pytest.raises(ValueError, match="need a GPU"):
        model.apply(tiny.weights(model, 0), tiny.tokens(0, 1, 4))
    with pytest.raises(ValueError, match="implementation is 'flash'"):
        attend(query, key, value, implementation="flash")
    with pytest.raises(ValueError, match="query has 4 heads and key has 3; the number"):
        attend(query, key[:, [0, 0, 1]], value[:, [0, 0, 1]])
    with pytest.raises(ValueError, match=r"size \(which includes the token itself\) is 0"):
        Window(0)
    wrong = {
        r"mask is float32 \[12, 12\]; .* 1 and 0": {"mask": jnp.full((LENGTH, LENGTH), 0.5)},
        r"mask is bool \(2, 1, 12\); .* \[..., 12, 12\]": {"mask": jnp.ones((2, 1, LENGTH), bool)},
        "key_info describes 3 tokens, but key has 12 tokens": {"key_info": TokenInfo(3)},
        "must have the same head_dim": {"key": key[..., :1]},
        "the same batch axes": {"query": query[:1]},
    }
    for message, change in wrong.items():
        given = {"query": query, "key": key, "value": value, **change}
        with pytest.raises(ValueError, match=message):
            unwrap(attend)(**given)  # without the shape checks that the tests install
