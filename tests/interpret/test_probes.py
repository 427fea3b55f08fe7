"""Linear probes find what is linear, and the control task tells what is only memorized."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.interpret.probes import _trains, train_probes

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXAMPLES, DIM, KINDS = 600, 12, 40


def examples(seed):
    """Returns (token ids, labels that follow from them, random features of the ids)."""
    rng = np.random.default_rng(seed)
    vectors, labels = rng.normal(size=(KINDS, DIM)), rng.integers(0, 3, KINDS)
    ids = rng.integers(0, KINDS, EXAMPLES)
    return ids, labels[ids], vectors[ids], rng


def test_probes_find_the_only_layer_with_a_linearly_encoded_label():
    """Layer 0 has noise, layer 1 the label as a direction, layer 2 its product with a sign."""
    ids, labels, _, rng = examples(0)
    directions = rng.normal(size=(3, DIM))
    noise = rng.normal(size=(EXAMPLES, DIM))
    signs = rng.choice([-1, 1], (EXAMPLES, 1))
    linear = 2 * directions[labels] + 0.3 * noise
    found = train_probes(np.stack([noise, linear, signs * linear]), labels, ids)
    assert found.accuracy[1] > 0.97 and (found.accuracy[::2] < 0.6).all()
    assert found.selectivity[1] > 0.3


def test_probes_of_one_hot_token_ids_have_zero_selectivity():
    """One-hot ids predict the control task as well as the label."""
    ids, labels, _, _ = examples(1)
    found = train_probes(np.eye(KINDS)[ids][None], labels, ids)
    assert found.accuracy[0] > 0.95 and found.control_accuracy[0] > 0.95
    assert abs(found.selectivity[0]) < 0.05


def test_the_probes_of_a_layer_do_not_depend_on_other_layers():
    ids, labels, vectors, rng = examples(2)
    layers = np.stack([vectors, rng.normal(size=(EXAMPLES, DIM))])
    together, alone = train_probes(layers, labels, ids), train_probes(layers[1:], labels, ids)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[1], y[0], rtol=1e-4, atol=1e-5), together, alone
    )


def test_probe_accuracy_is_measured_on_held_out_examples():
    ids, labels, vectors, rng = examples(3)
    vectors = vectors + rng.normal(size=vectors.shape)
    found = train_probes(vectors[None], labels, ids, held_out=0.5, seed=4)
    test = np.random.default_rng(4).random(EXAMPLES) < 0.5
    x = (vectors - vectors[~test].mean(0)) / vectors[~test].std(0)
    right = (x @ np.asarray(found.kernel[0]) + np.asarray(found.bias[0])).argmax(-1) == labels
    assert found.accuracy[0] == pytest.approx(right[test].mean(), abs=0.01)
    assert right[~test].mean() > right[test].mean()


def test_probes_fail_on_random_labels_if_whole_texts_are_held_out():
    """The features of a text's tokens have a common part, by which a probe recognizes the text."""
    rng = np.random.default_rng(5)
    groups = np.repeat(np.arange(60), 10)
    labels = rng.permutation(np.arange(60) % 2)[groups]
    features = rng.normal(size=(60, 64))[groups] + 0.3 * rng.normal(size=(600, 64))
    ids = rng.integers(0, KINDS, 600)
    found = {
        name: np.mean(
            [
                train_probes(features[None], labels, ids, seed=seed, groups=value).accuracy[0]
                for seed in range(5)
            ]
        )
        for name, value in {"tokens": None, "texts": groups}.items()
    }
    assert found["tokens"] > 0.9 and abs(found["texts"] - 0.5) < 0.15, found


@given(st.integers(2, 40), st.integers(0, 2**31), st.floats(0.1, 0.9))
def test_all_probe_examples_of_a_group_are_in_the_same_split(num_groups, seed, held_out):
    rng = np.random.default_rng(seed)
    groups = rng.integers(-5, num_groups, 200)
    try:
        trains = _trains(groups, held_out, rng)
    except ValueError:
        return  # one side had no group
    assert not set(groups[trains]) & set(groups[~trains]) and 0 < trains.sum() < 200


@pytest.mark.parametrize(
    "change, message",
    [
        ({"features": jnp.zeros((EXAMPLES, DIM))}, r"features are \(600, 12\)"),
        ({"labels": np.zeros(3, int)}, r"labels are int64 \(3,\); they must be int \(600,\)"),
        ({"labels": np.zeros(EXAMPLES)}, "labels are float64"),
        ({"labels": np.zeros(EXAMPLES, int)}, "at least two different labels"),
        ({"held_out": 1.0}, "held_out is 1.0; it must be between 0 and 1"),
        ({"steps": 0}, "steps is 0"),
        ({"groups": np.arange(3)}, r"groups are int64 \(3,\)"),
        ({"groups": np.zeros(EXAMPLES, int)}, "the random split held out [01] of 1 groups"),
        ({"held_out": 1e-9}, "held out 0 of 600 groups"),
        ({"held_out": 1 - 1e-9}, "held out 600 of 600 groups"),
    ],
)
def test_invalid_probe_arguments_are_rejected(change, message):
    ids, labels, vectors, _ = examples(0)
    arguments = {"features": vectors[None], "labels": labels, "token_ids": ids, **change}
    with pytest.raises(ValueError, match=message):
        train_probes(**arguments)
