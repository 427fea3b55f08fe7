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
SEQUENCES, LENGTH, HEADS = 5, 8, (2, 4)
few = settings(max_examples=max(4, settings().max_examples // 5))


@cache
def decoder():
    return tiny.build(positions="rotary")


@cache
def pair():
    return tiny.build(jf.EncoderDecoderConfig, num_layers=1, num_encoder_layers=1)


def setup(seed):
    return decoder(), tiny.weights(decoder(), seed), tiny.tokens(seed, SEQUENCES, LENGTH)


def losses(model, variables, batch, patch=None):
    """Returns the mean loss of each sequence, by one pass of `inspect` and NumPy."""
    source = None if batch.source is None else np.asarray(batch.source)
    seen = jf.inspect(
        model, variables, batch.inputs, segment_ids=batch.segment_ids, source=source, patch=patch
    )
    each = np.asarray(token_losses(seen.logits, jnp.asarray(batch.targets)), np.float64)
    weights = np.asarray(batch.weights, np.float64)
    return (weights * each).sum(axis=1) / weights.sum(axis=1)


def means(model, variables, batch, point="attention.heads"):
    """Returns the mean output of each head over all tokens except padding."""
    source = None if batch.source is None else np.asarray(batch.source)
    heads = jf.inspect(
        model,
        variables,
        batch.inputs,
        segment_ids=batch.segment_ids,
        source=source,
        capture=(point,),
    ).captured[point]
    real = (
        np.ones(batch.inputs.shape, bool) if batch.segment_ids is None else batch.segment_ids != 0
    )
    each = np.moveaxis(np.asarray(heads), 3, 2)[:, np.asarray(real)]
    return each.mean(axis=1)[:, None, :, None, :]


@pytest.mark.slow
@few
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(batch=SEQUENCES, length=LENGTH, ids=(1,)))
def test_ablating_a_head_equals_patching_it_with_its_mean_output(seed, segment_ids):
    """A plain loop patches one head at a time. Padding changes neither mean nor loss."""
    model, variables, tokens = setup(seed)
    segment_ids[:, :2] = 1  # every sequence has a target
    batch = next_token_batch(model, tokens, segment_ids)
    found = ablate_heads(model, variables, batch, batch_size_within_memory=2)
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
def test_ablating_a_set_of_heads_equals_patching_them_with_their_means(seed, heads):
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
def test_standard_errors_of_ablation_equal_numpy(seed):
    model, variables, tokens = setup(seed)
    found = ablate_heads(model, variables, next_token_batch(model, tokens))
    differences = np.asarray(found.differences, np.float64)
    tiny.close(found.effect, differences.mean(axis=-1), 1e-6)
    expected = np.std(differences, axis=-1, ddof=1) / np.sqrt(SEQUENCES)
    np.testing.assert_allclose(found.standard_error, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_zero_ablation_equals_removing_rows_of_the_output_projection():
    """Every token occurs with its negative: the two outputs of a head cancel.

    The sequences have one token each, so a head's output is its value, which is linear in the
    embedding if there is neither bias nor norm.
    """
    model = tiny.build(
        norm_position="post_sublayer", use_bias=False, positions="rotary", tie_embeddings=False
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
def test_ablation_supports_encoder_decoders(attention):
    model = pair()
    variables, source = tiny.weights(model, 0), tiny.tokens(3, SEQUENCES, 6)
    batch = next_token_batch(model, tiny.tokens(0, SEQUENCES, LENGTH), None, source)
    found = ablate_heads(model, variables, batch, attention, batch_size_within_memory=3)
    point = f"{attention}.heads"
    whole = losses(model, variables, batch)
    heads = jf.inspect(model, variables, batch.inputs, source=source, capture=(point,))
    mean = heads.captured[point].mean(axis=(1, 3), keepdims=True)
    where = head_sets((1, 4), [[(0, 2)]])[0][:, None, :, None, None]
    patch = {point: jf.Patch(where, mean)}
    tiny.close(found.differences[0, 2], losses(model, variables, batch, patch) - whole)


def test_next_token_targets_equal_those_of_a_python_loop():
    """The next token of the same document, with padding between; the last token has none."""
    tokens = np.arange(8)[None] + np.array([[0], [1]])
    segment_ids = np.array([[1, 1, 0, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 0, 3, 3]])
    batch = next_token_batch(decoder(), tokens, segment_ids)
    expected = [{0: 1, 1: 3, 4: 5}, {1: 3, 2: 4, 3: 5, 6: 8}]
    for index, wanted in enumerate(expected):
        counted = np.flatnonzero(batch.weights[index])
        assert {int(i): int(batch.targets[index, i]) for i in counted} == wanted


def test_next_token_targets_exclude_the_prefix():
    model = tiny.build(prefix=3)
    batch = next_token_batch(model, tiny.tokens(0, 2, 6))
    assert np.asarray(batch.weights).tolist() == [[0, 0, 1, 1, 1, 0]] * 2


def test_batch_of_repeated_tokens_scores_only_targets_in_the_second_copy():
    batch = repeated_batch(9, 11, 3, seed=1)
    inputs = np.asarray(batch.inputs)
    assert inputs.shape == (3, 10) and (inputs[:, :5] == inputs[:, 5:]).all()
    assert np.asarray(batch.weights)[0].tolist() == [0] * 5 + [1] * 4 + [0]
    assert (np.asarray(batch.targets)[:, :-1] == inputs[:, 1:]).all()
    assert len({x.tobytes() for x in inputs}) == 3


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
        "batch_size_within_memory": 8,
    }
    return tuple({**given, **change(given)}.values())


WRONG = {
    "model is a Recurrent without 'attention' heads; it must be a Transformer": (
        lambda _: {"model": tiny.build(jf.RecurrentConfig, cell="lstm")}
    ),
    "model is a Convolutional without 'attention' heads": (
        lambda _: {"model": tiny.build(jf.ConvolutionalConfig, kernel_size=3)}
    ),
    "model is a RecurrentEncoderDecoder without 'cross_attention' heads": (
        lambda _: {
            "model": tiny.build(jf.RecurrentEncoderDecoderConfig),
            "attention": "cross_attention",
        }
    ),
    "without 'cross_attention' heads; its attention is attention": (
        lambda _: {"attention": "cross_attention"}
    ),
    "attention is 'self'; it must be one of attention, cross_attention, encoder.attention": (
        lambda _: {"attention": "self"}
    ),
    "batch_size_within_memory is 0; it must be a whole number of at least 1": lambda _: {
        "batch_size_within_memory": 0
    },
    "sets is bool (1, 3, 4); it must be bool [number of sets, 2 (layers), 4 (heads)]": (
        lambda _: {"sets": np.zeros((1, 3, 4), bool)}
    ),
    "sets is empty; it must contain at least one set of heads": (
        lambda _: {"sets": np.zeros((0, 2, 4), bool)}
    ),
    "inputs are (1, 8); pass at least two sequences": (
        lambda given: {"batch": Batch(*(x if x is None else x[:1] for x in given["batch"]))}
    ),
    "batch element 1 has only targets of weight 0": (
        lambda given: {
            "batch": given["batch"]._replace(
                weights=np.eye(SEQUENCES, LENGTH)[[0, -1] * 2 + [0]] * [[1], [0], [1], [1], [1]]
            )
        }
    ),
    "tokens contain id 13, but vocab_size is 13": (
        lambda given: {"batch": given["batch"]._replace(inputs=np.full((SEQUENCES, LENGTH), 13))}
    ),
    "targets has shape (5, 3); it must have the shape (5, 8) of the logits": (
        lambda given: {"batch": given["batch"]._replace(targets=np.zeros((SEQUENCES, 3), int))}
    ),
    "variables contain weights; they must contain 'params'": (
        lambda given: {"variables": {"weights": given["variables"]}}
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_error_of_ablating_sets_of_heads_names_the_invalid_argument(message):
    assert message in error_of(ablate_sets, *refused(WRONG[message]))


def test_ablation_refuses_a_head_that_does_not_exist():
    assert "set 0 contains layer 2, head 0; layer must be in 0 … 1 and head in 0 … 3" in error_of(
        head_sets, HEADS, [[(2, 0)]]
    )


def test_ablation_of_an_encoder_requires_targets():
    model = tiny.build(jf.EncoderConfig)
    assert "model is an Encoder, which predicts masked tokens" in error_of(
        next_token_batch, model, tiny.tokens(0, 2, 4)
    )


def test_ablation_rejects_sequences_without_tokens():
    assert "pass at least two sequences" in error_of(
        ablate_heads, decoder(), tiny.weights(decoder(), 0), Batch(*jnp.zeros((2, 2, 0), int))
    )
