"""Attribution patching computes the derivative of the metric along each patch site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxformer.functional.hooks import Patch
from jaxformer.functional.inputs import Inputs
from jaxformer.interpret import attribution_sweep, patch_sweep
from jaxformer.interpret.patching import checked_metric
from tests.errors import error_of
from tests.interpret.test_sweep import BATCH, CASES, LENGTH, METRIC, few, setup
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
POINTS = {name: case for name, case in CASES.items() if not name.endswith(".weights")}


def inspected(model, variables, given, **hooks):
    read = {"source": given.source} if given.source is not None else {}
    return model.apply(variables, given.tokens, method="inspect", **read, **hooks)


@pytest.mark.parametrize(
    "name", mostly_slow(POINTS, slow=("llama attention.heads", "lstm recurrent.cell"))
)
@few
@given(seed=tiny.seeds)
def test_attributed_effects_equal_finite_differences_at_each_site(name, seed):
    """The value at one site moves from the corrupted towards the clean value by ±1%."""
    kind, point, axes = POINTS[name]
    model, variables, clean, corrupted = setup(kind, seed)
    found = attribution_sweep(model, variables, clean, corrupted, METRIC, point, axes=axes)
    assert found.axes == axes
    metric = checked_metric(METRIC, corrupted, model.config.vocab_size)
    # The model masks the scores again after a patch, so finite numbers may replace −∞.
    values = [
        np.nan_to_num(inspected(model, variables, x, capture=(point,))[1][point], neginf=0.0)
        for x in (clean, corrupted)
    ]
    has_layers = point in model.layer_hook_points
    rng = np.random.default_rng(seed)
    for site in rng.permutation(list(np.ndindex(*found.effects.shape)))[:3]:
        where = np.zeros(values[0].shape, bool)
        index = dict(zip(axes, site, strict=True))
        part = [slice(None)] * where.ndim
        for axis, at in (("layer", 0), ("head", -3), ("position", -2)):
            if axis in index:
                part[at] = index[axis]
        where[tuple(part)] = True
        measured = []
        for sign in (1, -1):
            moved = values[1] + sign * 0.01 * (values[0] - values[1])
            patch = {point: Patch(where, moved)}
            logits, _ = inspected(model, variables, corrupted, patch=patch)
            measured.append(float(metric(jnp.asarray(logits, jnp.float32)[:, metric.position])))
        slope = (measured[0] - measured[1]) / 0.02
        np.testing.assert_allclose(found.effects[tuple(site)], slope, rtol=0.05, atol=5e-3)
    assert has_layers == ("layer" in axes or "." in point)


@few
@given(seed=tiny.seeds)
def test_attribution_is_exact_where_the_metric_is_linear(seed):
    """The logits are a linear function of the value after the final norm."""
    model, variables, clean, corrupted = setup("decoder", seed)
    found = attribution_sweep(model, variables, clean, corrupted, METRIC, "final_norm")
    exact = patch_sweep(model, variables, clean, corrupted, METRIC, "final_norm")
    tiny.close(found.effects, exact.effects)
    assert (found.clean, found.corrupted) == (exact.clean, exact.corrupted)
    np.testing.assert_allclose(found.effects.sum(), found.clean - found.corrupted, atol=1e-4)


def test_attribution_patching_between_equal_texts_has_no_effect():
    model, variables, clean, _ = setup("decoder", 0)
    found = attribution_sweep(model, variables, clean, clean, METRIC)
    np.testing.assert_array_equal(found.effects, 0)


def test_attribution_patching_of_recurrent_layers_rejects_segment_ids():
    model, variables, clean, corrupted = setup("lstm", 0)
    ids = np.ones((BATCH, LENGTH), int)
    pair = [Inputs(x.tokens, ids) for x in (clean, corrupted)]
    call = lambda: attribution_sweep(model, variables, *pair, METRIC, "recurrent.cell")  # noqa: E731
    assert "segment_ids are not accepted" in error_of(call)
    assert jax.default_backend()
