"""Runs that trained an adapter of a model in Hugging Face's format."""

import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf
from jaxformer.artifacts.checkpoint import CheckpointWriter
from jaxformer.artifacts.run import Origin, RunFolder
from jaxformer.artifacts.tensors import compute_digest
from jaxformer.models.config import architecture_name
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.lora import adapt
from jaxformer.models.trainable import partition
from tests.hub.foreign import tokenizer


def learnt(base, lora: LoraConfig, folder):
    """Writes a run that trained an adapter, with random updates.

    Args:
        base: A folder in Hugging Face's format, the base model.
        lora: The settings of the adapter.
        folder: The folder of the run.
    """
    model, variables, _ = jf.load(base)
    params = variables["params"]
    adapter, _ = partition(adapt(jax.random.key(0), params, lora))
    rng = np.random.default_rng(0)
    adapter = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), adapter)
    run, family = RunFolder(folder), json.loads((base / "config.json").read_text())["model_type"]
    run.path.mkdir()
    tokenizer().save(run.tokenizer)
    sections = {"kind": architecture_name(model.config), "model": model.config}
    sections |= {"training": {"lora": asdict(lora)}}
    run.write_config(sections | Origin(base, compute_digest(params), family).sections())
    with CheckpointWriter(run.checkpoints) as writer:
        writer.save(1, adapter, {"key": jnp.zeros(1)}, {})
