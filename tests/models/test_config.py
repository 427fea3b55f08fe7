"""Configs: rejected values, derived sizes, parameter counts and initial weights."""

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.models.builders.transformers import build_stack

WRONG = {
    "vocab_size is 0": {"vocab_size": 0},
    "max_length is -1": {"max_length": -1},
    "num_layers is 0": {"num_layers": 0},
    "embed_dim is 1.5": {"embed_dim": 1.5},
    "num_heads is 0": {"num_heads": 0},
    "num_kv_heads is 0": {"num_kv_heads": 0},
    "head_dim is 0": {"head_dim": 0},
    "mlp_dim is 0": {"mlp_dim": 0},
    "window is 0": {"window": 0},
    "activation is 'softplus'": {"activation": "softplus"},
    "norm is 'batch'": {"norm": "batch"},
    "norm_position is 'both'": {"norm_position": "both"},
    "positions is 'absolute'": {"positions": "absolute"},
    "dtype is 'float16'": {"dtype": "float16"},
    r"embed_dim is 8, which num_heads \(3\)": {"embed_dim": 8, "num_heads": 3},
    r"num_kv_heads is 5; it must divide num_heads \(12\)": {"num_kv_heads": 5},
    r"head_dim is 3, and rotary_fraction \(1.0\) rotates 3 features": {
        "head_dim": 3,
        "positions": "rotary",
    },
    "embed_dim is 9; it must be even for sinusoidal": {
        "embed_dim": 9,
        "num_heads": 3,
        "positions": "sinusoidal",
    },
    "dropout is 1.0": {"dropout": 1.0},
    "dropout is -0.1": {"dropout": -0.1},
    "norm_epsilon is 0.0": {"norm_epsilon": 0.0},
    "rotary_base is 0.0": {"rotary_base": 0.0},
    "rotary_base is nan": {"rotary_base": float("nan")},
    "prefix is -1": {"prefix": -1},
    "prefix is 2.5": {"prefix": 2.5},
    "prefix is 1025": {"prefix": 1025},
    "num_layers is True": {"num_layers": True},
    "num_experts is empty": {"num_experts": ()},
    "num_experts is -1": {"num_experts": (4, -1)},
    r"experts_per_token is 2; it must be at most num_experts \(\(0, 1\)\)": {"num_experts": (0, 1)},
    "shared_expert_dim is 0": {"num_experts": 4, "shared_expert_dim": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_decoder_config_raises_error_that_names_invalid_field_and_value(message):
    """The config raises ValueError when it is created, not when the model runs."""
    with pytest.raises(ValueError, match=message):
        jf.DecoderConfig(**WRONG[message])


def test_config_class_attribute_is_not_validated_as_a_field():
    """A class attribute with an annotation is not checked, as the base class has such ones."""

    @dataclass(frozen=True)
    class Own(jf.RecurrentConfig):
        bidirectional: ClassVar[bool] = True

    assert Own(vocab_size=np.int64(3)).vocab_size == 3


def test_decoder_and_recurrent_configs_have_a_residual_attribute():
    """The rules of `verify` ask every kind of model."""
    assert jf.DecoderConfig().residual and not jf.DecoderConfig(residual=False).residual
    assert not jf.RecurrentConfig().residual


def test_config_and_sampler_accept_numpy_integers():
    """The config converts them to Python integers, which JSON can serialize."""
    config = jf.DecoderConfig(vocab_size=np.array([3, 299]).max() + 1)
    assert config == jf.DecoderConfig(vocab_size=300) and type(config.vocab_size) is int
    assert jf.Sampler(top_k=np.int64(5)) == jf.Sampler(top_k=5)


@pytest.mark.parametrize("field", ["attention", "layers", "remat"])
def test_execution_options_raise_error_that_names_invalid_field_and_value(field):
    """The message lists the accepted values."""
    with pytest.raises(ValueError, match=f"{field} is 'fast'; it must be one of"):
        jf.Execution(**{field: "fast"})


def test_an_unknown_preset_or_config_is_rejected_with_the_choices():
    """`preset` and `build` list the valid choices."""
    with pytest.raises(ValueError, match="preset is 'gpt5'; it must be one of gpt2-124m"):
        jf.preset("gpt5")
    with pytest.raises(ValueError, match=r"one of .*DecoderConfig"):
        jf.build({})
    assert isinstance(jf.build(jf.preset("gpt2-124m")), jf.Decoder)


PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-1.1b": 1_100_048_384,
    "olmoe-7b": 6_919_161_856,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name):
    """The number of parameters matches exactly."""
    assert jf.parameter_count(jf.preset(name)) == PUBLISHED[name]


CONFIGS = st.builds(
    jf.DecoderConfig,
    vocab_size=st.integers(1, 20),
    max_length=st.integers(2, 20),
    num_layers=st.integers(1, 3),
    embed_dim=st.sampled_from([4, 8]),
    num_heads=st.sampled_from([2, 4]),
    num_kv_heads=st.sampled_from([None, 1, 2]),
    head_dim=st.sampled_from([None, 6]),
    mlp_dim=st.sampled_from([None, 5]),
    activation=st.sampled_from(["gelu", "swiglu"]),
    norm=st.sampled_from(["layer", "rms", "none"]),
    norm_position=st.sampled_from(["pre", "post"]),
    positions=st.sampled_from(["learned", "none"]),
    use_bias=st.booleans(),
    head_bias=st.booleans(),
    tie_embeddings=st.booleans(),
)


@given(config=CONFIGS)
def test_resolved_config_fills_in_missing_sizes_and_keeps_given_fields(config):
    """`resolved` fills in every size, changes no field that was set, and is idempotent."""
    complete = config.resolved
    left_open = [x.name for x in fields(config) if getattr(config, x.name) is None]
    assert replace(complete, **dict.fromkeys(left_open)) == config
    assert complete.resolved == complete and hash(complete) == hash(complete.resolved)
    assert None not in (complete.num_kv_heads, complete.head_dim, complete.mlp_dim)
    assert complete.num_heads % complete.num_kv_heads == 0


@pytest.mark.slow
def test_residual_output_projections_have_gpt2_initial_scale():
    """GPT-2's initialization: N(0, 0.02²), and 0.02/√(2 · layers) for output projections.

    No two layers get the same values.
    """
    config = jf.DecoderConfig(num_layers=8, embed_dim=32, num_heads=4).resolved
    quick = {"xla_backend_optimization_level": 0}
    blocks = jax.jit(build_stack(config).init, compiler_options=quick)(jax.random.key(0))
    for kernel, stddev in (
        (blocks["attention"]["query"]["kernel"], 0.02),
        (blocks["attention"]["output"]["kernel"], 0.02 / 4),
        (blocks["feedforward"]["up"]["kernel"], 0.02),
        (blocks["feedforward"]["down"]["kernel"], 0.02 / 4),
    ):
        assert float(kernel.std()) == pytest.approx(stddev, rel=0.05)
        assert not (kernel[0] == kernel[1]).any()
