"""Cross-entropy equals its definition, computed from all logits and in chunks."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import chunked_cross_entropy, cross_entropy
from jaxformer.functional.losses.chunked import chunked_token_losses
from jaxformer.functional.losses.cross_entropy import token_losses
from tests.properties import tiny


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def reference(logits, targets, weights, smoothing):
    """Computes the definition, token by token, in float64."""
    log_probs, total, count = log_softmax(logits), 0.0, 0.0
    for index, target in np.ndenumerate(targets):
        if weights[index]:
            own, rest = log_probs[index][target], log_probs[index].mean()
            total -= weights[index] * ((1 - smoothing) * own + smoothing * rest)
        count += weights[index]
    return total / count if count else 0.0


def test_cross_entropy_equals_hand_computed_values():
    """Logits 0, ln 2, ln 5 are probabilities 1/8, 2/8, 5/8."""
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]))
    targets = jnp.array([2, 0])
    tiny.close(token_losses(logits, targets), [np.log(8 / 5), np.log(8)], 1e-6)
    tiny.close(cross_entropy(logits, targets), (np.log(8 / 5) + np.log(8)) / 2, 1e-6)
    three_to_one = jnp.array([3.0, 1.0])
    weighted = (3 * np.log(8 / 5) + np.log(8)) / 4
    tiny.close(cross_entropy(logits, targets, three_to_one), weighted, 1e-6)
    smoothed = 0.7 * np.log(8 / 5) + 0.1 * (np.log(8) + np.log(4) + np.log(8 / 5))
    tiny.close(token_losses(logits, targets, 0.3)[0], smoothed, 1e-6)


WEIGHTS = st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=10, max_size=10)
SMOOTHING = st.sampled_from([0.0, 0.1])


@pytest.mark.slow
@given(seed=tiny.seeds, weights=WEIGHTS, smoothing=SMOOTHING, size=st.sampled_from([1.0, 1e3]))
def test_cross_entropy_is_the_weighted_mean_over_tokens(seed, weights, smoothing, size):
    """Σ w loss / Σ w over tokens, not over batch elements.

    A token of weight 0 is ignored whatever its target (−100 too). If all weights are 0 the loss is
    0. Huge logits do not overflow.
    """
    weights = np.float32(weights).reshape(2, 5)
    logits = np.float32(size * np.random.default_rng(seed).normal(size=(2, 5, 7)))
    targets = tiny.tokens(seed, 2, 5, vocab_size=7)
    ignored = np.where(weights == 0, -100, targets)
    loss = cross_entropy(*map(jnp.asarray, (logits, ignored, weights)), label_smoothing=smoothing)
    tiny.close(loss, reference(logits, targets, weights, smoothing))


def test_out_of_range_target_raises_error_or_gives_nan_loss_inside_jit():
    """If its weight is not 0: ValueError for a concrete target, NaN inside jit."""
    hidden, kernel = tiny.embeddings(0, 1, 3, 4), tiny.embeddings(1, 4, 7)
    weights = jnp.array([[1.0, 0.5, 1.0]])
    for loss in (
        lambda *targets_and_weights: cross_entropy(hidden @ kernel, *targets_and_weights),
        lambda *targets_and_weights: chunked_cross_entropy(hidden, kernel, *targets_and_weights),
    ):
        compiled = jax.jit(loss)
        for bad in (-100, -1, 7):
            targets = jnp.array([[1, bad, 2]])
            for arguments in ((targets,), (targets, weights)):
                with pytest.raises(ValueError, match=f"targets contains {bad}"):
                    loss(*arguments)
                assert np.isnan(compiled(*arguments))


def test_an_ignored_target_leaves_finite_gradients():
    """The gradient at a token of weight 0 is 0 even if its target is −100."""
    logits, weights = tiny.embeddings(0, 3, 7), jnp.array([1.0, 0.0, 1.0])
    gradient = jax.grad(cross_entropy)(logits, jnp.array([1, -100, 2]), weights)
    assert np.isfinite(gradient).all() and not gradient[1].any() and gradient[0].any()


@pytest.mark.slow
def test_bfloat16_logits_are_scored_in_float32():
    """The loss of bfloat16 logits equals that of the same numbers in float32."""
    logits = (10 + tiny.embeddings(0, 64, 50)).astype(jnp.bfloat16)
    targets = jnp.asarray(tiny.tokens(0, 64, vocab_size=50))
    loss = cross_entropy(logits, targets)
    expected = reference(np.asarray(logits, np.float64), np.asarray(targets), np.ones(64), 0.0)
    assert loss.dtype == jnp.float32
    tiny.close(loss, expected, 1e-6)


@cache
def both(chunk, with_bias, smoothing):
    """Compiles loss and gradients of the chunked and of the plain loss.

    The gradients are for hidden, kernel, bias and weights. With a bias, the logits are capped too.
    """

    def chunked(hidden, kernel, bias, targets, weights):
        return 3 * chunked_cross_entropy(
            hidden,
            kernel,
            targets,
            weights,
            bias=bias if with_bias else None,
            cap=2.0 if with_bias else None,
            label_smoothing=smoothing,
            chunk=chunk,
        )

    def plain(hidden, kernel, bias, targets, weights):
        logits = hidden @ kernel
        logits = 2.0 * jnp.tanh((logits + bias) / 2.0) if with_bias else logits
        return 3 * cross_entropy(logits, targets, weights, smoothing)

    return [jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 4))) for loss in (chunked, plain)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunk, with_bias, smoothing",
    [(1, True, 0.0), (3, True, 0.1), (4, False, 0.0), (99, True, 0.1)],
)
@given(seed=tiny.seeds, weights=WEIGHTS)
def test_chunked_cross_entropy_equals_cross_entropy(chunk, with_bias, smoothing, seed, weights):
    """Values and gradients agree when the chunk size does not divide the number of tokens.

    Some weights are 0 with target −100. The factor 3 on the loss must scale the gradients too.
    """
    weights = np.float32(weights).reshape(2, 5)
    targets = np.where(weights == 0, -100, tiny.tokens(seed, 2, 5, vocab_size=7))
    hidden, kernel = tiny.embeddings(seed, 2, 5, 4), tiny.embeddings(seed + 1, 4, 7)
    arguments = hidden, kernel, tiny.embeddings(seed + 2, 7), targets, weights
    chunked, plain = (loss(*arguments) for loss in both(chunk, with_bias, smoothing))
    tiny.all_close(chunked, plain)
    logits = np.asarray(hidden @ kernel)
    logits = 2.0 * np.tanh((logits + arguments[2]) / 2.0) if with_bias else logits
    tiny.close(chunked[0], 3 * reference(logits, np.maximum(targets, 0), weights, smoothing))


@cache
def in_chunks_of(chunk):
    return jax.jit(partial(chunked_token_losses, chunk=chunk, cap=2.0))


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_chunked_token_losses_equal_token_losses(seed):
    """The chunk size may or may not divide the tokens. An out-of-range target gives NaN."""
    hidden, kernel = tiny.embeddings(seed, 2, 5, 4), tiny.embeddings(seed + 1, 4, 7)
    bias, targets = tiny.embeddings(seed + 2, 7), tiny.tokens(seed, 2, 5, vocab_size=8)
    wanted = token_losses(2 * jnp.tanh((hidden @ kernel + bias) / 2), jnp.asarray(targets))
    for chunk in (3, 5, 99):
        found = in_chunks_of(chunk)(hidden, kernel, targets, bias=bias)
        np.testing.assert_array_equal(np.isnan(found), targets == 7)
        tiny.close(found, wanted, where=targets < 7)


def test_cross_entropy_rejects_incompatible_shapes_even_in_jit():
    """Otherwise a broadcast weight would be counted once, not once per token."""
    logits, targets = jnp.zeros((2, 5, 7)), jnp.zeros((2, 5), int)

    def in_chunks(logits, *rest):
        return chunked_cross_entropy(logits, jnp.eye(7), *rest)

    for loss in (cross_entropy, in_chunks):
        for call in (loss, jax.jit(loss)):
            with pytest.raises(ValueError, match=r"weights is float32 \[2, 1\]"):
                call(logits, targets, jnp.ones((2, 1)))
            with pytest.raises(ValueError, match=r"targets is int32 \[2, 4\]"):
                call(logits, targets[:, 1:])
        assert loss(logits[:0], targets[:0]) == 0.0
    with pytest.raises(ValueError, match="chunk is 0"):
        chunked_cross_entropy(logits, jnp.eye(7), targets, chunk=0)


def operations(function, *arguments):
    """Yields every equation of the program of `function`, including nested programs."""
    programs = [jax.make_jaxpr(function)(*arguments).jaxpr]
    while programs:
        for equation in programs.pop().eqns:
            yield equation
            programs += [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]


def test_chunked_cross_entropy_uses_float32_and_never_stores_all_logits():
    """512 tokens in chunks of 64: no array is nearly as large as [512, vocab].

    The logits of a chunk are float32 whatever the dtype of the activations. The three products of
    a chunk have operands in the dtype of the activations, also those with the gradient.
    """
    hidden, kernel = jnp.zeros((512, 4), jnp.bfloat16), jnp.zeros((4, 100))
    targets = jnp.zeros(512, int)

    def loss(hidden, kernel):
        return chunked_cross_entropy(hidden, kernel, targets, chunk=64)

    program = list(operations(jax.grad(loss, argnums=(0, 1)), hidden, kernel))
    assert max(v.aval.size for equation in program for v in equation.outvars) < 512 * 100 / 4
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, kernel).as_text()
    products = re.findall(
        r"dot_general .*: \(tensor<(\w+)>, tensor<(\w+)>\) -> tensor<(\w+)>", text
    )
    assert {shape.split("x")[-1] for *operands, _ in products for shape in operands} == {"bf16"}
    logits = [result for *_, result in products if result.startswith("64x100x")]
    assert len(products) == 3 and logits == ["64x100xf32"]


def test_cross_entropy_and_its_gradient_use_no_scatter():
    """Neither the loss nor its gradient: a scatter writes an array of zeros as large as logits."""
    logits, targets = jnp.zeros((3, 7)), jnp.zeros(3, int)
    program = operations(jax.grad(lambda x: cross_entropy(x, targets)), logits)
    assert not [e for e in program if e.primitive.name.startswith(("scatter", "gather"))]
