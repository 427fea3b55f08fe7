"""Dropout needs a key, hooks act exactly where they say, and bfloat16 keeps positions distinct."""

from functools import cache
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional.hooks import Patch
from jaxformer.verify import rules
from tests.properties import tiny
from tests.slow import mostly_slow

RATE, BATCH = 0.4, 2
POINTS = ("embedding", "block.input", "attention.output", "block.middle", "feedforward.output")


@cache
def inspect(model, capture=(), dropout=False):
    """Compiles (variables, tokens, segment_ids, patch, key) → (logits, captured)."""

    def run(variables, tokens, segment_ids=None, patch=None, key=None):
        rngs = {"dropout": key} if dropout else None
        return model.apply(
            variables,
            tokens,
            segment_ids,
            capture=capture,
            patch=patch,
            rngs=rngs,
            method="inspect",
        )

    return jax.jit(run)


def dropped(seed, layers="scan", width=64):
    """Runs a model with dropout.

    Returns where dropout set a zero, bool [place, batch, length, dim], the captured values and the
    logits. The places are the embedding and then both sublayers of each layer.
    """
    model = tiny.build(dropout=RATE, layers=layers, embed_dim=width, num_layers=3)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, tiny.LENGTH)
    run = inspect(model, (*POINTS, "block.output"), dropout=True)
    logits, values = run(variables, tokens, key=jax.random.key(seed))
    values = {name: np.asarray(value) for name, value in values.items()}
    added = np.stack(
        [
            values["block.middle"] - values["block.input"],
            values["block.output"] - values["block.middle"],
        ],
        axis=1,
    )
    added = added.reshape(-1, *added.shape[2:])
    return np.concatenate([values["embedding"][None], added]) == 0, values, np.asarray(logits)


def test_dropout_is_independent_across_layers_and_positions():
    """Places, layers, positions, batch elements and keys all have independent dropout patterns.

    Each pattern drops its share, and the remaining values are divided by 1 − rate.
    """
    zeros, values, _ = dropped(0)
    assert len(zeros) == 7
    n = zeros[0].size
    assert (abs(zeros.mean(axis=(1, 2, 3)) - RATE) < 5 * np.sqrt(RATE * (1 - RATE) / n)).all()
    agreement = RATE**2 + (1 - RATE) ** 2  # expected for independent patterns
    slack = 5 * np.sqrt(agreement * (1 - agreement) / n)
    for one, other in combinations([*zeros, *dropped(1)[0]], 2):
        assert abs((one == other).mean() - agreement) < slack
    assert not (zeros[:, 0] == zeros[:, 1]).all(axis=(1, 2)).any()
    assert not (zeros[:, :, 0] == zeros[:, :, 1]).all(axis=(1, 2)).any()
    kept = ~zeros[1::2]
    added = values["block.middle"] - values["block.input"]
    tiny.close(added[kept], values["attention.output"][kept] / (1 - RATE))


