"""The formulas for floating-point operations, compared with XLA's counts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxformer.models.config import Execution, preset
from jaxformer.models.config.encoder_decoder import ReadsSource
from jaxformer.models.flops import flops_per_token, forward_flops, training_flops
from jaxformer.models.kinds import build
from jaxformer.models.parameters import init, parameter_count
from jaxformer.training.presets import RUNS

WIDE = {"embed_dim": 256, "vocab_size": 1024}
CONFIGS = {kind: replace(run.model, **WIDE) for kind, run in RUNS["tiny"].items()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_formula_equals_xlas_count(kind):
    """Unrolled layers and explicit scores, because XLA counts the body of a loop once.

    For the same reason recurrent models get one token.
    """
    config = CONFIGS[kind]
    length = 1 if "recurrent" in kind else 32
    model = build(config, Execution(attention="explicit", layers="unrolled"))
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    variables = jax.eval_shape(lambda key: init(model, key), jax.random.key(0))
    source = {"source": tokens} if isinstance(config, ReadsSource) else {}
    counted = jax.jit(model.apply).lower(variables, tokens, **source).cost_analysis()["flops"]
    assert counted == pytest.approx(forward_flops(config, length), rel=0.05)


def test_training_is_six_operations_a_parameter_and_token():
    """6 N (Kaplan et al. 2020), plus the attention term 12 L H Q T of PaLM's appendix B."""
    config = preset("gpt2-1.5b")
    attention = 12 * 48 * 1600 * 1024
    per_token = 6 * parameter_count(config) + attention
    assert flops_per_token(config, 1024) == pytest.approx(per_token, rel=2e-3)
    assert training_flops(config, 1024) == 1024 * flops_per_token(config, 1024)


def test_a_window_limits_the_counted_keys():
    config = replace(CONFIGS["decoder"], num_layers=2)
    near = replace(config, window=8)
    head = 4 * config.embed_dim * 2
    assert forward_flops(config, 64) - forward_flops(near, 64) == head * 64 * (64 - 8)
