"""The functions of the lecture notes equal loops in float64, and the layers of the models."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer import functional as F
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.layers.recurrent import CELLS
from jaxformer.models.parameters import init
from tests.properties import oracle, tiny


def check_error(error, message, function, *arguments, **named):
    with pytest.raises(error, match=re.escape(message)):
        function(*arguments, **named)


pytestmark = pytest.mark.usefixtures("quick_compilation")
NAMES = """
softmax sigmoid activate linear embed encode_positions sinusoidal_positions layer_norm feed_forward
ffn dot_product_attention scaled_dot_product_attention explicit_attention self_attention
cross_attention multi_head_attention multihead_attention split_heads merge_heads kv_cache
add_residual norm_before norm_after transformer_block block decoder greedy_decode cross_entropy
rnn_cell lstm_cell rnn lstm convolution causal_convolution
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_every_function_of_the_lecture_notes_exists_and_has_a_docstring(name):
    assert getattr(F, name).__doc__


def test_error_for_unknown_function_name_suggests_the_nearest_function():
    with pytest.raises(AttributeError, match="no 'split_head'; did you mean split_heads"):
        _ = F.split_head
    assert not hasattr(F, "__wrapped__")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: F.layer_norm(x, gamma=1.0), "layer_norm: `gamma` is called `scale` here"),
        (lambda x: F.layer_norm(x, 1.0, beta=0.0), "`beta` is called `bias` here"),
        (lambda x: F.rms_norm(x, eps=1e-6), "`eps` is called `epsilon` here"),
        (
            lambda x: F.dot_product_attention(x, x, x, attn_mask=None),
            "`attn_mask` is called `mask`",
        ),
        (lambda x: F.multi_head_attention({}, x, n_heads=2), "`n_heads` is called `num_heads`"),
        (lambda x: F.feed_forward({}, x, activatoin="relu"), "did you mean activation?"),
        (lambda x: F.layer_norm(x, power=2), "no argument `power`; it accepts x, scale, bias"),
    ],
)
def test_error_for_unknown_argument_suggests_the_nearest_argument(call, message):
    check_error(TypeError, message, call, jnp.ones((2, 4)))


# ---- attention


def random_attention(seed, batch, queries, keys, dim):
    rng = np.random.default_rng(seed)
    query, key, value = (
        jnp.asarray(rng.normal(size=(*batch, n, dim)), jnp.float32) for n in (queries, keys, keys)
    )
    return query, key, value, rng.random((*batch, queries, keys)) < 0.6


@partial(jax.jit, static_argnums=4)
def attention_of_every_implementation(query, key, value, mask, scale):
    arrays = query, key, value, mask
    return [
        F.explicit_attention(*arrays, scale),
        F.scaled_dot_product_attention(*arrays, scale=scale),
        F.dot_product_attention(*arrays, scores=Scores(scale), implementation="explicit"),
        F.dot_product_attention(*arrays, scores=Scores(scale), implementation="blockwise"),
    ]


@given(
    seed=tiny.seeds,
    form=st.sampled_from([((2, 3), 7, None), ((2, 3), 1, 0.3), ((1, 2), 7, 0.3)]),
)
def test_attention_formula_equals_python_loops_and_every_attention_implementation(seed, form):
    """Rows without visible keys, which give zeros, are among the random masks."""
    batch, keys, scale = form
    arrays = random_attention(seed, batch, 5, keys, 4)
    flat = (np.reshape(x, (-1, *x.shape[-2:])) for x in arrays)
    expected = [
        oracle.attention(query[None], key[None], value[None], mask, scale)
        for query, key, value, mask in zip(*flat, strict=True)
    ]
    for found in attention_of_every_implementation(*arrays, scale):
        tiny.close(found, np.reshape(expected, found.shape))


