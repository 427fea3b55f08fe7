"""Inputs for fused attention kernels, and their comparison with explicit attention."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.masks import Packed
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.positions import DocumentCursor, document_positions


def arrays(seed, length, keys=None, heads=4, kv_heads=2, batch=2, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = [(batch, heads, length, 8), (batch, kv_heads, keys, 8), (batch, kv_heads, keys, 8)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def context_of(mask, length, keys=None, segment_ids=None, scores=Scores()):  # noqa: B008
    """The context of a pass over complete sequences, or of a source with padding."""
    keys = length if keys is None else keys
    if segment_ids is None:
        return Context(mask, TokenInfo(length), TokenInfo(keys), scores, in_order=True)
    segment_ids = jnp.asarray(segment_ids)
    if keys != length:
        return Context(mask, TokenInfo(length), TokenInfo(keys, None, segment_ids), scores)
    documents, positions, _ = document_positions(
        segment_ids, DocumentCursor.begin(len(segment_ids))
    )
    counts = mask.needs_positions and any(isinstance(rule, Packed) for rule in mask.rules())
    info = TokenInfo(length, positions if counts else None, documents)
    return Context(mask, info, info, scores, in_order=True)


def compare_with_explicit(placement, context, query, key, value, tolerance=2e-5):
    """Compares outputs and gradients of the placement's kernel with those of explicit attention."""
    weights = jnp.asarray(np.random.default_rng(9).normal(size=query.shape), jnp.float32)

    def loss(arrays, implementation):
        chosen = replace(context, implementation=implementation, placement=placement)
        output = attend(*arrays, chosen)
        return (output * weights).sum(), output

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames="implementation")
    (_, fused), gradients = run((query, key, value), implementation="fused")
    (_, explicit), expected = run((query, key, value), implementation="explicit")
    assert np.isfinite(fused).all()
    np.testing.assert_allclose(fused, explicit, atol=tolerance, rtol=5 * tolerance)
    for got, wanted in zip(gradients, expected, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, wanted, atol=5 * tolerance, rtol=50 * tolerance)


@cache
def compiled_comparison(placement, mask):
    """Returns a comparison with explicit attention that compiles once for all segment_ids."""

    def run(queries, keys, query, key, value, implementation):
        context = Context(
            mask, queries, keys, Scores(), implementation, in_order=True, placement=placement
        )
        return jax.vjp(lambda *x: attend(*x, context), query, key, value)[0], jax.grad(
            lambda *x: (attend(*x, context) ** 2).sum(), argnums=(0, 1, 2)
        )(query, key, value)

    run = jax.jit(run, static_argnames="implementation")

    def check(*arguments):
        found, expected = (run(*arguments, implementation=name) for name in ("fused", "explicit"))
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-3), found, expected)

    return check
