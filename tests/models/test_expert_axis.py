"""Models with experts on meshes of eight simulated devices, compared with one device."""

import os
import re
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models.sharding.parameters import batch_sharding, make_mesh, shardings
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

ON_EIGHT = jax.device_count() == 8
DIM, HIDDEN, EXPERTS, LENGTH = 16, 10, 8, 12
MESHES = [
    {"expert": 8},
    {"data": 2, "expert": 4},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "expert": 2, "tensor": 2},
    {"data": 8},
]
MIXTRAL = {"num_experts": EXPERTS, "expert_dim": HIDDEN, "vocab_size": 64, "num_layers": 1}
MIXTRAL |= {"embed_dim": DIM, "activation": "swiglu", "norm": "rms", "positions": "rotary"}
OLMOE = MIXTRAL | {"experts_per_token": 3, "normalize_router": False, "query_key_norm": "all"}
BIASED = MIXTRAL | {"activation": "gelu", "use_bias": True, "num_layers": 2}
MODELS = {"mixtral": MIXTRAL, "olmoe": OLMOE, "biases": BIASED}


def loss(model):
    """Returns (parameters, tokens, segment_ids) → (loss, logits), which depend on no padding."""

    def run(params, tokens, segment_ids):
        logits = model.apply({"params": params}, tokens, segment_ids)
        real = (segment_ids != 0)[..., None]
        return jnp.where(real, jax.nn.log_softmax(logits) * jnp.sin(logits), 0).sum(), logits

    return run


def inputs(batch_size=16):
    tokens = tiny.tokens(0, batch_size, LENGTH, vocab_size=64)
    segment_ids = (np.arange(LENGTH) < 1 + np.arange(batch_size)[:, None] % LENGTH).astype(np.int32)
    return tokens, segment_ids


def compiled(model, sizes, batch_size=16):
    """Returns the program of the gradient on a mesh, and its arguments."""
    params = tiny.weights(model, 0)["params"]
    mesh = make_mesh(sizes)
    sharding = batch_sharding(mesh) if batch_size % 8 == 0 else None
    with jax.set_mesh(mesh):
        params = jax.device_put(params, shardings(params, model, mesh))
        arguments = params, *jax.device_put(inputs(batch_size), sharding)
        run = jax.jit(jax.value_and_grad(loss(model), has_aux=True))
        return run.lower(*arguments).compile(), arguments


@cache
def of_one_device(name, dtype, batch_size=16):
    model = tiny.build(**MODELS[name], dtype=dtype)
    run = jax.jit(jax.value_and_grad(loss(model), has_aux=True))
    return jax.device_get(run(tiny.weights(model, 0)["params"], *inputs(batch_size)))


@pytest.mark.skipif(not ON_EIGHT, reason="needs eight devices; see the last test")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_expert_parallel_logits_and_gradients_equal_one_device(name, sizes):
    """With padding: also of the loss, and with biases, which are added once."""
    model = tiny.build(**MODELS[name], dtype="float32")
    program, arguments = compiled(model, sizes)
    tiny.all_close(jax.device_get(program(*arguments)), of_one_device(name, "float32"), 1e-5)


@pytest.mark.skipif(not ON_EIGHT, reason="needs eight devices; see the last test")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [MESHES[1], MESHES[3]], ids=str)
def test_expert_parallel_bfloat16_loss_equals_one_device(sizes):
    """A token that is about equally far from two experts may go to another one."""
    model = tiny.build(**MIXTRAL, dtype="bfloat16")
    program, arguments = compiled(model, sizes)
    (value, logits), gradient = jax.device_get(program(*arguments))
    (wanted, right), right_gradient = of_one_device("mixtral", "bfloat16")
    np.testing.assert_allclose(value, wanted, rtol=0.03)
    is_close = np.isclose(logits, right, atol=0.03 * abs(right).max()).all(axis=-1)
    assert is_close.mean() > 0.95
    for one, other in zip(*map(jax.tree.leaves, (gradient, right_gradient)), strict=True):
        assert np.isfinite(one).all()
        assert np.linalg.norm(one - other) < 0.1 * np.linalg.norm(other)


@pytest.mark.skipif(not ON_EIGHT, reason="needs eight devices; see the last test")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [MESHES[0], MESHES[1]], ids=str)
def test_expert_parallelism_with_indivisible_batches_equals_one_device(sizes):
    """Five sequences of 12 tokens: no or few axes divide the tokens, and the outputs are summed."""
    model = tiny.build(**MIXTRAL, dtype="float32")
    program, arguments = compiled(model, sizes, batch_size=5)
    wanted = of_one_device("mixtral", "float32", 5)
    tiny.all_close(jax.device_get(program(*arguments)), wanted, 1e-5)


@pytest.mark.skipif(not ON_EIGHT, reason="needs eight devices; see the last test")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES[:2], ids=str)
def test_expert_kernels_are_not_exchanged_between_devices(sizes):
    """No exchange has an array of kernels, and each device has only its own gradients.

    Only gradients are summed over `data`. Each device computes its own experts' share.
    """
    program, _ = compiled(tiny.build(**MIXTRAL, dtype="float32"), sizes)
    text = "\n".join(x for x in program.as_text().splitlines() if "{{0},{1}" not in x)
    lines = re.findall(r"= (\S.*?) (all-\w+|reduce-scatter|collective-\w+)\(", text)
    assert {"all-gather", "reduce-scatter"} <= {kind for _, kind in lines}
    here = EXPERTS // sizes["expert"]
    for shapes, kind in lines:
        for shape in re.findall(r"\[([\d,]+)\]", shapes):
            sizes_of_array = [n for n in map(int, shape.split(",")) if n > 1]
            if {DIM, HIDDEN} <= set(sizes_of_array):
                assert kind == "all-reduce" and "data" in sizes
                assert np.prod(sizes_of_array) <= here * DIM * HIDDEN


@pytest.mark.skipif(not ON_EIGHT, reason="needs eight devices; see the last test")
@pytest.mark.slow
def test_temporary_memory_of_a_device_grows_only_with_its_own_experts():
    """With eight times the experts on eight devices, each has as much as one device had before."""

    def temporaries(num_experts, sizes):
        wide = MIXTRAL | {"num_experts": num_experts, "embed_dim": 64, "expert_dim": 256}
        program, _ = compiled(tiny.build(**wide, dtype="float32"), sizes)
        return program.memory_analysis().temp_size_in_bytes

    kernels = 3 * 64 * 256 * 4  # bytes of one expert
    few, many = temporaries(8, {"expert": 8}), temporaries(64, {"expert": 8})
    assert many - few < 2 * (64 - 8) / 8 * kernels + kernels  # gradients of a device's own experts
    assert temporaries(64, {"data": 8}) - many > 0.9 * (64 - 8) * kernels


PARTS = {
    "one": "one_device and mixtral and fsdp",
    "others": "one_device and not (mixtral and fsdp)",
    "programs": "not one_device and not eight",
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_expert_parallelism_on_eight_devices_is_exact_and_exchanges_no_kernels(part):
    """Runs the tests above on eight simulated devices."""
    if ON_EIGHT:
        return
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
    words = ["-m", "pytest", "-n0", "-q", "-m", "", "-k", PARTS[part], __file__]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
