"""A checkpoint that is loaded on a mesh has each parameter's sharding from the model's table."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxformer as jf
from jaxformer.artifacts.checkpoint import CheckpointWriter
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.checkpoints import RunArguments, load_model
from jaxformer.models.config import architecture_name
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.sharding.parameters import AXES, make_mesh, shardings
from jaxformer.training.config import MeshSizes
from tests.hub import foreign
from tests.hub.adapters import learnt

pytestmark = pytest.mark.usefixtures("quick_compilation")


def theirs(folder):
    foreign.write(folder, "gpt2")


def saved(folder):
    theirs(folder.with_name("theirs"))
    jf.save(folder, *jf.load(folder.with_name("theirs")))


def adapted(folder):
    theirs(folder.with_name("theirs"))
    learnt(folder.with_name("theirs"), LoraConfig(lora_rank=2), folder)


def run(folder):
    theirs(folder.with_name("theirs"))
    model, variables, tokenizer = jf.load(folder.with_name("theirs"))
    made = RunFolder(folder)
    folder.mkdir()
    tokenizer.save(made.tokenizer)
    made.write_config({"kind": architecture_name(model.config), "model": model.config})
    with CheckpointWriter(made.checkpoints) as writer:
        writer.save(1, variables["params"], {"key": np.zeros(1)}, {})


@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("make", [theirs, saved, adapted, run])
def test_parameters_are_loaded_with_their_shardings(make, how, tmp_path):
    """In each format, parameters on a mesh of one device have the expected shardings and values."""
    make(tmp_path / "found")
    mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
    model, variables, _ = jf.load(tmp_path / "found", **how)
    placed = jf.load(tmp_path / "found", mesh=mesh, **how).variables["params"]
    jax.tree.map(np.testing.assert_array_equal, placed, variables["params"])
    wanted = shardings(placed, model, mesh)
    jax.tree.map(lambda x, where: np.testing.assert_equal(x.sharding, where), placed, wanted)


def test_command_loads_a_checkpoint_on_the_requested_mesh(tmp_path):
    saved(tmp_path / "found")
    for mesh, axes in (
        (None, ()),
        (MeshSizes(tensor=jax.device_count()), AXES),
    ):
        with load_model(RunArguments(str(tmp_path / "found"), mesh=mesh)) as checkpoint:
            assert jax.sharding.get_abstract_mesh().axis_names == axes
        is_placed = {
            isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(checkpoint.variables)
        }
        assert is_placed == {mesh is not None}
