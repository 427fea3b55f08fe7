"""Keys and values as a TPU keeps them: traced for meshes that are not here."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxformer.functional import spread
from jaxformer.functional.slots import write_slots
from jaxformer.models.placement import AXES

SLOTS = 16


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(spread, "platform", lambda: "tpu")


def written(rows, heads, head_dim, packed):
    """(slots, new, slot): the arguments of a step; packed: without axes of size 1."""
    kept = tuple(n for n in (rows, heads) if not packed or n != 1)
    rng = np.random.default_rng(0)
    shapes = (*kept, SLOTS, head_dim), (rows, heads, 1, head_dim)
    return *(jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes), jnp.int32(3)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows, heads", [(1, 4), (4, 1), (4, 4), (1, 1), (4, 3)])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)])
def test_each_device_lays_out_its_own_part(sizes, rows, heads, packed, on_tpu):
    """Its share of the rows, and of the heads where `tensor` divides them, else of the rows again;
    where rows do not divide the compiler is told nothing."""
    data, fsdp, tensor = sizes
    by_rows = data * fsdp * (1 if heads % tensor == 0 else tensor)
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(write_slots)(*written(rows, heads, 64, packed)))
    found = re.findall(r":f32\[([\d,]+)\]\S* = layout_constraint", text)
    if rows % by_rows:
        assert not found
        return
    (local,) = found
    shares = by_rows * (tensor if heads % tensor == 0 else 1)
    size = np.prod([int(n) for n in local.split(",")])
    assert size * shares == rows * heads * SLOTS * 64


@pytest.mark.parametrize("head_dim, last", [(64, SLOTS), (128, 128), (96, SLOTS)])
def test_the_axis_that_is_not_padded_is_last(head_dim, last, on_tpu):
    arguments = written(2, 4, head_dim, True)
    text = str(jax.make_jaxpr(write_slots)(*arguments))
    (order,) = re.findall(r"major_to_minor=\((.*?)\)", text)
    assert arguments[0].shape[int(order.split(",")[-1])] == last


def test_what_is_written_is_the_same(on_tpu):
    slots, new, slot = written(2, 4, 64, True)
    found = jax.jit(write_slots)(slots, new, slot)
    np.testing.assert_array_equal(found, np.asarray(slots.at[:, :, 3].set(new[:, :, 0])))
    gradient = jax.jit(jax.grad(lambda x: write_slots(slots, x, slot).sum()))(new)
    np.testing.assert_array_equal(gradient, np.ones_like(new))
