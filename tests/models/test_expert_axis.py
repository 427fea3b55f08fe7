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

from jaxformer.models.mesh import batch_sharding, make_mesh, shardings
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
    """Returns (parameters, tokens, segments) → (loss, logits), which depend on no padding."""

    def run(params, tokens, segments):
        logits = model.apply({"params": params}, tokens, segments)
        real = (segments != 0)[..., None]
        return jnp.where(real, jax.nn.log_softmax(logits) * jnp.sin(logits), 0).sum(), logits

    return run


def inputs(rows=16):
    tokens = tiny.tokens(0, rows, LENGTH, vocab_size=64)
    segments = (np.arange(LENGTH) < 1 + np.arange(rows)[:, None] % LENGTH).astype(np.int32)
    return tokens, segments


def compiled(model, sizes, rows=16):
    """Returns the program of the gradient on a mesh, and its arguments."""
    params = tiny.weights(model, 0)["params"]
    mesh = make_mesh(sizes)
    by_row = batch_sharding(mesh) if rows % 8 == 0 else None
    with jax.set_mesh(mesh):
        params = jax.device_put(params, shardings(params, model, mesh))
        arguments = params, *jax.device_put(inputs(rows), by_row)
        run = jax.jit(jax.value_and_grad(loss(model), has_aux=True))
        return run.lower(*arguments).compile(), arguments


@cache
def of_one_device(name, dtype, rows=16):
    model = tiny.build(**MODELS[name], dtype=dtype)
    run = jax.jit(jax.value_and_grad(loss(model), has_aux=True))
    return jax.device_get(run(tiny.weights(model, 0)["params"], *inputs(rows)))


@pytest.mark.skipif(not ON_EIGHT, reason="needs eight devices; see the last test")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_one_device(name, sizes):
    """With padding: also of the loss, and with biases, which are added once."""
    model = tiny.build(**MODELS[name], dtype="float32")
    program, arguments = compiled(model, sizes)
    tiny.all_close(jax.device_get(program(*arguments)), of_one_device(name, "float32"), 1e-5)


@pytest.mark.skipif(not ON_EIGHT, reason="needs eight devices; see the last test")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [MESHES[1], MESHES[3]], ids=str)
def test_bfloat16_has_the_same_loss_and_most_tokens(sizes):
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
def test_rows_that_the_mesh_does_not_divide(sizes):
    """Five rows of 12 tokens: no or few axes divide the tokens, and the outputs are summed."""
    model = tiny.build(**MIXTRAL, dtype="float32")
    program, arguments = compiled(model, sizes, rows=5)
    wanted = of_one_device("mixtral", "float32", 5)
    tiny.all_close(jax.device_get(program(*arguments)), wanted, 1e-5)


@pytest.mark.skipif(not ON_EIGHT, reason="needs eight devices; see the last test")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES[:2], ids=str)
def test_kernels_stay_where_they_are(sizes):
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
def test_temporaries_do_not_grow_with_the_number_of_experts():
    """With eight times the experts on eight devices, each has as much as one device had before."""

    def temporaries(num_experts, sizes):
        wide = MIXTRAL | {"num_experts": num_experts, "embed_dim": 64, "expert_dim": 256}
        program, _ = compiled(tiny.build(**wide, dtype="float32"), sizes)
        return program.memory_analysis().temp_size_in_bytes

    kernels = 3 * 64 * 256 * 4  # bytes of one expert
    few, many = temporaries(8, {"expert": 8}), temporaries(64, {"expert": 8})
    assert many - few < 2 * (64 - 8) / 8 * kernels + kernels  # the gradients of its own experts
    assert temporaries(64, {"data": 8}) - many > 0.9 * (64 - 8) * kernels


PARTS = {
    "one": "one_device and mixtral and fsdp",
    "others": "one_device and not (mixtral and fsdp)",
    "programs": "not one_device and not eight",
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_eight_devices(part):
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
