"""Low-rank updates in checkpoints: files and memory contain the same arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.artifacts.checkpoint import Checkpoints, CheckpointWriter, in_memory, stored_form
from jaxformer.artifacts.saved import flat
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.lora import adapt, adapted_maps
from jaxformer.models.trainable import partition
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import init_state
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

MODEL, LORA = tiny.build(num_layers=1), LoraConfig(lora_rank=2, lora_target_modules="query,output")
OPTIMIZERS = ("adamw", "lion", "adafactor", "muon")


def numbered(tree):
    """Returns the tree with a different value in each array."""
    leaves, structure = jax.tree.flatten(tree)
    made = [jnp.full(x.shape, number, x.dtype) for number, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, made)


@pytest.mark.parametrize("name", MODELS)
def test_lora_checkpoint_contains_lora_a_and_b_of_each_linear_layer(name):
    """The files contain only lora_a and lora_b, for all linear layers of each model class."""
    shapes = tiny.shapes(tiny.build(**MODELS[name]))["params"]
    maps = [path.removesuffix("/kernel") for path in flat(shapes) if path.endswith("/kernel")]
    lora = LoraConfig(lora_rank=1, lora_target_modules=",".join(maps))
    made = jax.eval_shape(lambda x: adapt(jax.random.key(0), x, lora), shapes)
    adapter = numbered(partition(made)[0])
    stored, kernels = flat(stored_form(adapter)), flat(adapter)
    paths = adapted_maps(shapes, lora)
    assert stored.keys() == {f"{path}/lora_{x}" for path in paths for x in "ab"}
    for path in paths:
        assert stored[f"{path}/lora_a"] is kernels[f"{path}/kernel"].down
        assert stored[f"{path}/lora_b"] is kernels[f"{path}/kernel"].up
    again = in_memory(stored_form(adapter), adapter)
    assert jax.tree.structure(again) == jax.tree.structure(adapter)
    assert [*map(id, jax.tree.leaves(again))] == [*map(id, jax.tree.leaves(adapter))]


def adapter_in_files(base):
    """Returns zeros with the structure of an adapter in a file."""
    shapes, adapter = flat(base), {}
    for path in adapted_maps(base, LORA):
        *layers, in_dim, out_dim = shapes[f"{path}/kernel"].shape
        branch = adapter
        for name in path.split("/"):
            branch = branch.setdefault(name, {})
        branch["lora_a"] = jnp.zeros((*layers, in_dim, LORA.lora_rank))
        branch["lora_b"] = jnp.zeros((*layers, LORA.lora_rank, out_dim))
    return adapter


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "adamw"))
@pytest.mark.parametrize(
    "lora",
    [LORA, pytest.param(LoraConfig(), marks=pytest.mark.slow)],
    ids=["lora", "all weights"],
)
def test_checkpoint_restores_adapter_with_optimizer_moments_and_average(tmp_path, optimizer, lora):
    """The adapter, its moments and its average are restored from their structure in files."""
    optimizer = make_optimizer(OptimizerConfig(optimizer=optimizer))
    base = tiny.weights(MODEL, 0)["params"]
    state = init_state(MODEL, optimizer, 0, base, lora=lora, averages=True)
    in_files = base if lora is not LORA else adapter_in_files(base)
    key = {"key": jax.random.key_data(state.key)}
    params, rest = numbered(
        (in_files, {"optimizer": optimizer.init(in_files), **key, "params": in_files})
    )
    with CheckpointWriter(tmp_path) as writer:
        writer.save(3, params, rest, {})
    step, *parts, _ = Checkpoints(tmp_path).restore(*state.parts())
    assert jax.tree.structure(tuple(parts)) == jax.tree.structure(state.parts())
    jax.tree.map(np.testing.assert_array_equal, stored_form(parts[0]), params)
    jax.tree.map(np.testing.assert_array_equal, stored_form(parts[1]), rest)
    restored = state.restored(step, *parts)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