@given(seed=tiny.seeds, dtype=st.sampled_from([bool, int, np.int8, float, np.float16]))
def test_masks_of_zero_and_one_equal_boolean_masks(seed, dtype):
    query, key, value, mask = random_attention(seed, (), 5, 4, 3)
    expected = F.dot_product_attention(query, key, value, mask)
    np.testing.assert_array_equal(
        F.dot_product_attention(query, key, value, mask.astype(dtype)), expected
    )
    if np.issubdtype(dtype, np.integer):
        traced = jax.jit(F.dot_product_attention)(query, key, value, mask.astype(dtype))
        tiny.close(traced, expected)


MASKS = {
    "window": (lambda query, key: (key <= query) & (key > query - 2), F.Causal() & F.Window(2)),
    "one array for all queries": (lambda query, key: key < 3, np.arange(4) < np.full((5, 1), 3)),
    "one boolean": (lambda query, key: True, None),
    "computed in NumPy": (lambda query, key: np.asarray(key) != 1, np.arange(4) != np.ones((5, 1))),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_a_function_as_mask_equals_attention_with_its_table(name):
    function, mask = MASKS[name]
    query, key, value, _ = random_attention(0, (2,), 5, 4, 3)
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    found = F.scaled_dot_product_attention(query, key, value, function)
    np.testing.assert_array_equal(found, expected)
    batched = F.dot_product_attention(query[None], key[None], value[None], function)
    tiny.close(batched[0], expected)


@pytest.mark.parametrize(
    "function, message",
    [
        (
            lambda query, key: query - key,
            "(2, 2) for positions of queries (2, 1)",
        ),
        (lambda query, key: np.ones((3, 3), bool), "mask returns bool (3, 3) for"),
        (lambda query, key: None, "mask returns a NoneType"),
    ],
)
def test_mask_function_that_returns_no_booleans_of_all_pairs_is_rejected(function, message):
    x = jnp.ones((2, 3))
    check_error(ValueError, message, F.dot_product_attention, x, x, x, function)


@pytest.mark.parametrize("values", [[0.0, -np.inf], [0, 2], [0.5, 1.0], [np.nan, 1.0]])
def test_mask_with_values_other_than_0_and_1_is_rejected(values):
    x = jnp.ones((2, 3))
    mask = np.array([values, values])
    check_error(ValueError, "True and False, or 1 and 0", F.dot_product_attention, x, x, x, mask)


def test_float_mask_inside_jit_is_rejected():
    x = jnp.ones((2, 3))
    check_error(ValueError, "1 and 0", jax.jit(F.dot_product_attention), x, x, x, x[:, :2])


cross_attention = jax.jit(F.cross_attention, static_argnames="scale")
self_attention = jax.jit(F.self_attention, static_argnames=("mask", "scale"))


@given(seed=tiny.seeds, scale=st.sampled_from([None, 1.0]))
def test_self_and_cross_attention_equal_the_matrix_formulas(seed, scale):
    """Lecture 10 §3: softmax(X Q (X K)ᵀ) X V, with matrices, with and without biases."""
    rng = np.random.default_rng(seed)
    x, source = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 5, 4), (2, 3, 6)))
    mask = rng.random((5, 3)) < 0.7
    q, k, v = rng.normal(size=(4, 8)), rng.normal(size=(6, 8)), rng.normal(size=(6, 2))
    weights = jax.tree.map(jnp.asarray, {"query": q, "key": {"kernel": k}, "value": v})
    found = cross_attention(weights, x, source, mask, scale=scale)
    for i in range(2):
        parts = (x[i] @ q, source[i] @ k, source[i] @ v)
        expected = oracle.attention(*(part[None] for part in parts), mask, scale)[0]
        tiny.close(found[i], expected, 1e-4)
    weights = {name: jnp.asarray(rng.normal(size=(4, 4))) for name in ("query", "key", "value")}
    itself = self_attention(weights, x, F.Causal(), scale=scale)
    tiny.close(itself, cross_attention(weights, x, x, np.tri(5, dtype=bool), scale=scale))


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=tiny.seeds)
def test_keys_and_values_appended_token_by_token_give_causal_attention(seed):
    query, key, value, _ = random_attention(seed, (3, 2), 4, 4, 4)
    cache, rows = None, []
    for t in range(4):
        cache = F.kv_cache(key[..., t : t + 1, :], value[..., t : t + 1, :], cache)
        rows.append(F.scaled_dot_product_attention(query[..., t : t + 1, :], *cache))
    tiny.close(jnp.concatenate(rows, -2), F.dot_product_attention(query, key, value, F.Causal()))
    np.testing.assert_array_equal(cache[0], key)
    np.testing.assert_array_equal(cache[1], value)


