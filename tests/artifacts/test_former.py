"""Unused parameters that an earlier version stored are dropped."""

import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import jaxformer as jf
from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.checkpoint_writer import CheckpointWriter
from tests.properties import tiny

MODEL = tiny.build(jf.EncoderDecoderConfig, query_key_norm="head")
FORMER = {name: {"scale": np.ones((2, 4), np.float32)} for name in ("query_norm", "key_norm")}
NOTE = r"2 parameters .* dropped \(blocks/cross_attention/key_norm/scale, .*query_norm/scale\)"


def with_former(params):
    blocks = params["blocks"]
    cross = {**blocks["cross_attention"], **FORMER}
    return {**params, "blocks": {**blocks, "cross_attention": cross}}


def test_a_saved_model_with_unused_parameters_loads(tmp_path):
    variables = tiny.weights(MODEL, 0)
    jf.save(tmp_path / "model", MODEL, variables)
    file = tmp_path / "model" / "model.safetensors"
    former = {f"blocks/cross_attention/{name}/scale": x["scale"] for name, x in FORMER.items()}
    save_file(load_file(file) | former, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=NOTE):
        loaded = jf.load(tmp_path / "model")
    tiny.all_close(loaded.variables, variables, 0)


def test_a_run_with_unused_parameters_resumes(tmp_path):
    """Moments and averages lose the same leaves as the parameters, with one warning."""
    params = {"blocks": {"cross_attention": {"query": {"kernel": np.ones((2, 3), np.float32)}}}}
    moments = optax.ScaleByLionState(np.zeros((), np.int32), params)
    rest = {"optimizer": (moments, optax.EmptyState()), "params": params}
    former = with_former(params)
    stored = {"optimizer": (moments._replace(mu=former), optax.EmptyState()), "params": former}
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, former, stored, {})
    with pytest.warns(UserWarning, match=NOTE) as notes:
        _, found, found_rest, _ = Checkpoints(tmp_path).restore(params, rest)
    assert len(notes) == 1
    tiny.all_close(found, params, 0)
    tiny.all_close(found_rest, rest, 0)
