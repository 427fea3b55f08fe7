"""The partition of parameters into trainable and frozen leaves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional.linear.kernels import quantize
from jaxformer.functional.linear.low_rank import init_low_rank
from jaxformer.models.trainable import combine, partition, trainable_value_and_grad

KERNEL = jnp.arange(12.0).reshape(4, 3)
PLAIN = {"map": {"kernel": KERNEL, "bias": jnp.ones(3)}, "norm": {"scale": jnp.ones(4)}}


def with_update(kernel):
    update = init_low_rank(jax.random.key(0), kernel, 2)
    return {**PLAIN, "map": {**PLAIN["map"], "kernel": replace(update, up=jnp.ones((2, 3)))}}


def same(one, other) -> bool:
    """Returns whether two trees have the same arrays in the same order."""
    return [*map(id, jax.tree.leaves(one))] == [*map(id, jax.tree.leaves(other))]


def test_all_parameters_are_trainable_without_lora():
    trainable, frozen = partition(PLAIN)
    assert same(trainable, PLAIN) and not jax.tree.leaves(frozen)


@pytest.mark.parametrize("kernel", [KERNEL, quantize(KERNEL)], ids=["array", "int8"])
def test_partition_marks_only_lora_updates_as_trainable(kernel):
    params = with_update(kernel)
    trainable, frozen = partition(params)
    update = params["map"]["kernel"]
    assert same(trainable, [update.down, update.up])
    assert len(jax.tree.leaves(frozen)) == len(jax.tree.leaves(params)) - 2


@pytest.mark.parametrize("params", [PLAIN, with_update(KERNEL), with_update(quantize(KERNEL))])
def test_combining_trainable_and_frozen_parameters_restores_the_original_parameters(params):
    combined = combine(*partition(params))
    assert jax.tree.structure(combined) == jax.tree.structure(params)
    assert same(combined, params)


def test_gradients_of_trainable_parameters_include_only_lora_updates():
    """For Σ (W + A B)², dA = 2 (W + A B) Bᵀ."""
    params = with_update(KERNEL)

    def squares(params, factor):
        return factor * (params["map"]["kernel"].dense() ** 2).sum()

    value, gradient = trainable_value_and_grad(squares)(params, 1.0)
    update = params["map"]["kernel"]
    assert value == (update.dense() ** 2).sum()
    assert len(jax.tree.leaves(gradient)) == 2 and gradient["map"]["bias"] is None
    wanted = 2 * update.dense() @ update.up.T
    np.testing.assert_allclose(gradient["map"]["kernel"].down, wanted, rtol=1e-5)