# ---- the layers of the models


@pytest.mark.slow
@settings(max_examples=3)
@given(seed=tiny.seeds)
def test_multi_head_attention_equals_the_attention_of_a_model(seed):
    """The tiny model has four query heads and two key heads."""
    model = tiny.build(attention="explicit", positions="none")
    variables, tokens = tiny.weights(model, seed), jnp.asarray(tiny.tokens(seed, 2, 9))
    capture = ("attention.input", "attention.output")
    _, seen = model.apply(variables, tokens, capture=capture, method="inspect")
    for layer in range(model.config.num_layers):
        weights = jax.tree.map(lambda x: x[layer], variables["params"]["blocks"]["attention"])  # noqa: B023
        x, expected = (seen[name][layer] for name in capture)
        tiny.close(F.multi_head_attention(weights, x, F.Causal(), num_heads=4), expected)
        alone = F.multi_head_attention(weights, x[0], np.tri(9, dtype=int), num_heads=4)
        tiny.close(alone, expected[0])


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=tiny.seeds)
def test_multi_head_attention_to_a_source_equals_the_cross_attention_of_a_model(seed):
    model = tiny.build(jf.EncoderDecoderConfig, attention="explicit")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, 5)
    source = tiny.tokens(seed + 1, 2, 7)
    capture = ("cross_attention.input", "cross_attention.output", "encoder.final_norm")
    _, seen = model.apply(variables, tokens, source=source, capture=capture, method="inspect")
    for layer in range(model.config.num_layers):
        weights = variables["params"]["blocks"]["cross_attention"]
        weights = jax.tree.map(lambda x: x[layer], weights)  # noqa: B023
        found = F.multi_head_attention(
            weights,
            seen["cross_attention.input"][layer],
            source=seen["encoder.final_norm"],
            num_heads=4,
        )
        tiny.close(found, seen["cross_attention.output"][layer])


@pytest.mark.slow
@settings(max_examples=3)
@given(
    seed=tiny.seeds,
    activation=st.sampled_from(["relu", "gelu_tanh", "tanh", "sigmoid", "swiglu"]),
    tied=st.booleans(),
)
def test_decoder_function_equals_the_decoder_model(seed, activation, tied):
    model = tiny.build(activation=activation, tie_embeddings=tied)
    variables, tokens = tiny.weights(model, seed), jnp.asarray(tiny.tokens(seed, 2, 9))
    decode = partial(F.decoder, num_heads=4, activation=activation)
    expected = tiny.apply(model)(variables, tokens)
    tiny.close(decode(variables["params"], tokens), expected)
    tiny.close(decode(variables["params"], tokens[0]), expected[0])


@pytest.mark.slow
@settings(max_examples=3)
@given(
    seed=tiny.seeds,
    norm=st.sampled_from(["layer", "rms"]),
    norm_position=st.sampled_from(["pre", "post"]),
)
def test_transformer_block_equals_the_block_of_a_model(seed, norm, norm_position):
    model = tiny.build(norm=norm, norm_position=norm_position, use_bias=False)
    variables, tokens = tiny.weights(model, seed), jnp.asarray(tiny.tokens(seed, 2, 9))
    capture = ("block.input", "block.output")
    _, seen = model.apply(variables, tokens, capture=capture, method="inspect")
    for layer in range(model.config.num_layers):
        weights = jax.tree.map(lambda x: x[layer], variables["params"]["blocks"])  # noqa: B023
        found = F.transformer_block(
            weights,
            seen["block.input"][layer],
            F.Causal(),
            num_heads=4,
            norm={"layer": F.layer_norm, "rms": F.rms_norm}[norm],
            norm_position=norm_position,
        )
        tiny.close(found, seen["block.output"][layer])


