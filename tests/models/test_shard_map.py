"""Models inside `jax.shard_map`, whose types (check_vma) track which values differ per device."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxformer as jf
from jaxformer.models.parameters import init
from jaxformer.training.batch import Batch
from jaxformer.training.objectives import summed_loss
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.properties.tiny import build
from tests.slow import mostly_slow

BATCH_SIZE, LENGTH = 8, 12
CASES = {**MODELS, "encoder": {"kind": jf.EncoderConfig}}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(list(CASES), "lstm"))
def test_each_device_computes_its_own_batch_elements(name, quick_compilation, small_blocks):
    """The summed loss, and its gradient for parameters that are replicated on all devices."""
    model = build(**CASES[name])
    params = init(model, jax.random.key(0))["params"]
    random = np.random.default_rng(0)
    tokens = random.integers(0, 13, (BATCH_SIZE, LENGTH + 1))
    source = tiny.source(model, 0, BATCH_SIZE, 5) if model.config.reads_source else None
    real = np.ones((BATCH_SIZE, LENGTH), np.int32)
    real[:, 9:] = 0
    batch = Batch(tokens[:, :-1], tokens[:, 1:], real.astype(np.float32), real, source)
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))

    def loss(params, batch):
        return summed_loss(model, params, batch)

    def of_device(params, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return jax.lax.psum(value, "batch"), gradient

    everywhere, by_batch = PartitionSpec(), PartitionSpec("batch")
    spread = jax.shard_map(
        of_device, mesh=mesh, in_specs=(everywhere, by_batch), out_specs=everywhere
    )
    batch = jax.tree.map(jnp.asarray, batch)
    found, wanted = jax.jit(spread)(params, batch), jax.jit(jax.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    largest = max(float(abs(leaf).max()) for leaf in jax.tree.leaves(wanted[1]))
    for one, other in zip(*map(jax.tree.leaves, (found[1], wanted[1])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.rare
def test_each_of_eight_devices_computes_its_own_batch_elements():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
    words = ["-m", "pytest", "-n0", "-m", "", "-k", "each_device", __file__]
    done = subprocess.run([sys.executable, *words], env={**os.environ, **flags}, timeout=600)
    assert done.returncode == 0
