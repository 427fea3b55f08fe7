"""The FLOPs and bytes of decoding and attention, and the implementation that "auto" selects."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.bench import device, models
from jaxformer.bench.device import causal_flops
from jaxformer.bench.models import RandomStep, largest_that_fits
from jaxformer.bench.suite import CPU, QUICK, plan_for
from jaxformer.functional import Causal, dot_product_attention
from jaxformer.functional.attention import dot_product, platforms
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.models.parameters import init, parameter_count
from jaxformer.training.devices import DEVICES

pytestmark = pytest.mark.usefixtures("quick_compilation")

TIED = jf.DecoderConfig(vocab_size=50, max_length=32, num_layers=2, embed_dim=16, num_heads=4)
MODEL = jf.build(TIED)
UNTIED = replace(TIED, num_kv_heads=2, tie_embeddings=False, use_bias=False, dtype="bfloat16")


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_counted_bytes_of_a_decoding_step_equal_its_array_sizes(config):
    """The bytes are all weights of blocks, last norm and head, and the used slots of the cache."""
    model = jf.build(config)
    prepared = jax.jit(lambda key: model.pack_weights(init(model, key)["params"], 2))
    weights = prepared(jax.random.key(0))
    read = [weights[name] for name in weights if name != "embedding"]
    assert models.weight_bytes(weights) == sum(x.nbytes for x in jax.tree.leaves(read))
    head = 50 * 16 * (2 if config.dtype == "bfloat16" else 4)
    assert sum(x.nbytes for x in jax.tree.leaves(weights["head"])) == head
    cache, _ = model.init_cache(weights, None, CacheSize(batch_size=3, capacity=7))
    held = sum(x.nbytes for x in jax.tree.leaves(cache.states))
    assert models.cache_bytes(model, weights, 3, live=7) == held
    assert models.cache_bytes(model, weights, 3, live=3.5) == held / 2


def test_flops_of_a_decoding_step_count_each_weight_once():
    matrices = 2 * (12 * 16**2) + 50 * 16
    for live in (1, 2, 9):
        of_attention = 2 * 4 * 16 * live
        assert models.token_flops(MODEL, live) == 2 * matrices + of_attention


def test_flops_of_a_prompt_count_logits_of_its_last_token_only():
    head = 2 * 50 * 16
    assert models.prefill_flops(MODEL, 1) == models.token_flops(MODEL, 1)
    for length in (2, 5):
        more = models.prefill_flops(MODEL, length) - models.prefill_flops(
            jf.build(TIED), length - 1
        )
        assert more == models.token_flops(MODEL, length) - head


def test_causal_attention_flops_count_the_visible_pairs():
    pairs = np.tril(np.ones((9, 9))).sum()
    assert causal_flops(2, 3, 9, 8) == 2 * 3 * pairs * 2 * (2 * 8)  # q·k, and weighted sums


class FakeKernel(NamedTuple):
    """A kernel that supports either everything or nothing, and records its calls."""

    reason: str | None
    calls: list
    name: str = "fake"

    def unsupported_reason(self, query, key, value, context):
        return self.reason

    def attention(self, query, key, value, context):
        self.calls.append("fake")
        return value


@pytest.mark.parametrize("reason", [None, "it is too long"])
def test_the_reported_attention_implementation_is_the_one_that_runs(reason, monkeypatch):
    kernel = FakeKernel(reason, [])
    for module in (device, dot_product, platforms):
        monkeypatch.setattr(module, "fused_kernels", lambda: (kernel,))
    x = jnp.ones((1, 2, 8, 4))
    named = device.implementation(x, x, x, Causal())
    dot_product_attention(x, x, x, Causal())
    assert (named, kernel.calls) == (("blockwise", []) if reason else ("fake", ["fake"]))


def test_benchmark_halves_the_batch_size_until_the_step_fits_in_memory():
    tried = []

    def make(batch_size):
        tried.append(batch_size)
        if batch_size > 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return "made"

    assert largest_that_fits(make, 16) == (2, "made") and tried == [16, 8, 4, 2]


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED: out of memory", "INTERNAL: broken"])
def test_only_out_of_memory_errors_halve_the_batch_size(message):
    tried = []

    def make(batch_size):
        tried.append(batch_size)
        raise jax.errors.JaxRuntimeError(message)

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        largest_that_fits(make, 4)
    assert tried == ([4, 2, 1] if "RESOURCE" in message else [4])


@pytest.mark.slow
def test_benchmark_training_step_updates_its_state():
    """Each call continues from the state that the previous call returned."""
    step = RandomStep(MODEL, batch_size=2, length=8)
    assert len({float(step().loss) for _ in range(3)}) == 3
    assert step.num_bytes > 3 * 4 * parameter_count(TIED)  # parameters and two moments


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("count", [1, 8])
def test_benchmark_plan_of_each_accelerator_fits_its_memory(name, count):
    memory = DEVICES[name].memory * 3 // 4  # JAX's default
    plan = plan_for(name.split(":")[0], memory, count, quick=False)
    assert plan.training and plan.decoding and 2 * plan.array_bytes <= memory / 2
    for case in plan.training:
        assert 16 * parameter_count(case.config) / count < memory * 2 / 3
        assert case.length == case.config.max_length
        assert case.batch_size.bit_count() == 1  # halving reaches 1
    for case in plan.decoding:
        assert 6 * parameter_count(case.config) < memory / 2  # float32 and packed bfloat16
    names = {case.name for case in (*plan.training, *plan.decoding)}
    assert names <= plan.seconds.keys()


def test_benchmark_plan_of_h100_trains_model_of_a_billion_parameters():
    plan = plan_for("gpu", DEVICES["gpu:h100"].memory * 3 // 4, 1, quick=False)
    assert max(parameter_count(case.config) for case in plan.training) > 1e9


def test_prompts_and_new_tokens_of_benchmark_plans_fit_max_length():
    assert plan_for("cpu", None, 1, quick=False) == CPU and plan_for("tpu", 1, 1, True) is QUICK
    for plan in (CPU, QUICK, plan_for("gpu", None, 1, quick=False)):
        for case in plan.decoding:
            assert case.prompt + 1 + case.new <= case.config.max_length
            assert case.new % jf.decoding.steps.STEPS == 0
            assert case.long_prompt < case.config.max_length


def test_benchmark_batch_is_divided_between_simulated_cpu_devices():
    cases = plan_for("cpu", None, 4, quick=False).training
    assert [case.batch_size for case in cases] == [2, 1]