@pytest.mark.slow
def test_initial_block_weights_have_the_shapes_of_a_model_and_can_be_applied():
    weights = F.init_transformer_block(jax.random.key(0), 8, 2, 12, activation="swiglu")
    config = jf.DecoderConfig(
        vocab_size=5, num_layers=1, embed_dim=8, num_heads=2, mlp_dim=12, activation="swiglu"
    )
    of_model = init(jf.Decoder(config), jax.random.key(0))["params"]["blocks"]
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(lambda x: x.shape[1:], of_model)
    x = jax.random.normal(jax.random.key(1), (3, 8))
    y = F.transformer_block(weights, x, F.Causal(), num_heads=2, activation="swiglu")
    assert y.shape == x.shape and not jnp.allclose(x, y)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 3}, "num_heads is 3; it must divide the 8 features"),
        ({"weights": {}}, "no kernel at weights['query']['kernel']"),
        ({"x": jnp.ones((3, 5))}, "weights['query']['kernel'] has shape (8, 8)"),
        ({"source": jnp.ones((3, 5))}, "weights['key']['kernel'] has shape (8, 8)"),
    ],
)
def test_multi_head_attention_refuses_weights_that_do_not_fit(change, message):
    weights = F.init_transformer_block(jax.random.key(0), 8, 2)["attention"]
    arguments = {"weights": weights, "x": jnp.ones((3, 8)), "num_heads": 2} | change
    check_error(ValueError, message, F.multi_head_attention, **arguments)


def test_error_of_transformer_block_names_missing_weights():
    weights = F.init_transformer_block(jax.random.key(0), 8, 2)
    del weights["feedforward_norm"]
    check_error(
        ValueError,
        "weights has no 'feedforward_norm'",
        F.transformer_block,
        weights,
        jnp.ones((3, 8)),
        num_heads=2,
    )


@given(seed=tiny.seeds)
def test_residual_connections_and_norms_equal_their_formulas(seed):
    x = tiny.embeddings(seed, 3, 8)
    wide = np.asarray(x, np.float64)
    tiny.close(F.add_residual(jnp.tanh, x), wide + np.tanh(wide))
    before = wide + np.tanh(oracle.layer_norm(wide, 1.0))
    tiny.close(F.norm_before(jnp.tanh, x, F.layer_norm), before)
    after = oracle.layer_norm(wide + np.tanh(wide), 1.0)
    tiny.close(F.norm_after(jnp.tanh, x, F.layer_norm), after)


# ---- embeddings and positions


@given(seed=tiny.seeds)
def test_position_vectors_may_be_an_array_or_a_function(seed):
    x, table = tiny.embeddings(seed, 5, 8), tiny.embeddings(seed + 1, 7, 8)
    tiny.close(F.encode_positions(x), np.asarray(x) + oracle.sinusoids(range(5), 8))
    tiny.close(F.encode_positions(x, table), np.asarray(x) + np.asarray(table)[:5])
    found = F.encode_positions(x, lambda t, dim: jnp.outer(t, jnp.arange(dim)))
    tiny.close(found, np.asarray(x) + np.outer(np.arange(5), np.arange(8)))
    batch = jnp.stack([x, x])
    tiny.close(F.encode_positions(batch, table)[1], F.encode_positions(x, table))


@pytest.mark.parametrize("shape", [(4, 8), (5, 7), (5,)])
def test_position_vectors_of_wrong_shape_are_rejected(shape):
    x, positions = jnp.ones((5, 8)), jnp.ones(shape)
    check_error(ValueError, "it must be [at least 5, 8]", F.encode_positions, x, positions)


