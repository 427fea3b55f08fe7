"""Runs that have learnt an adapter of a folder of theirs."""

import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf
from jaxformer.artifacts.checkpoint_writer import CheckpointWriter
from jaxformer.artifacts.origin import Origin, digest_of
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config import kind_of
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.lora import init_adapter
from tests.hub.foreign import tokenizer


def learnt(base, lora: LoraConfig, folder):
    """The folder of a run that began from a folder of theirs, its adapter as if it had learnt
    something."""
    model, variables, _ = jf.load(base)
    params = variables["params"]
    adapter = init_adapter(jax.random.key(0), params, lora)
    rng = np.random.default_rng(0)
    adapter = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), adapter)
    run, family = RunFolder(folder), json.loads((base / "config.json").read_text())["model_type"]
    run.path.mkdir()
    tokenizer().save(run.tokenizer)
    sections = {"kind": kind_of(model.config), "model": model.config}
    sections |= {"training": {"lora": asdict(lora)}}
    run.write_config(sections | Origin(base, digest_of(params), family).sections())
    with CheckpointWriter(run.checkpoints) as writer:
        writer.save(1, adapter, {"key": jnp.zeros(1)}, {})
