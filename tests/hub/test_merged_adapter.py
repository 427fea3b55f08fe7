"""Adapted parameters are merged before they are saved or exported."""

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.functional.linear.low_rank import LowRankKernel, is_low_rank
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.lora import adapt
from tests.errors import error_of
from tests.hub import foreign
from tests.properties import tiny


@pytest.mark.slow
@pytest.mark.parametrize("write", [pytest.param(jf.save, marks=pytest.mark.slow), jf.export])
def test_lora_parameters_can_be_saved_or_exported_only_after_merging(write, tmp_path):
    """Without it, the error names the function. Merged parameters give the same logits."""
    model = tiny.build(**foreign.GPT2)
    params = tiny.weights(model, 0)["params"]
    adapted = adapt(jax.random.key(0), params, LoraConfig(lora_rank=2))
    changed = jax.tree.map(
        lambda x: LowRankKernel(x.frozen, x.down, x.up + 0.1, x.scale) if is_low_rank(x) else x,
        adapted,
        is_leaf=is_low_rank,
    )
    variables = {"params": changed}
    said = error_of(write, tmp_path / "x", model, variables)
    assert "jf.merge_adapter(variables)" in said
    write(tmp_path / "out", model, jf.merge_adapter(variables))
    again = jf.load(tmp_path / "out")
    tokens = np.arange(10)[None]
    expected = model.apply(variables, tokens)
    assert np.abs(expected - model.apply({"params": params}, tokens)).max() > 1e-3
    np.testing.assert_allclose(again.model.apply(again.variables, tokens), expected, atol=1e-4)