def test_embedding_of_an_id_outside_the_table_is_nan():
    found = F.embed(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 3, -1]))
    np.testing.assert_array_equal(found, [[4, 5], [np.nan, np.nan], [np.nan, np.nan]])


# ---- recurrent and convolutional layers


@given(seed=tiny.seeds, form=st.sampled_from([("rnn", ()), ("lstm", (2,))]))
def test_recurrent_functions_equal_steps_of_their_cell_in_float64(seed, form):
    name, batch = form
    run, step = {"rnn": (F.rnn, F.rnn_cell), "lstm": (F.lstm, F.lstm_cell)}[name]
    weights = F.init_recurrent_layer(jax.random.key(seed), CELLS[name], 3, 4)
    x = np.float32(np.random.default_rng(seed).normal(size=(*batch, 6, 3)))
    found = run(weights, jnp.asarray(x))
    hidden, cell, expected = np.zeros((*batch, 4)), np.zeros((*batch, 4)), []
    steps = jnp.zeros((*batch, 4)) if name == "rnn" else (jnp.zeros((*batch, 4)),) * 2
    w, u = (np.asarray(weights[part]["kernel"], np.float64) for part in ("input", "state"))
    for t in range(6):
        gates = x[..., t, :] @ w + hidden @ u + np.asarray(weights["input"]["bias"])
        if name == "rnn":
            hidden = np.tanh(gates)
        else:
            i, f, g, o = np.split(gates, 4, axis=-1)
            i, f, o = (1 / (1 + np.exp(-gate)) for gate in (i, f, o))
            cell = f * cell + i * np.tanh(g)
            hidden = o * np.tanh(cell)
        expected.append(hidden)
        steps = step(weights, jnp.asarray(x[..., t, :]), steps)
        tiny.close(steps if name == "rnn" else steps[0], hidden)
    tiny.close(found, np.stack(expected, axis=-2))


@given(
    seed=tiny.seeds,
    size=st.integers(1, 4),
    dilation=st.integers(1, 3),
    batch=st.sampled_from([(), (2,)]),
)
def test_causal_convolution_equals_a_loop_in_float64(seed, size, dilation, batch):
    rng = np.random.default_rng(seed)
    x, kernel = rng.normal(size=(*batch, 6, 3)), rng.normal(size=(size, 3, 5))
    bias = rng.normal(size=5)
    expected = np.zeros((*batch, 6, 5)) + bias
    for t in range(6):
        for k in range(size):
            read = t - dilation * (size - 1 - k)
            if read >= 0:
                expected[..., t, :] += x[..., read, :] @ kernel[k]
    weights = {"kernel": jnp.asarray(kernel.reshape(-1, 5)), "bias": jnp.asarray(bias)}
    tiny.close(F.causal_convolution(weights, jnp.asarray(x), dilation=dilation), expected, 1e-4)


def test_causal_convolution_refuses_a_kernel_that_does_not_fit():
    weights = {"kernel": jnp.ones((7, 5))}
    check_error(ValueError, "7 rows", F.causal_convolution, weights, jnp.ones((4, 3)))


# ---- decoding


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=tiny.seeds)
def test_greedy_decode_equals_generate_at_temperature_zero(seed):
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), jnp.asarray(tiny.tokens(seed, 2, 4))
    greedy = jf.Sampler(temperature=0.0)
    out = jf.generate(model, variables, tokens, max_new_tokens=5, sampler=greedy)
    logits = partial(tiny.apply(model), variables)
    found = F.greedy_decode(logits, tokens, 5)
    np.testing.assert_array_equal(found, jnp.concatenate([tokens, out.tokens], axis=1))
    alone = F.greedy_decode(partial(F.decoder, variables["params"], num_heads=4), tokens[1], 5)
    np.testing.assert_array_equal(alone, found[1])
