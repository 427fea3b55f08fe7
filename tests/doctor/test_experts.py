"""The doctor finds programs that compute all experts for all tokens."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.doctor import examine
from jaxformer.doctor.experts import ExpertSizes, dense_over_experts, expert_sizes
from jaxformer.doctor.report import step_rows
from jaxformer.doctor.targets import parse_target
from jaxformer.functional import FeedForward, Output, Residual, SubLayer, init_linear
from jaxformer.functional.layers import experts
from jaxformer.models.config import Execution
from jaxformer.models.sharding.parameters import make_abstract_mesh

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

BATCH_SIZE, LENGTH, DIM, HIDDEN, EXPERTS, CHOSEN = 8, 64, 32, 24, 8, 2
# The numbers of experts, layers, heads and sequences are equal.
CONFIG = jf.DecoderConfig(
    vocab_size=64,
    max_length=LENGTH,
    num_layers=EXPERTS,
    embed_dim=DIM,
    num_heads=EXPERTS,
    activation="swiglu",
    num_experts=EXPERTS,
    experts_per_token=CHOSEN,
    expert_dim=HIDDEN,
)


def kernels_of(weights, dtype):
    return {name: weights[name]["kernel"].astype(dtype) for name in ("up", "gate", "down")}


def all_experts(weights, x, routes, expert, placement=None):
    """Computes all experts for each token, and multiplies most outputs by 0."""
    kernels = kernels_of(weights, x.dtype)
    up, gate = (jnp.einsum("bld,edh->eblh", x, kernels[name]) for name in ("up", "gate"))
    y = jnp.einsum("eblh,ehd->ebld", jax.nn.silu(gate) * up, kernels["down"])
    chosen = jax.nn.one_hot(routes.experts, len(kernels["up"])) * routes.shares[..., None]
    return jnp.einsum("blke,ebld->bld", chosen, y).astype(x.dtype)


def ragged(weights, x, routes, expert, placement=None):
    """Computes tokens, sorted by expert, with `jax.lax.ragged_dot`."""
    kernels, flat = kernels_of(weights, x.dtype), x.reshape(-1, x.shape[-1])
    index = routes.experts.reshape(-1)
    order = jnp.argsort(index)
    sizes = jnp.zeros(len(kernels["up"]), jnp.int32).at[index].add(1)
    tokens = order // routes.experts.shape[-1]
    up, gate = (jax.lax.ragged_dot(flat[tokens], kernels[x], sizes) for x in ("up", "gate"))
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, kernels["down"], sizes)
    y = y * routes.shares.reshape(-1)[order][:, None]
    return jnp.zeros_like(flat).at[tokens].add(y.astype(x.dtype)).reshape(x.shape)


def examined(
    config=CONFIG, target="cpu:1", mesh=None, layers="scan", batch_size=BATCH_SIZE, own=None
):
    machine = parse_target(target)
    sizes = mesh or {"data": machine.count}
    model = jf.build(config, Execution(layers=layers), layers=own)
    return examine.examine_step(examine.ProgramCase(model, machine, sizes, batch_size, LENGTH))


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_mixture_of_experts_computes_only_the_chosen_experts(layers):
    config = CONFIG if layers == "scan" else replace(CONFIG, num_layers=2)
    found = examined(config, layers=layers)
    assert found["experts"] == {"only_chosen": True, "dense": []}
    line = ("experts", "OK: each token is computed by its chosen experts only", "")
    assert line in step_rows(found)


@pytest.mark.parametrize("dense", [all_experts, ragged])
def test_doctor_reports_program_that_computes_all_experts(dense, monkeypatch):
    """On CPUs, `jax.lax.ragged_dot` multiplies every expert's kernel by all tokens."""
    monkeypatch.setattr(experts, "mixture_of_experts", dense)
    found = examined(replace(CONFIG, num_layers=1))
    assert not found["experts"]["only_chosen"]
    for array in found["experts"]["dense"]:
        size = math.prod(map(int, array.partition("[")[2].rstrip("]").split(",")))
        assert size >= EXPERTS * BATCH_SIZE * LENGTH * HIDDEN
    (said,) = [line[1] for line in step_rows(found) if line and line[0] == "experts"]
    assert said.startswith("FAILED: the program computes all experts for every token")
    monkeypatch.setattr(examine, "examine_step", lambda *_: found)
    monkeypatch.setattr("jaxformer.cli.doctor.start_for", lambda _: None)
    assert main(["doctor", "--preset", "tiny", "--target", "cpu:1"]) == 1


@dataclass(frozen=True)
class Switch(SubLayer):
    """A user's sub-layer that sends each token to one expert."""

    name = "switch"
    is_dense: bool

    def init(self, key, dim, initial):
        keys, expert = jax.random.split(key, EXPERTS + 1), FeedForward(HIDDEN, "swiglu")
        experts = jax.vmap(lambda key: expert.init(key, dim, initial))(keys[1:])
        return {"router": init_linear(keys[0], dim, EXPERTS), "experts": experts}

    def weight_axes(self):
        axes = FeedForward(HIDDEN).weight_axes().items()
        return {f"experts/{path}": ("experts", *named) for path, named in axes}

    def chosen_experts(self):
        return 1

    def __call__(self, weights, x, at):
        mix = all_experts if self.is_dense else experts.mixture_of_experts
        routes = experts.route(weights["router"], x, 1)
        return Output(mix(weights["experts"], x, routes, FeedForward(HIDDEN, "swiglu")))


