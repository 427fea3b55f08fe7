"""Attention sinks: every form of attention is the formula in float64, and so are its gradients."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from jaxformer.functional.attention import blockwise, long_sequences
from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.dot_product import dot_product_attention
from jaxformer.functional.attention.fused_kernels import unsupported_scores
from jaxformer.functional.attention.masks import Causal, Packed
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from tests.errors import error_of
from tests.properties import tiny
from tests.slow import mostly_slow

HEADS, KV_HEADS, LENGTH, DIM = 4, 2, 12, 4
FORMS = ("explicit", "blockwise", "long_sequences", "step")


def draw(seed):
    """Returns query, key, value, sinks and a cotangent; a head with a sink of 60 reads nothing."""
    shapes = [(2, n, LENGTH, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
    rng = np.random.default_rng(seed)
    sink = rng.normal(size=HEADS) * 3
    sink[seed % HEADS] = 60.0 if seed % 2 else -60.0
    arrays = [rng.normal(size=shape) for shape in shapes]
    return *arrays, sink, rng.normal(size=shapes[0])


def attention(query, key, value, seen, sink):
    """Softmax over the sink and the scores of the visible keys, whose values alone are summed."""
    key, value = (jnp.repeat(x, query.shape[-3] // x.shape[-3], axis=-3) for x in (key, value))
    scores = jnp.einsum("...hid,...hjd->...hij", query, key) / query.shape[-1] ** 0.5
    scores = jnp.where(seen[..., None, :, :], scores, -jnp.inf)
    sinks = jnp.broadcast_to(sink[:, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([sinks, scores], axis=-1))[..., 1:]
    return jnp.einsum("...hij,...hjv->...hiv", weights, value)


def in_float64(query, key, value, sink, cotangent, seen):
    """Returns the output of the formula and its gradients."""
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in (query, key, value, sink)]
        output, pull_back = jax.vjp(lambda q, k, v, s: attention(q, k, v, seen, s), *arrays)
        return [np.asarray(x) for x in (output, *pull_back(jnp.asarray(cotangent)))]


@cache
def with_gradients(form):
    def run(segment_ids, cotangent, query, key, value, sink):
        info = TokenInfo(LENGTH, None, segment_ids)
        mask, how = Causal() & Packed(), "explicit" if form == "explicit" else "blockwise"
        context = Context(mask, info, info, Scores(sink=sink), how)
        if form == "step":
            context = replace(context, implementation="step")
        output, pull_back = jax.vjp(
            lambda q, k, v, s: attend(
                q, k, v, replace(context, scores=replace(context.scores, sink=s))
            ),
            query,
            key,
            value,
            sink,
        )
        return output, *pull_back(cotangent)

    return jax.jit(run)


@pytest.mark.parametrize("form", mostly_slow(FORMS, "step", slow=FORMS))
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches())
def test_attention_with_sinks_equals_formula(form, seed, segment_ids):
    """Also the gradient of the sink. A query that sees no key gives zeros."""
    if form == "step":  # without padding, whose values would have to be zero
        segment_ids = np.ones_like(segment_ids)
    query, key, value, sink, cotangent = draw(seed)
    seen = visible(segment_ids)
    expected = in_float64(query, key, value, sink, cotangent, seen)
    arguments = [jnp.asarray(x, jnp.float32) for x in (cotangent, query, key, value, sink)]
    with pytest.MonkeyPatch.context() as patch:
        if form == "long_sequences":
            patch.setattr(blockwise, "_LARGEST_TILE", 1)
            patch.setattr(long_sequences, "_LOOP_QUERIES", 5)
            patch.setattr(long_sequences, "_LOOP_KEYS", 4)
        found = with_gradients(form)(jnp.asarray(segment_ids), *arguments)
    for ours, theirs in zip(found, expected, strict=True):
        tiny.close(ours, theirs, 2e-5)


def visible(segment_ids):
    """Returns bool [batch, queries, keys] of causal attention within documents."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return jnp.asarray(same & (segment_ids != 0)[:, None, :] & np.tri(LENGTH, dtype=bool))


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_attention_sink_of_minus_infinity_has_no_effect(seed):
    query, key, value, _, _ = draw(seed)
    arrays = [jnp.asarray(x, jnp.float32) for x in (query, key, value)]
    none = dot_product_attention(*arrays, Causal())
    sink = jnp.full(HEADS, -jnp.inf)
    tiny.close(dot_product_attention(*arrays, Causal(), scores=Scores(sink=sink)), none)
    by_head = np.broadcast_to(np.tri(LENGTH, dtype=bool), (2, HEADS, LENGTH, LENGTH))
    sink = jnp.arange(4.0)
    both = [
        dot_product_attention(*arrays, mask, scores=Scores(sink=sink))
        for mask in (Causal(), jnp.asarray(by_head))
    ]
    tiny.close(*both)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["explicit", "blockwise"])
def test_huge_attention_sink_gives_zero_outputs(implementation):
    """A sink whose power overflows float32 leaves all outputs zero, and gradients finite."""
    arrays = [jnp.asarray(x, jnp.float32) for x in draw(0)[:3]]

    def run(sink):
        scores = Scores(sink=sink)
        return dot_product_attention(*arrays, scores=scores, implementation=implementation).sum()

    total, gradient = jax.value_and_grad(run)(jnp.full(HEADS, 200.0))
    np.testing.assert_array_equal([total, *gradient], 0.0)


def test_fused_kernels_do_not_support_sinks_and_sinks_of_wrong_shape_are_rejected():
    assert "sinks" in unsupported_scores(Scores(sink=jnp.zeros(4)))
    query = jnp.zeros((1, 4, 3, 2))
    wrong = partial(dot_product_attention, scores=Scores(sink=jnp.zeros(3)))
    said = error_of(wrong, query, query, query)
    assert said == "scores.sink has shape (3,); its last axis must be 4, the number of heads"


@pytest.mark.slow
@pytest.mark.parametrize("attention", mostly_slow(["explicit", "blockwise"], "blockwise"))
def test_decoder_with_attention_sinks_in_chunks_equals_one_pass(attention):
    """Chunks of tokens over a cache give the logits of one pass."""
    model = tiny.build(attention_sinks=True, attention=attention, num_layers=1)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, 9)
    whole = tiny.apply(model)(variables, tokens)
    cache, found = jf.init_cache(model, variables, 2, 16), []
    for part in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        logits, cache = jf.extend(model, variables, part, cache)
        found.append(logits)
    tiny.close(jnp.concatenate(found, axis=1), whole, 2e-5)
