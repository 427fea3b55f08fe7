"""Hook points of attention scores and of the divisors of norms have the values of formulas."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.verify import rules
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
few = settings(max_examples=max(5, settings().max_examples // 3))
BATCH = 2
# For each norm position and kind of layer: the name of a norm, and the value it divides.
INPUTS = {
    "pre": {"attention_norm": "block.input", "feedforward_norm": "block.middle"},
    "parallel": {"attention_norm": "block.input", "feedforward_norm": "block.input"},
    "post_sublayer": {
        "attention_norm": "attention.output",
        "feedforward_norm": "feedforward.output",
    },
}


def inspected(model, seed, segment_ids=None, **options):
    """Returns (logits, captured values in float64) of random tokens."""
    tokens = tiny.tokens(seed, BATCH, tiny.LENGTH)
    seen = jf.inspect(model, tiny.weights(model, seed), tokens, segment_ids=segment_ids, **options)
    captured = {name: np.asarray(x, np.float64) for name, x in seen.captured.items()}
    return np.asarray(seen.logits), captured


def softmax(scores):
    """Computes the softmax in float64; rows without a finite score become 0."""
    largest = scores.max(axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
    return powers / np.maximum(powers.sum(axis=-1, keepdims=True), 1e-300)


@few
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_captured_attention_scores_are_scaled_products_and_minus_infinity_if_masked(
    seed, segment_ids
):
    """The scores are q·k/√d for visible keys and −∞ for masked keys.

    Their softmax gives the attention weights. A capture of the scores alone gives the same values.
    """
    model = tiny.build(window=3)
    points = tuple(f"attention.{x}" for x in ("query", "key", "scores", "weights"))
    _, values = inspected(model, seed, segment_ids, capture=points)
    query, scores = values["attention.query"], values["attention.scores"]
    key = np.repeat(values["attention.key"], query.shape[2] // values["attention.key"].shape[2], 2)
    visible = np.stack([rules.visible(ids, window=3) for ids in segment_ids])[:, None]
    visible = np.broadcast_to(visible, scores.shape)
    products = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    tiny.close(scores[visible], products[visible])
    assert (scores[~visible] == -np.inf).all()
    tiny.close(softmax(scores), values["attention.weights"])
    _, alone = inspected(model, seed, segment_ids, capture=("attention.scores",))
    np.testing.assert_array_equal(alone["attention.scores"], scores)


@pytest.mark.slow
@few
@given(seed=tiny.seeds, factor=st.floats(-2.0, 3.0), position=st.integers(1, tiny.LENGTH - 1))
def test_edit_of_scores_changes_the_softmax_but_not_the_mask(seed, factor, position):
    """An edit that replaces all scores by finite numbers cannot make a masked key visible."""
    model = tiny.build(num_layers=1)

    def edited(value, at, factor):
        return factor * jnp.where(jnp.isfinite(value), value, 1000.0)

    patch = {"attention.scores": jf.Edit(edited, jnp.float32(factor))}
    names = ("attention.scores", "attention.weights")
    logits, values = inspected(model, seed, capture=names, patch=patch)
    _, before = inspected(model, seed, capture=names)
    scores = before["attention.scores"]
    finite = np.where(np.isfinite(scores), scores, 0.0)
    wanted = softmax(np.where(np.isfinite(scores), factor * finite, -np.inf))
    tiny.close(values["attention.weights"], wanted)
    variables = tiny.weights(model, seed)
    tokens = tiny.tokens(seed, BATCH, tiny.LENGTH)
    tokens[:, position:] = (tokens[:, position:] + 1) % model.config.vocab_size
    other = np.asarray(jf.inspect(model, variables, tokens, patch=patch).logits)
    tiny.close(other[:, :position], logits[:, :position])


def statistics(x, norm):
    """Computes the divisor of a norm with ε = 10⁻⁵ by its definition."""
    centred = x - x.mean(axis=-1, keepdims=True) if norm == "layer" else x
    return np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("position", mostly_slow(INPUTS, "pre", slow=INPUTS))
@few
@given(seed=tiny.seeds)
def test_divisor_hook_point_is_the_standard_deviation_or_rms_of_the_input_of_the_norm(
    norm, position, seed
):
    """The divisors are √(σ² + ε), or √(mean x² + ε), of the inputs of the norms.

    This holds before, after and between sub-layers, and for the final norm.
    """
    options = {"parallel": {"parallel_block": "separate_norms"}, "pre": {}}
    options = options.get(position, {"norm_position": position})
    model = tiny.build(norm=norm, norm_epsilon=1e-5, **options)
    inputs = INPUTS[position]
    divisors = tuple(f"{name}.divisor" for name in inputs)
    points = (*inputs.values(), *divisors, "block.output", "final_norm.divisor")
    assert set(points) <= set(model.hook_points)
    _, values = inspected(model, seed, capture=points)
    for name, source in inputs.items():
        tiny.close(values[f"{name}.divisor"], statistics(values[source], norm))
    tiny.close(values["final_norm.divisor"], statistics(values["block.output"][-1], norm))


def multiply(value, at, factor):
    return factor * value


def leave(value, at):
    return value


@pytest.mark.slow
@few
@given(seed=tiny.seeds, factor=st.floats(0.25, 4.0))
def test_rms_norm_divides_by_an_edited_divisor(seed, factor):
    """If an edit multiplies the divisor by c, RMSNorm returns 1/c times its output.

    An edit that returns the divisor unchanged changes the logits only by rounding, and a capture
    does not change them.
    """
    model = tiny.build(norm="rms")
    patch = {"final_norm.divisor": jf.Edit(multiply, jnp.float32(factor))}
    _, changed = inspected(model, seed, capture=("final_norm",), patch=patch)
    plain, before = inspected(model, seed, capture=("final_norm",))
    tiny.close(factor * changed["final_norm"], before["final_norm"])
    divisors = tuple(name for name in model.hook_points if name.endswith(".divisor"))
    assert len(divisors) == 3
    same = {name: jf.Edit(leave) for name in divisors}
    tiny.close(inspected(model, seed, patch=same)[0], plain)
    captured, _ = inspected(model, seed, capture=divisors)
    np.testing.assert_array_equal(captured, plain)
