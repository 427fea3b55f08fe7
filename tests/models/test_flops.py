"""The formulas for floating-point operations, compared with XLA's counts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.sequence_size import visible_pairs
from jaxformer.models.builders.transformers import self_attention_mask
from jaxformer.models.config import DecoderConfig, EncoderConfig, Execution, preset
from jaxformer.models.config.encoder import ReadsSource
from jaxformer.models.flops import (
    flops_per_token,
    forward_flops,
    training_flops,
)
from jaxformer.models.kinds import build
from jaxformer.models.parameters import init, parameter_count
from jaxformer.training.presets import RUNS
from tests.models.own_layer import with_memory

WIDE = {"embed_dim": 256, "vocab_size": 1024}
CONFIGS = {kind: replace(run.model, **WIDE) for kind, run in RUNS["tiny"].items()}


def forward(config, length, **options):
    return forward_flops(build(config), length, **options)


def training(config, length, **options):
    return training_flops(build(config), length, **options)


@pytest.mark.parametrize("kind", CONFIGS)
def test_flops_formula_equals_xla_count(kind):
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
    assert counted == pytest.approx(forward_flops(model, length), rel=0.05)


def test_training_flops_are_six_per_parameter_and_token():
    """6 N (Kaplan et al. 2020), plus the attention term 12 L H Q T of PaLM's appendix B."""
    config = preset("gpt2-1.5b")
    attention = 12 * 48 * 1600 * 1024
    per_token = 6 * parameter_count(config) + attention
    assert flops_per_token(build(config), 1024) == pytest.approx(per_token, rel=2e-3)
    assert training(config, 1024) == 1024 * flops_per_token(build(config), 1024)


def test_flops_of_windowed_attention_include_only_keys_in_the_window():
    config = replace(CONFIGS["decoder"], num_layers=2)
    near = replace(config, window=8)
    head = 4 * config.embed_dim * 2
    assert forward(config, 64) - forward(near, 64) == head * 64 * (64 - 8)


def test_flops_include_only_the_experts_chosen_per_token():
    """Two of eight experts of width 24 cost as much as one layer of width 48, plus the router."""
    dense = replace(CONFIGS["decoder"], mlp_dim=48)
    experts = replace(dense, num_experts=8, experts_per_token=2, expert_dim=24)
    router = 2 * 32 * dense.num_layers * dense.embed_dim * 8
    assert forward(experts, 32) == forward(dense, 32) + router


def test_flops_include_every_token_in_shared_expert_and_dense_layers():
    config = replace(CONFIGS["decoder"], mlp_dim=48, num_layers=2)
    experts = {"experts_per_token": 2, "expert_dim": 24, "shared_expert_dim": 10}
    mixed = replace(config, num_experts=(0, 8), shared_expert_gate=True, **experts)
    num_maps = 3 if "glu" in config.activation else 2
    added = config.embed_dim * (num_maps * 10 + 1 + 8)  # shared expert, its gate, and router
    assert forward(mixed, 32) == forward(config, 32) + 2 * 32 * added


def test_flops_of_short_convolution_include_its_filters():
    """Instead of scores: two operations for each feature, token and entry of its filter."""
    config = replace(CONFIGS["decoder"], num_layers=1, num_heads=4, num_kv_heads=None, head_dim=8)
    config = replace(config, embed_dim=32)
    convolved = replace(config, layer_types="short_convolution", convolution_kernel_size=4)
    scores = 4 * config.embed_dim * 16 * 16
    filters = 2 * 16 * config.embed_dim * 4
    assert forward(config, 16) - forward(convolved, 16) == scores - filters


def test_flops_of_delta_rule_include_projections_filters_and_memory():
    """Of each token: its maps and filters, and three products with the memory of each head."""
    config = replace(CONFIGS["decoder"], num_layers=1, embed_dim=32, num_heads=4, head_dim=8)
    config = replace(config, num_kv_heads=None, attention_gate=True, layer_types="gated_delta")
    sizes = {"delta_key_heads": 2, "delta_key_dim": 3, "delta_value_dim": 5}
    delta = replace(config, convolution_kernel_size=4, **sizes)
    features = 2 * 2 * 3 + 4 * 5  # of queries, keys and values
    own = 32 * (features + 4 * 5 + 2 * 4) + 4 * features + 4 * 5 * 32 + 3 * 4 * 3 * 5
    attention = 5 * 32 * 32 + 2 * 16 * 32
    difference = forward(replace(config, layer_types="attention"), 16)
    assert difference - forward(delta, 16) == 2 * 16 * (attention - own)


MASKS = {
    "causal": DecoderConfig(),
    "window": DecoderConfig(window=5),
    "window of one": DecoderConfig(window=1),
    "prefix": DecoderConfig(prefix=4),
    "prefix and window": DecoderConfig(prefix=7, window=3),
    "encoder": EncoderConfig(),
    "encoder with a window": EncoderConfig(window=4),
}


def closed_form(config, length):
    """causal L (L + 1) / 2; a window or a prefix changes it; in both directions L²."""
    outside = 0 if config.window is None else max(0, length - config.window)
    if config.bidirectional:
        return length**2 - outside * max(0, outside - 1)
    prefix = min(config.prefix, length)
    return (length * (length + 1) - outside * (outside + 1) + prefix * (prefix - 1)) // 2


@pytest.mark.parametrize("name", MASKS)
def test_number_of_visible_pairs_equals_the_sum_of_the_mask(name):
    config = MASKS[name]
    for length in range(1, 17):
        closed, mask = closed_form(config, length), self_attention_mask(config)
        assert visible_pairs(mask, length) == closed, length
        visible = mask(TokenInfo(length), TokenInfo(length))
        assert np.broadcast_to(np.asarray(visible), (length, length)).sum() == closed


def test_visible_pairs_of_long_sequences_are_counted_in_blocks():
    for config in (DecoderConfig(), DecoderConfig(window=100), EncoderConfig(window=700)):
        assert visible_pairs(self_attention_mask(config), 2500) == closed_form(config, 2500)


def test_flops_include_user_defined_layers():
    """A memory in place of the attention of one layer of two counts its one matrix."""
    config = DecoderConfig(vocab_size=9, max_length=16, num_layers=2, embed_dim=8, num_heads=2)
    attention = 2 * 4 * 8**2 * 16 + 4 * 8 * 16**2
    saved = forward(config, 16) - forward_flops(with_memory(config), 16)
    assert saved == attention - 2 * 8**2 * 16


def test_flops_optionally_exclude_masked_keys():
    """Each query has (length + 1) / 2 keys, or those of the window of its layer."""
    config = replace(CONFIGS["decoder"], num_layers=2, window=(None, 8))
    saved = forward(config, 64) - forward(config, 64, only_visible=True)
    split_layers = (64 * (64 - 65 / 2), 64 * 8 - (36 + 56 * 8))
    assert saved == 4 * config.embed_dim * sum(split_layers)
    assert training(config, 64, only_visible=True) == 3 * (forward(config, 64) - saved)


def test_encoder_flops_assume_attention_to_all_keys():
    for kind in ("encoder", "recurrent", "convolutional"):
        config = CONFIGS[kind]
        assert forward(config, 32) == forward_flops(build(config), 32, only_visible=True)