@pytest.mark.slow
def test_dropout_is_equal_for_scanned_and_unrolled_layers():
    """The key determines the logits for both settings of `layers`."""
    zeros, _, logits = dropped(5)
    np.testing.assert_array_equal(logits, dropped(5)[2])
    unrolled, _, unrolled_logits = dropped(5, layers="unrolled")
    np.testing.assert_array_equal(zeros, unrolled)
    tiny.close(unrolled_logits, logits)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_dropout_is_inactive_without_a_random_key(seed):
    """Without a key the values are those of a model without dropout; with a key they differ."""
    model = tiny.build(dropout=RATE)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    quiet = tiny.apply(model)(variables, tokens)
    np.testing.assert_array_equal(quiet, tiny.apply(tiny.build())(variables, tokens))
    noisy, _ = inspect(model, dropout=True)(variables, tokens, key=jax.random.key(seed))
    assert (np.asarray(noisy) != np.asarray(quiet)).any(axis=(1, 2)).all()


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_capturing_does_not_change_logits(seed, segment_ids):
    """Capturing returns the requested points and does not change the logits.

    The values are consistent: weights are 0 where masked and sum to 1, heads are weights · values.
    """
    model = tiny.build(attention="explicit", window=3)
    config = model.config
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segment_ids.shape)
    logits, values = inspect(model, model.hook_points)(variables, tokens, segment_ids)
    values = {name: np.asarray(value) for name, value in values.items()}
    assert set(values) == set(model.hook_points)
    tiny.close(logits, tiny.apply(model)(variables, tokens, segment_ids))

    assert {len(values[name]) for name in model.layer_hook_points} == {config.num_layers}
    np.testing.assert_array_equal(values["block.input"][0], values["embedding"])
    np.testing.assert_array_equal(values["block.input"][1:], values["block.output"][:-1])
    tiny.close(values["block.middle"] - values["attention.output"], values["block.input"])
    seen = np.stack([rules.visible(ids, window=3) for ids in segment_ids])[:, None]
    weights = values["attention.weights"]
    assert not weights[:, ~np.broadcast_to(seen, weights.shape[1:])].any()
    tiny.close(weights.sum(axis=-1), np.broadcast_to(seen.any(axis=-1), weights.shape[:-1]))
    value = np.repeat(values["attention.value"], config.num_heads // config.num_kv_heads, axis=2)
    tiny.close(weights @ value, values["attention.heads"])


def read_off(model, name, variables, tokens):
    return inspect(model, (name,))(variables, tokens)[1][name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ("embedding", "block.output", "attention.heads", "feedforward.hidden", "final_norm"),
        "embedding",
        "attention.heads",
    ),
)
@given(seed=tiny.seeds, layer=st.integers(0, 1), position=st.integers(0, tiny.LENGTH - 1))
def test_patch_replaces_only_the_value_at_its_layer_and_position(name, seed, layer, position):
    """At the patched layer and position the value is the donor's.

    Earlier layers and earlier positions stay unchanged; the logits at the position change.
    """
    model = tiny.build()
    variables = tiny.weights(model, seed)
    tokens = tiny.tokens(seed, BATCH, tiny.LENGTH)
    others = (tokens + 1) % model.config.vocab_size  # another token everywhere
    donor = np.asarray(read_off(model, name, variables, others))
    clean = np.asarray(read_off(model, name, variables, tokens))
    where = np.zeros((*clean.shape[:-1], 1), bool)
    if name in ("embedding", "final_norm"):
        where[:, position] = True
    else:
        where[layer, ..., position, :] = True

    patched, values = inspect(model, (name,))(
        variables, tokens, patch={name: Patch(jnp.asarray(where), jnp.asarray(donor))}
    )
    value, place = np.asarray(values[name]), np.broadcast_to(where, clean.shape)
    np.testing.assert_array_equal(value[place], donor[place])
    before = slice(0, layer) if clean.ndim > 3 else slice(0, 0)
    np.testing.assert_array_equal(value[before], clean[before])
    plain, patched = np.asarray(inspect(model)(variables, tokens)[0]), np.asarray(patched)
    tiny.close(patched[:, :position], plain[:, :position])
    assert (patched[:, position] != plain[:, position]).any()


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_patching_in_all_embeddings_of_another_text_gives_the_logits_of_that_text(seed):
    """Replacing all embeddings by those of another text gives the logits of that text."""
    model = tiny.build()
    variables = tiny.weights(model, seed)
    tokens = tiny.tokens(seed, BATCH, tiny.LENGTH)
    others = (tokens + 1) % model.config.vocab_size  # another token everywhere
    donor = read_off(model, "embedding", variables, others)
    where = jnp.ones(donor.shape[:-1], bool)[..., None]
    logits, _ = inspect(model, ("embedding",))(
        variables, tokens, patch={"embedding": Patch(where, donor)}
    )
    tiny.close(logits, tiny.apply(model)(variables, others))


