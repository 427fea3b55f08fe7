"""The splash kernel, run on the CPU: its values and gradients are those of explicit attention."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import splash
from jaxformer.functional.attention import Context, attend
from jaxformer.functional.fused_kernels import SPLASH
from jaxformer.functional.masks import All, Causal, Near, Packed, Padding, Prefix, Window
from jaxformer.functional.placement import OneDevice
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.functional.scores import Scores
from jaxformer.functional.token_info import TokenInfo

INTERPRETED = SPLASH._replace(attention=partial(splash.splash_attention, interpret=True))
PLACEMENT = OneDevice(INTERPRETED)


def arrays(seed, length, keys=None, heads=4, kv_heads=2, batch=2, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = [(batch, heads, length, 8), (batch, kv_heads, keys, 8), (batch, kv_heads, keys, 8)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def context_of(mask, length, keys=None, segments=None, scores=Scores()):  # noqa: B008
    """The context of a pass over complete sequences, or of a source with padding."""
    keys = length if keys is None else keys
    if segments is None:
        return Context(mask, TokenInfo(length), TokenInfo(keys), scores, in_order=True)
    segments = jnp.asarray(segments)
    if keys != length:
        return Context(mask, TokenInfo(length), TokenInfo(keys, None, segments), scores)
    documents, positions, _ = document_positions(segments, DocumentCursor.begin(len(segments)))
    info = TokenInfo(length, positions if mask.needs_positions else None, documents)
    return Context(mask, info, info, scores, in_order=True)


def compare(context, query, key, value, tolerance=2e-5):
    """Compares outputs and gradients of the kernel with those of explicit attention."""
    weights = jnp.asarray(np.random.default_rng(9).normal(size=query.shape), jnp.float32)

    def loss(query, key, value, implementation):
        chosen = replace(context, implementation=implementation, placement=PLACEMENT)
        output = attend(query, key, value, chosen)
        return (output * weights).sum(), output

    run = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True), static_argnames="implementation"
    )
    (_, fused), gradients = run(query, key, value, implementation="fused")
    (_, explicit), expected = run(query, key, value, implementation="explicit")
    np.testing.assert_allclose(fused, explicit, atol=tolerance, rtol=1e-4)
    for got, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=5 * tolerance, rtol=1e-3)


PACKED = [[1] * 5 + [2] * 70 + [3] * 60 + [0] * 5, [0] * 3 + [1] * 100 + [2] * 37]
GAPS = [[1] * 5 + [0] * 2 + [1] * 133, [1] * 70 + [0] * 3 + [1] * 30 + [2] * 37]


@pytest.mark.parametrize("length", [12, 128, 140, 300])
@pytest.mark.parametrize(
    "mask", [All(), Causal(), Causal() & Window(5), Near(3), Prefix(4), Window(6)], ids=str
)
def test_dense_rows(mask, length):
    compare(context_of(mask, length), *arrays(0, length))


@pytest.mark.parametrize("segments", [PACKED, GAPS], ids=["packed", "gaps"])
@pytest.mark.parametrize(
    "mask",
    [
        Causal() & Packed(),
        Packed(),
        Causal() & Window(5) & Packed(),
        Near(3) & Packed(),
    ],
    ids=str,
)
def test_packed_rows(mask, segments):
    compare(context_of(mask, 140, segments=segments), *arrays(1, 140))


@pytest.mark.parametrize("mask", [Padding(), Causal() & Padding()], ids=str)
def test_padded_rows(mask):
    segments = [[0] * 7 + [1] * 133, [1] * 100 + [0] * 40]
    compare(context_of(mask, 140, segments=segments), *arrays(2, 140))


@pytest.mark.parametrize("lengths", [(12, 5), (5, 140), (128, 128 + 1), (3, 128)])
def test_a_source(lengths):
    length, keys = lengths
    segments = np.ones((2, keys), int)
    segments[0, 2:] = 0
    segments[1] = 0  # a source without tokens: its queries give zeros
    context = context_of(Padding(), length, keys, segments)
    compare(context, *arrays(3, length, keys))
    output = attend(
        *arrays(3, length, keys), replace(context, implementation="fused", placement=PLACEMENT)
    )
    assert not np.asarray(output[1]).any()
