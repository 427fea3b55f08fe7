"""Communication parsed from compiled programs, compared with known communication."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.doctor.exchange import least_exchange
from jaxformer.doctor.program import by_kind, collectives, copies
from jaxformer.models.config import DecoderConfig, preset
from jaxformer.models.kinds import build
from jaxformer.models.sharding.parameters import make_abstract_mesh

PROJECT = Path(__file__).parents[2]

# {body} runs in a loop. {known} is the compiler's trip count, if there is one.
LOOP = """HloModule jit_step, entry_computation_layout={{()->f32[]}}, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %p = (s32[], f32[8,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{{1,0:T(8,128)S(1)}} get-tuple-element(%p), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
{body}
  ROOT %t = (s32[], f32[8,4]{{1,0}}) tuple(%next, %x)
}}

%condition (p: (s32[], f32[8,4])) -> pred[] {{
  %p = (s32[], f32[8,4]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant({bound})
  ROOT %less = pred[] compare(%j, %bound), direction=LT
}}

ENTRY %main (x: f32[8,4]) -> f32[] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{{1,0}}) tuple(%zero, %x)
  %loop = (s32[], f32[8,4]{{1,0}}) while(%start), condition=%condition, body=%body{known}
  ROOT %done = f32[] constant(0)
}}
"""


def looped(*body: str, bound=3, step=1, known="") -> str:
    lines = "\n".join(f"  {line}" for line in body)
    return LOOP.format(body=lines, bound=bound, step=step, known=known)


@given(
    rows=st.integers(1, 64),
    groups=st.sampled_from([1, 2, 4]),
    bound=st.integers(1, 100),
    step=st.integers(1, 3),
    said=st.booleans(),
)
def test_collectives_in_a_loop_are_counted_in_each_iteration(rows, groups, bound, step, said):
    """In a ring of n, a device sends n − 1 of n parts, and twice as much for an all-reduce."""
    n, size, times = 8 // groups, 8 * rows * 4 * 4, -(-bound // step)
    group = f"replica_groups=[{groups},{n}]<=[8]"
    known = f', backend_config={{"known_trip_count":{{"n":"{times}"}}}}' if said else ""
    text = looped(
        f"%g = f32[{8 * rows},4]{{1,0}} all-gather(%x), channel_id=1, {group}, dimensions={{0}}",
        f"%r = f32[{8 * rows},4]{{1,0}} all-reduce(%x), channel_id=2, {group}, to_apply=%sum",
        f"%s = f32[{8 * rows // n},4]{{1,0}} reduce-scatter(%x), channel_id=3, {group}, "
        "to_apply=%sum",
        f"%a = f32[{8 * rows},4]{{1,0}} all-to-all(%x), channel_id=4, {group}, dimensions={{0}}",
        f"%p = f32[{8 * rows},4]{{1,0}} collective-permute(%x), channel_id=5, "
        "source_target_pairs={{0,1},{1,0}}",
        bound=bound,
        step=step,
        known=known,
    )
    found, once = by_kind(collectives(text)), times * size * (n - 1) / n
    sent = {kind: total.sent for kind, total in found.items()}
    wanted = {"all-gather": once, "all-reduce": 2 * once, "reduce-scatter": once}
    wanted |= {"all-to-all": once}
    if n == 1:  # there is no other device
        wanted = {}
    assert sent == pytest.approx(wanted | {"collective-permute": times * size})
    assert {total.count for total in found.values()} == {times}


@pytest.mark.parametrize(
    "group, devices",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", 4),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", 2),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 2),
        ("replica_groups={}", 8),
    ],
)
def test_every_hlo_notation_of_replica_groups_is_parsed(group, devices):
    text = looped(f"%r = f32[8,4]{{1,0}} all-reduce(%x), channel_id=1, {group}, to_apply=%sum")
    (found,) = collectives(text)
    assert (found.devices, found.size, found.times) == (devices, 128, 3)


def test_asynchronous_collectives_are_counted_once():
    """Covers asynchronous exchanges of several arrays, and TPU exchanges split into pieces."""
    text = looped(
        "%s = ((bf16[2,4], f32[1,4]), (bf16[8,4], f32[4,4])) all-gather-start(%x, %x), "
        "channel_id=7, replica_groups=[2,4]<=[8]",
        "%d = (bf16[8,4], f32[4,4]) all-gather-done(%s)",
        "%q = (f32[2]{0}, f32[2]{0:T(128)}, u32[]{:S(2)}, u32[]) collective-permute-start(%x), "
        "channel_id=8, source_target_pairs={{0,1},{1,0}}",
        "%q2 = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%x), "
        "channel_id=8, source_target_pairs={{0,1},{1,0}}",
    )
    gather, permute = collectives(text)
    assert gather == ("all-gather", 8 * 4 * 2 + 4 * 4 * 4, 4, 3)
    assert permute == ("collective-permute", 8, 2, 3)


def test_different_collectives_on_one_channel_are_counted_separately():
    """JAX gives all collectives of `shard_map` the same channel."""
    group = "channel_id=1, replica_groups=[2,4]<=[8]"
    text = looped(
        f"%g = f32[8,4]{{1,0}} all-gather(%x), {group}, dimensions={{0}}",
        f"%h = f32[8,4]{{1,0}} all-gather(%x), {group}, dimensions={{0}}",
        f"%s = f32[2,4]{{1,0}} reduce-scatter(%x), {group}, dimensions={{0}}, to_apply=%sum",
    )
    found = {kind: total.count for kind, total in by_kind(collectives(text)).items()}
    assert found == {"all-gather": 6, "reduce-scatter": 3}


def test_hlo_copies_of_a_shape_are_counted_in_each_loop_iteration():
    """Copies in a loop of three iterations count, in any order of the axes.

    An array of another shape with the same bytes does not count, and neither does a move to faster
    memory.
    """
    text = looped("%k = f32[4,1,8]{2,1,0} copy(%x)", "%l = f32[2,16]{1,0} copy(%x)")
    assert copies(text, (8, 4)) == 3 and copies(text, (2, 16)) == 3 and copies(text, (32,)) == 0
    moved = "%k = (f32[8,4]{1,0:S(1)}, f32[8,4]{0,1}, u32[]{:S(2)}) copy-start(%x)"
    assert copies(looped(moved), (8, 4)) == 0
    assert copies(looped(moved.replace(":S(1)", "")), (8, 4)) == 3


def test_collectives_in_loop_of_unknown_trip_count_raise_error():
    line = "%r = f32[8,4]{1,0} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%sum"
    text = looped(line).replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="does not show how often it runs r"):
        collectives(text)
    with pytest.raises(ValueError, match="cannot parse the device groups"):
        collectives(looped(line.replace("{}", "<=8")))
    with pytest.raises(ValueError, match="the text is not a compiled program"):
        collectives("nothing")


def make_run_mesh(**sizes):
    return make_abstract_mesh(sizes)


MATRICES, WIDTH, WORDS, LAYERS = 12 * 1600 * 1600, 1600, 50_257, 48  # of a layer of GPT-2 1.5B


def test_lower_bound_on_fsdp_communication_equals_known_bytes():
    """Each layer matrix is gathered twice and scattered once; the embedding table once each."""
    config = replace(preset("gpt2-1.5b"), dtype="bfloat16")
    least = least_exchange(build(config), make_run_mesh(fsdp=8), 64, 1024)
    ends = 2 * (WORDS + 1024) * WIDTH + 2 * 8 * 1024 * WIDTH  # tables, and looked-up vectors
    matrices = 2 * (3 * LAYERS * MATRICES + ends) * 7 / 8
    assert least["fsdp"] == pytest.approx(matrices, rel=1e-3)  # without biases and scales
    assert least["data"] == least["expert"] == least["tensor"] == 0


def test_lower_bound_on_tensor_parallel_communication_equals_known_bytes():
    config = replace(preset("llama-1.1b"), dtype="bfloat16")
    least = least_exchange(build(config), make_run_mesh(data=2, tensor=4), 8, 2048)
    activations = 2 * 4 * 2048 * 2048
    assert least["tensor"] == (4 * 22 + 2) * 2 * activations * 3 / 4
    parameters = 1_100_048_384
    assert least["data"] == pytest.approx(2 * parameters * 2 / 4 / 2, rel=1e-3)
    assert least["fsdp"] == 0


def test_lower_bound_on_expert_parallel_communication_equals_known_bytes():
    """Experts' gradients are not summed over the expert axis; layers exchange activations."""
    dim, hidden, layers, length = 32, 48, 3, 16
    sizes = {"vocab_size": 64, "max_length": length, "num_layers": layers, "embed_dim": dim}
    config = DecoderConfig(
        **sizes, num_heads=4, use_bias=False, activation="swiglu", num_experts=8, expert_dim=hidden
    )
    least = least_exchange(build(config), make_run_mesh(data=2, expert=4), 16, length)
    dense = (4 * dim**2 + 8 * dim + 2 * dim) * layers + (64 + length + 2) * dim
    experts = 8 * 3 * dim * hidden * layers
    group = 4 * (16 // 8) * length * dim  # activations of four devices
    of_data = 2 * 4 * (dense + experts / 4) * 1 / 2
    of_both = 2 * 4 * dense * 7 / 8 - 2 * 4 * dense * 1 / 2
    assert least["data"] == pytest.approx(of_data, rel=0.02)
    assert least["expert"] == pytest.approx(of_both + 4 * layers * 4 * group * 3 / 4, rel=0.02)
    assert least["fsdp"] == least["tensor"] == 0


def test_sharding_batch_instead_of_heads_halves_communicated_bytes():
    """25 heads and 50,257 tokens are not divisible by `tensor`: outputs are gathered, not
    summed."""
    config = replace(preset("gpt2-1.5b"), dtype="bfloat16")
    activations = 2 * 8 * 1024 * WIDTH
    by_heads, by_batch = 2 * 2 * activations * 3 / 4, 2 * activations * 3 / 4
    least = least_exchange(build(config), make_run_mesh(tensor=4), 8, 1024)
    assert least["tensor"] == LAYERS * (by_heads + by_batch) + by_batch
    both = 4 * WIDTH * WIDTH * 3 * LAYERS + 2 * WORDS * WIDTH
    assert least["fsdp"] == pytest.approx(2 * both * 3 / 4, rel=1e-3)


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxformer.doctor.program import by_kind, collectives
mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
def f(x, w):
    def step(x, w):
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P()))
        return jnp.tanh(y), None
    return jax.lax.scan(step, x, w)[0]