@pytest.mark.slow
def test_patch_for_one_layer_leaves_other_layers_unchanged():
    """Setting the heads of layer 1 to zero leaves those of layer 0 unchanged."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, tiny.LENGTH)
    clean = np.asarray(read_off(model, "attention.heads", variables, tokens))
    where = jnp.array([False, True]).reshape(2, 1, 1, 1, 1)
    _, values = inspect(model, ("attention.heads",))(
        variables, tokens, patch={"attention.heads": Patch(where, jnp.zeros((1, 1, 1, 1, 1)))}
    )
    patched = np.asarray(values["attention.heads"])
    np.testing.assert_array_equal(patched[0], clean[0])
    assert clean[1].any() and not patched[1].any()


def test_unknown_hook_point_is_rejected_with_the_nearest_name():
    """An unknown point in `capture` or `patch` raises ValueError with the nearest name."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), jnp.asarray(tiny.tokens(0, 1, 4))
    for hooks in ({"capture": ("attention.weigths",)}, {"patch": {"attention.weigths": None}}):
        with pytest.raises(ValueError, match=r"'attention\.weigths'.*attention\.weights"):
            model.apply(variables, tokens, method="inspect", **hooks)


def test_patch_of_values_inside_layers_must_have_a_layer_axis():
    """The ValueError names the point, the actual size and the accepted sizes."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), jnp.asarray(tiny.tokens(0, 1, 4))
    for where, value in ((jnp.ones((3, 1), bool), 0.0), (True, jnp.zeros((1, 1, 4, 8)))):
        patch = {"block.output": Patch(where, value)}
        with pytest.raises(ValueError, match=r"'block\.output': where has shape .* size 1 or 2"):
            model.apply(variables, tokens, method="inspect", patch=patch)


def test_rotary_positions_above_256_stay_distinct_in_bfloat16():
    """bfloat16 cannot represent all integers above 256.

    The logits of later tokens must still equal those of float32.
    """
    options = {"positions": "rotary", "max_length": 300, "num_layers": 1, "attention": "explicit"}
    exact, rounded = (tiny.build(dtype=dtype, **options) for dtype in ("float32", "bfloat16"))
    variables, tokens = tiny.weights(exact, 0), tiny.tokens(0, 1, 262)
    expected, found = (np.asarray(tiny.apply(m)(variables, tokens)) for m in (exact, rounded))
    tiny.close(found[:, 250:], expected[:, 250:], 0.03)


def test_model_rejects_tokens_and_segment_ids_of_wrong_shape():
    """A wrong rank, width, length or segment_ids shape raises ValueError, inside jit as well."""
    model = tiny.build()
    variables, sequence = tiny.weights(model, 0), np.zeros((1, 17), np.int32)
    wrong = {
        r"int32 \(17,\)": (sequence[0],),
        r"float32 \(1, 4, 9\).*\[batch, length, 8\]": (np.zeros((1, 4, 9), np.float32),),
        r"tokens have length 17, more than max_length \(16\)": (sequence,),
        r"segment_ids have shape \(1, 5\), but tokens have shape \(1, 4\)": (
            sequence[:, :4],
            sequence[:, :5],
        ),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            tiny.apply(model)(variables, *arguments)


@pytest.mark.slow
def test_out_of_range_token_raises_error_or_gives_nan_logits_inside_jit():
    """ValueError with the id outside jit; inside jit NaN, in that batch element only."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, tiny.LENGTH)
    clean = np.asarray(tiny.apply(model)(variables, tokens))
    for bad in (-1, 13):
        tokens[0, 4] = bad
        with pytest.raises(ValueError, match=f"tokens contain id {bad}, but vocab_size is 13"):
            model.apply(variables, jnp.asarray(tokens))
        logits = np.asarray(tiny.apply(model)(variables, tokens))
        assert np.isnan(logits[0, 4:]).all()
        np.testing.assert_array_equal(logits[1], clean[1])
    constant = jnp.asarray(tiny.tokens(0, BATCH, tiny.LENGTH))  # concrete even inside jit
    closed_over = jax.jit(lambda variables: model.apply(variables, constant))
    np.testing.assert_array_equal(closed_over(variables), clean)
