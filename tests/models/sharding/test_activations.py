"""The TPU layout of cached keys and values, traced for meshes of absent devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional.cache.slots import write_key_values
from jaxformer.models.sharding import activations
from jaxformer.models.sharding.parameters import make_abstract_mesh

SLOTS = 16


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(activations, "platform", lambda: "tpu")


def write(slots, new, slot):
    return activations.keep_in_place(write_key_values(slots, new, slot))


def written(batch_size, heads, head_dim):
    """Returns (slots, new, slot) for one step."""
    rng = np.random.default_rng(0)
    shapes = (batch_size, heads, SLOTS, head_dim), (batch_size, heads, 1, head_dim)
    return *(jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes), jnp.int32(3)


@pytest.mark.parametrize("batch_size, heads", [(1, 4), (4, 1), (4, 4), (1, 1), (4, 3)])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)])
def test_tpu_cache_layout_is_chosen_for_the_shard_of_one_device(sizes, batch_size, heads, on_tpu):
    """Batch elements are sharded over `data` and `fsdp`, heads over `tensor`.

    If `tensor` does not divide the heads, it shards the batch elements too. If the batch does not
    divide, there is no layout constraint.
    """
    data, fsdp, tensor = sizes
    by_batch = data * fsdp * (1 if heads % tensor == 0 else tensor)
    mesh = make_abstract_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(write)(*written(batch_size, heads, 64)))
    found = re.findall(r":f32\[([\d,]+)\]\S* = layout_constraint", text)
    if batch_size % by_batch:
        assert not found
        return
    (local,) = found
    shares = by_batch * (tensor if heads % tensor == 0 else 1)
    size = np.prod([int(n) for n in local.split(",")])
    assert size * shares == batch_size * heads * SLOTS * 64


@pytest.mark.parametrize("head_dim, last", [(64, SLOTS), (128, 128), (96, SLOTS)])
def test_minor_axis_of_tpu_cache_layout_needs_no_padding(head_dim, last, on_tpu):
    arguments = written(2, 4, head_dim)
    text = str(jax.make_jaxpr(write)(*arguments))
    (order,) = re.findall(r"major_to_minor=\((.*?)\)", text)
    assert arguments[0].shape[int(order.split(",")[-1])] == last


def test_tpu_cache_layout_does_not_change_written_values_or_gradient(on_tpu):
    slots, new, slot = written(2, 4, 64)
    found = jax.jit(write)(slots, new, slot)
    np.testing.assert_array_equal(found, np.asarray(slots.at[:, :, 3].set(new[:, :, 0])))
    gradient = jax.jit(jax.grad(lambda x: write(slots, x, slot).sum()))(new)
    np.testing.assert_array_equal(gradient, np.ones_like(new))