@pytest.mark.parametrize("is_dense", [False, True])
def test_doctor_detects_custom_sublayer_that_computes_all_experts(is_dense):
    config = replace(CONFIG, num_layers=1, num_experts=0, expert_dim=None)
    attention = jf.Decoder(config).architecture.stack.layers[0][0]
    own = ((attention, Residual(Switch(is_dense))),)
    found = examined(config, own=own)["experts"]
    assert found["only_chosen"] != is_dense
    mesh = make_abstract_mesh({"expert": 4, "fsdp": 2, "tensor": 2})
    (sizes,) = expert_sizes(jf.Decoder(config, layers=own), mesh, BATCH_SIZE, LENGTH)
    assert (sizes.chosen, sizes.experts) == (1, {8, 2}) and sizes.features == {32, 24, 12}
    assert sizes.kernels == {(24, 32), (16, 24), (12, 32), (12, 16)}


def test_doctor_omits_expert_check_for_model_without_experts():
    found = examined(replace(CONFIG, num_experts=0, expert_dim=None, num_layers=1))
    assert found["experts"] is None
    assert not any(line and line[0] == "experts" for line in step_rows(found))


PROGRAM = """HloModule step, num_partitions=8

ENTRY %main (x: f32[1]) -> f32[1] {{
  %x = {shape}{{2,1,0:T(8,128)(2,1)}} parameter(0)
  %w = bf16[8,32,24]{{2,1,0}} parameter(1)
  ROOT %y = f32[1]{{0}} {operation}(%x, %w), custom_call_target="__cublas$gemm"
}}
"""
SIZES = ExpertSizes(
    CHOSEN,
    frozenset((8,)),
    frozenset((512, 64)),
    frozenset((32, 24)),
    frozenset(((24, 32), (24, 16))),
    heads=frozenset((8, 4)),
    of_heads=frozenset((4, 64)),
    layers=frozenset(range(1, 9)),
)


@pytest.mark.parametrize(
    "shape, operation, is_dense",
    [
        ("bf16[8,512,24]", "custom-call", True),
        ("bf16[512,8,32]", "convolution", True),
        ("bf16[8,8,64,24]", "dot", True),  # batch and length
        ("f32[8,1024,32]", "dot", True),  # a row for each chosen expert
        ("f32[8,512,32]", "add", False),  # what a scan stores for each of 8 layers
        ("f32[8,512,25]", "dot", False),
        ("f32[4,512,32]", "dot", False),  # half of the experts
        ("f32[8,8,64,4]", "dot", False),  # heads
        ("f32[8,64,64,64]", "dot", False),
        ("f32[2,8,32,24]", "dot", False),  # kernels of two layers
        ("f32[512,2,8]", "dot", False),  # the chosen experts, one-hot
    ],
)
def test_arrays_over_all_experts_are_found_in_hlo_by_their_sizes(shape, operation, is_dense):
    found = dense_over_experts(PROGRAM.format(shape=shape, operation=operation), SIZES)
    assert found == [shape] * is_dense


def test_expert_array_sizes_are_counted_per_device():
    """Each device has two of 8 experts, no more than each token chooses."""
    mesh = make_abstract_mesh({"data": 2, "expert": 4, "tensor": 2})
    (found,) = expert_sizes(jf.build(CONFIG), mesh, BATCH_SIZE, LENGTH)
    assert found.experts == {8} and found.tokens == {512, 256, 64}
    assert found.features == {32, 24, 12} and found.heads == {8, 4}
    mesh = make_abstract_mesh({"expert": 2, "fsdp": 2})
    (found,) = expert_sizes(jf.build(CONFIG), mesh, BATCH_SIZE, LENGTH)
    assert found.experts == {8, 4} and found.kernels == {(24, 32), (16, 24)}


@pytest.mark.parametrize(
    "target, module", [("gpu:h100:8", "jax_plugins"), ("tpu:v5e:2x4", "libtpu")]
)
def test_doctor_detects_that_an_accelerator_program_computes_all_experts(
    target, module, monkeypatch
):
    """Compilers for accelerators also compute all experts. jaxformer's mixture passes the check."""
    pytest.importorskip(module, reason="the compiler's plugin is not installed")
    config, mesh = replace(CONFIG, embed_dim=256, expert_dim=384, num_layers=1), {"fsdp": 8}
    assert examined(config, target, mesh)["experts"]["only_chosen"]
    assert examined(config, target, {"data": 2, "expert": 4})["experts"]["only_chosen"]
    monkeypatch.setattr(experts, "mixture_of_experts", all_experts)
    assert not examined(config, target, mesh)["experts"]["only_chosen"]
