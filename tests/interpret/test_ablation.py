"""Ablation of heads equals patches of `inspect`, edited weights and NumPy's statistics."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.losses.cross_entropy import token_losses
from jaxformer.interpret.ablation import ablate_heads, ablate_sets, head_sets
from jaxformer.interpret.layers import ATTENTIONS
from jaxformer.interpret.texts import next_token_batch, repeated_batch
from jaxformer.training.batch import Batch
from tests.errors import error_of
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROWS, LENGTH, HEADS = 5, 8, (2, 4)
few = settings(max_examples=max(4, settings().max_examples // 5))


@cache
def decoder():
    return tiny.build(positions="rotary")


@cache
def pair():
    return tiny.build(jf.EncoderDecoderConfig, num_layers=1, num_encoder_layers=1)


def setup(seed):
    return decoder(), tiny.weights(decoder(), seed), tiny.tokens(seed, ROWS, LENGTH)


def losses(model, variables, batch, patch=None):
    """Returns the mean loss of each row, by one pass of `inspect` and NumPy."""
    source = None if batch.source is None else np.asarray(batch.source)
    seen = jf.inspect(
        model, variables, batch.inputs, segments=batch.segments, source=source, patch=patch
    )
    each = np.asarray(token_losses(seen.logits, jnp.asarray(batch.targets)), np.float64)
    weights = np.asarray(batch.weights, np.float64)
    return (weights * each).sum(axis=1) / weights.sum(axis=1)


def means(model, variables, batch, point="attention.heads"):
    """Returns the mean output of each head over all tokens except padding."""
    source = None if batch.source is None else np.asarray(batch.source)
    heads = jf.inspect(
        model, variables, batch.inputs, segments=batch.segments, source=source, capture=(point,)
    ).captured[point]
    real = np.ones(batch.inputs.shape, bool) if batch.segments is None else batch.segments != 0
    each = np.moveaxis(np.asarray(heads), 3, 2)[:, np.asarray(real)]
    return each.mean(axis=1)[:, None, :, None, :]


@pytest.mark.slow
@few
@given(seed=tiny.seeds, segments=tiny.segment_batches(batch=ROWS, length=LENGTH, ids=(1,)))
def test_each_head_is_that_of_a_patch(seed, segments):
    """A plain loop patches one head at a time. Padding changes neither mean nor loss."""
    model, variables, tokens = setup(seed)
    segments[:, :2] = 1  # every row has a target
    batch = next_token_batch(model, tokens, segments)
    found = ablate_heads(model, variables, batch, rows_at_once=2)
    whole, mean = losses(model, variables, batch), means(model, variables, batch)
    tiny.close(found.loss, whole.mean())
    for layer, head in [(0, 0), (0, 3), (1, 2)]:
        where = head_sets(HEADS, [[(layer, head)]])[0][:, None, :, None, None]
        patch = {"attention.heads": jf.Patch(where, mean)}
        expected = losses(model, variables, batch, patch) - whole
        tiny.close(found.differences[layer, head], expected)


@pytest.mark.slow
@few
@given(seed=tiny.seeds, heads=st.sets(st.sampled_from(list(np.ndindex(HEADS))), min_size=2))
def test_a_set_is_one_patch_of_all_its_heads(seed, heads):
    """It differs from the sum of the effects of its heads."""
    model, variables, tokens = setup(seed)
    batch = next_token_batch(model, tokens)
    sets = head_sets(HEADS, [heads, np.ndindex(HEADS)])
    found = ablate_sets(model, variables, batch, sets)
    whole, mean = losses(model, variables, batch), means(model, variables, batch)
    for where, differences in zip(sets, found.differences, strict=True):
        patch = {"attention.heads": jf.Patch(where[:, None, :, None, None], mean)}
        tiny.close(differences, losses(model, variables, batch, patch) - whole)


@pytest.mark.slow
@few
@given(seed=tiny.seeds)
def test_standard_errors_are_those_of_numpy(seed):
    model, variables, tokens = setup(seed)
    found = ablate_heads(model, variables, next_token_batch(model, tokens))
    differences = np.asarray(found.differences, np.float64)
    tiny.close(found.effect, differences.mean(axis=-1), 1e-6)
    expected = np.std(differences, axis=-1, ddof=1) / np.sqrt(ROWS)
    np.testing.assert_allclose(found.standard_error, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_with_a_mean_of_zero_it_removes_the_rows_of_the_output_projection():
    """Every token occurs with its negative: the two outputs of a head cancel.

    The sequences have one token each, so a head's output is its value, which is linear in the
    embedding if there is neither bias nor norm.
    """
    model = tiny.build(
        norm_position="output", use_bias=False, positions="rotary", tie_embeddings=False
    )
    variables = tiny.weights(model, 0)
    params = dict(variables["params"])
    vectors = params["embedding"]["tokens"]
    params["embedding"] = {**params["embedding"], "tokens": vectors.at[1].set(-vectors[0])}
    batch = Batch(np.array([[0], [1]]), np.array([[2], [3]]))
    found = ablate_heads(model, {"params": params}, batch).differences[0]
    weighted = batch._replace(weights=np.ones((2, 1)))
    whole = losses(model, {"params": params}, weighted)
    kernel = params["blocks"]["attention"]["output"]["kernel"]
    for head in range(HEADS[1]):
        rows = slice(head * 4, head * 4 + 4)  # head_dim is 4
        blocks = dict(params["blocks"])
        output = {**blocks["attention"]["output"], "kernel": kernel.at[0, rows].set(0.0)}
        blocks["attention"] = {**blocks["attention"], "output": output}
        expected = losses(model, {"params": {**params, "blocks": blocks}}, weighted) - whole
        tiny.close(found[head], expected)
        assert abs(expected).max() > 1e-3


@pytest.mark.parametrize("attention", mostly_slow(ATTENTIONS))
def test_heads_of_an_encoder_decoder_are_patched(attention):
    model = pair()
    variables, source = tiny.weights(model, 0), tiny.tokens(3, ROWS, 6)
    batch = next_token_batch(model, tiny.tokens(0, ROWS, LENGTH), None, source)
    found = ablate_heads(model, variables, batch, attention, rows_at_once=3)
    point = f"{attention}.heads"
    whole = losses(model, variables, batch)
    heads = jf.inspect(model, variables, batch.inputs, source=source, capture=(point,))
    mean = heads.captured[point].mean(axis=(1, 3), keepdims=True)
    where = head_sets((1, 4), [[(0, 2)]])[0][:, None, :, None, None]
    patch = {point: jf.Patch(where, mean)}
    tiny.close(found.differences[0, 2], losses(model, variables, batch, patch) - whole)


def test_next_token_targets_are_those_of_loops():
    """The next token of the same document, with padding between; the last token has none."""
    tokens = np.arange(8)[None] + np.array([[0], [1]])
    segments = np.array([[1, 1, 0, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 0, 3, 3]])
    batch = next_token_batch(decoder(), tokens, segments)
    expected = [{0: 1, 1: 3, 4: 5}, {1: 3, 2: 4, 3: 5, 6: 8}]
    for row, wanted in enumerate(expected):
        counted = np.flatnonzero(batch.weights[row])
        assert {int(i): int(batch.targets[row, i]) for i in counted} == wanted


def test_a_prefix_is_not_predicted():
    model = tiny.build(prefix=3)
    batch = next_token_batch(model, tiny.tokens(0, 2, 6))
    assert np.asarray(batch.weights).tolist() == [[0, 0, 1, 1, 1, 0]] * 2


def test_repeated_rows_count_only_their_second_copy():
    batch = repeated_batch(9, 11, 3, seed=1)
    inputs = np.asarray(batch.inputs)
    assert inputs.shape == (3, 10) and (inputs[:, :5] == inputs[:, 5:]).all()
    assert np.asarray(batch.weights)[0].tolist() == [0] * 5 + [1] * 4 + [0]
    assert (np.asarray(batch.targets)[:, :-1] == inputs[:, 1:]).all()
    assert len({row.tobytes() for row in inputs}) == 3


def refused(change):
    """Returns arguments of `ablate_sets` after a change to one."""
    model, variables, tokens = setup(0)
    batch = next_token_batch(model, tokens)
    given = {
        "model": model,
        "variables": variables,
        "batch": batch,
        "sets": head_sets(HEADS, [[(0, 0)]]),
        "attention": "attention",
        "rows_at_once": 8,
    }
    return tuple({**given, **change(given)}.values())


WRONG = {
    "model is a Recurrent, which has no heads of 'attention'; accepted are Transformers": (
        lambda _: {"model": tiny.build(jf.RecurrentConfig, cell="lstm")}
    ),
    "model is a Convolutional, which has no heads of 'attention'": (
        lambda _: {"model": tiny.build(jf.ConvolutionalConfig, kernel_size=3)}
    ),
    "model is a RecurrentEncoderDecoder, which has no heads of 'cross_attention'": (
        lambda _: {
            "model": tiny.build(jf.RecurrentEncoderDecoderConfig),
            "attention": "cross_attention",
        }
    ),
    "no heads of 'cross_attention'; its attention is attention": (
        lambda _: {"attention": "cross_attention"}
    ),
    "attention is 'self'; it must be one of attention, cross_attention, encoder.attention": (
        lambda _: {"attention": "self"}
    ),
    "rows_at_once is 0; it must be a whole number of at least 1": lambda _: {"rows_at_once": 0},
    "sets are bool (1, 3, 4); they must be bool [sets, 2, 4]": (
        lambda _: {"sets": np.zeros((1, 3, 4), bool)}
    ),
    "sets are (0, 2, 4); there must be at least one set": (
        lambda _: {"sets": np.zeros((0, 2, 4), bool)}
    ),
    "inputs are (1, 8); there must be at least two rows": (
        lambda given: {"batch": Batch(*(x if x is None else x[:1] for x in given["batch"]))}
    ),
    "row 1 has no target that counts": (
        lambda given: {
            "batch": given["batch"]._replace(
                weights=np.eye(ROWS, LENGTH)[[0, -1] * 2 + [0]] * [[1], [0], [1], [1], [1]]
            )
        }
    ),
    "tokens hold id 13; vocab_size is 13": (
        lambda given: {"batch": given["batch"]._replace(inputs=np.full((ROWS, LENGTH), 13))}
    ),
    "targets are (5, 3); outputs are (5, 8)": (
        lambda given: {"batch": given["batch"]._replace(targets=np.zeros((ROWS, 3), int))}
    ),
    "variables hold weights; they must hold 'params'": (
        lambda given: {"variables": {"weights": given["variables"]}}
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    assert message in error_of(ablate_sets, *refused(WRONG[message]))


def test_a_head_that_is_not_there_is_named():
    assert "set 0 holds layer 2, head 0; layers are 0 … 1 and heads 0 … 3" in error_of(
        head_sets, HEADS, [[(2, 0)]]
    )


def test_an_encoder_needs_targets():
    model = tiny.build(jf.EncoderConfig)
    assert "model is a Encoder, which predicts hidden tokens" in error_of(
        next_token_batch, model, tiny.tokens(0, 2, 4)
    )


def test_empty_rows_are_named():
    assert "there must be at least two rows" in error_of(
        ablate_heads, decoder(), tiny.weights(decoder(), 0), Batch(*jnp.zeros((2, 2, 0), int))
    )
