"""Grades the exercises about induction heads, by the losses of the student's model."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from test_lecture_10 import close, random

import jaxformer as jf

# The loss of a uniform guess, in nats per token.
GUESS = np.log(24)


def losses(logits, tokens):
    """Returns the mean losses of the first and of the second copy, computed in float64."""
    log_probs, size = log_softmax(np.asarray(logits, np.float64), axis=-1), len(tokens[0]) // 2
    rows = np.arange(len(tokens))[:, None]
    found = -log_probs[rows, np.arange(2 * size - 1), np.asarray(tokens)[:, 1:]]
    return found[:, : size - 1].mean(), found[:, size:].mean()


def random_tokens(seed, length=20):
    return jax.random.randint(jax.random.key(seed), (64, length), 0, 24)


def copies(seed):
    block = random_tokens(seed, 10)
    return jnp.concatenate([block, block], axis=1)


def check_breaks(model, patched, variables, patch=None):
    """Checks that a model no longer copies, and predicts all other tokens as well as before.

    Args:
        model: The trained model.
        patched: The model to check.
        variables: The variables of both models.
        patch: The edit of the student, or None.
    """
    tokens, other = copies(7), random_tokens(8)
    first, second = losses(jf.inspect(model, variables, tokens).logits, tokens)
    assert second < GUESS / 2, "the trained model does not copy; run all cells of the notebook"
    found = jf.inspect(patched, variables, tokens, patch=patch or {}).logits
    now_first, now_second = losses(found, tokens)
    assert now_second > second + 0.8 * (GUESS - second), (
        f"the model still copies: the loss of the second copy is only {now_second:.2f} nats"
    )
    assert now_first < first + 0.1, "the loss of the first copy has risen"
    before = losses(jf.inspect(model, variables, other).logits, other)
    now = losses(jf.inspect(patched, variables, other, patch=patch or {}).logits, other)
    assert max(np.subtract(now, before)) < 0.1, "the loss of random tokens has risen"


@pytest.mark.points(2)
def test_copy_losses_equal_cross_entropy_of_each_copy(student):
    """1. The loss of each copy"""
    for size in (3, 10):
        tokens = random_tokens(0, 2 * size)
        logits = 300 * random(1, 64, 2 * size, 24)
        np.testing.assert_allclose(
            student.copy_losses(logits, tokens), losses(logits, tokens), rtol=1e-5
        )


def attention_weights():
    return jax.nn.softmax(3 * random(2, 2, 5, 3, 8, 8))


@pytest.mark.points(1)
def test_previous_token_scores_equal_loops(student):
    """2. Heads that attend to the previous token"""
    weights = attention_weights()
    expected = np.mean([weights[..., t, t - 1] for t in range(1, 8)], axis=0).mean(1)
    close(student.previous_token_scores(weights), expected)


@pytest.mark.points(2)
def test_induction_scores_equal_loops(student):
    """3. Heads that attend to the token after an earlier copy"""
    weights = attention_weights()
    expected = np.mean([weights[..., t, t - 3] for t in range(4, 8)], axis=0).mean(1)
    close(student.induction_scores(weights), expected)


def scale(value, at, factors):
    return value * factors[at.layer][:, None, None]


@cache
def losses_without(model, seed):
    """Returns (variables, tokens, losses) of a random model.

    The losses [2, layers, heads] are those on the first and the second copy without each head.
    """
    tokens = copies(seed)
    variables = model.init(jax.random.key(seed), tokens)
    shape = model.config.num_layers, model.config.num_heads
    expected = np.zeros((2, *shape))
    for head in np.ndindex(*shape):
        edit = jf.Edit(scale, jnp.ones(shape).at[head].set(0))
        found = jf.inspect(model, variables, tokens, patch={"attention.heads": edit})
        expected[:, *head] = losses(found.logits, tokens)
    return variables, tokens, expected


@pytest.mark.points(2)
def test_losses_without_heads_equal_ablations(student):
    """4. The losses without a head"""
    variables, tokens, expected = losses_without(student.model, 3)
    found = student.losses_without_heads(student.model, variables, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def reversed_heads(variables, num_heads):
    """Returns the variables of the same model with its heads in reverse order."""

    def reverse(x, axis):
        heads = jnp.moveaxis(x, axis, 0)
        heads = heads.reshape(num_heads, -1, *heads.shape[1:])[::-1].reshape(heads.shape)
        return jnp.moveaxis(heads, 0, axis)

    params = jax.tree.map(lambda x: x, variables["params"])
    attention = params["blocks"]["attention"]
    for name in ("query", "key", "value"):
        attention[name] = jax.tree.map(lambda x: reverse(x, -1), attention[name])
    attention["output"]["kernel"] = reverse(attention["output"]["kernel"], -2)
    return {"params": params}


@pytest.mark.points(3)
def test_edit_of_one_head_breaks_induction(student):
    """5. Break induction by an edit"""
    model, given = student.model, student.variables
    for variables in (given, reversed_heads(given, model.config.num_heads)):
        patch = student.break_induction(model, variables, copies(9))
        assert set(patch) == {"attention.heads"}, "the patch must have one key, 'attention.heads'"
        found = [
            jf.inspect(model, variables, copies(7), capture=("attention.heads",), patch=x)
            for x in ({}, patch)
        ]
        before, after = (np.asarray(x.captured["attention.heads"]) for x in found)
        differs = np.any(before != after, axis=(1, 3, 4))
        layer = differs.any(axis=1).argmax()  # Later layers also read the changed heads.
        assert differs[layer].sum() == 1, (
            f"the patch changes {differs[layer].sum()} heads; it must change exactly one"
        )
        check_breaks(model, model, variables, patch)


@pytest.mark.points(2)
def test_config_breaks_induction(student):
    """6. Break induction without an edit"""
    config = student.config_without_induction(student.model.config)
    check_breaks(student.model, jf.Decoder(config), student.variables)