args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for
        shape, spec in (((16, 64), P()), ((5, 64, 64), P(None, "x", None)))]
text = jax.jit(f, in_shardings=tuple(a.sharding for a in args)).lower(*args).compile().as_text()
print({kind: tuple(total) for kind, total in by_kind(collectives(text)).items()})
"""


@pytest.mark.slow
def test_collectives_of_program_compiled_by_xla_are_parsed():
    """Five products with sums over eight devices need five all-reduces of [16, 64] floats."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = run([sys.executable, "-c", PROGRAM], flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str({"all-reduce": (5, 5 * 2 * 16 * 64 * 4 * 7 / 8)})


def run(words, environment=None):
    import os

    return subprocess.run(
        words,
        env={**os.environ, **(environment or {})},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def doctor(*words):
    done = run([sys.executable, "-m", "jaxformer", "doctor", *words, "--json"], {"XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_doctor_reports_memory_and_collectives_on_eight_devices():
    """On a CPU, a scatter is a sum and a slice, with up to twice the bytes of the lower bound."""
    found = doctor("--preset", "tiny", "--target", "cpu:8", "--mesh", "fsdp=8")
    assert found["devices"] == 8 and found["mesh"] == {
        "data": 1,
        "fsdp": 8,
        "expert": 1,
        "tensor": 1,
    }
    memory = found["memory"]
    assert memory["total"] >= memory["parameters"] + memory["optimizer"] + memory["temporaries"]
    assert 1 <= found["exchanged"] / sum(found["least"].values()) < 2


@pytest.mark.slow
def test_olmoe_computes_only_chosen_experts_with_near_minimal_communication():
    model = ("--preset", "olmoe-7b", "--target", "cpu:8", "--scan-layers", "scan")
    found = doctor(*model, "--mesh", "fsdp=2,expert=4", "--length", "512", "--batch-size", "16")
    assert found["experts"] == {"only_chosen": True, "dense": []}
    assert 1 <= found["exchanged"] / sum(found["least"].values()) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, module, most", [("gpu:h100:8", "jax_plugins", 1.2), ("tpu:v5e:2x4", "libtpu", 1.4)]
)
def test_communication_compiled_for_accelerators_is_near_lower_bound(target, module, most):
    """On eight accelerators, the communication is close to the lower bound, without cache copies.

    On TPUs, a matrix is exchanged in nine parts where seven would suffice.
    """
    pytest.importorskip(module, reason="the compiler's plugin is not installed")
    model = ("--preset", "gpt2-124m", "--target", target)
    found = doctor(*model, "--scan-layers", "scan", "--mesh", "fsdp=8", "--batch-size", "64")
    assert found["memory"]["fits"]
    assert found["exchanged"] < most * sum(found["least"].values())
    for mesh in ("data=2,tensor=4", "data=8"):
        sizes = ("--length", "256", "--batch-size", "16")
        found = doctor(*model, "--decode", "--mesh", mesh, *sizes)
        assert found["cache_copies_per_token"] == 0
        assert found["memory"]["temporaries"] < found["memory"]["cache"] / 2
        assert found["gathered_per_token"] < found["memory"]["weights"] / 100
