"""Values that the config of a run accepts."""

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.models.config import ConvolutionalConfig, DecoderConfig, EncoderDecoderConfig
from jaxformer.training.config import LEARNING_RATES, OptimizerConfig, PairTraining, TextTraining

TEXT, PAIRS = TextTraining(DecoderConfig()), PairTraining(EncoderDecoderConfig())
COUNTS = [
    (config, section, field.name)
    for config in (TEXT, PAIRS)
    for section in ("", "model")
    for field in fields(getattr(config, section, config))
    if field.type in (int, int | None)
    and field.name not in ("seed", "window_length", "prefix", "source_vocab_size", "lengths")
]
COUNTS.append((TEXT, "optimizer", "warmup_steps"))


@pytest.mark.parametrize(("config", "section", "name"), COUNTS)
@given(value=st.integers(min_value=2**31))
def test_a_count_that_no_device_holds_is_refused(config, section, name, value):
    """The error names the field, before the value overflows elsewhere."""
    with pytest.raises(ValueError, match=rf"\b{name}\b.*\b{value}\b"):
        if section:
            changed = replace(getattr(config, section), **{name: value})
            replace(config, **{section: changed})
        else:
            replace(config, **{name: value})


@given(seed=st.one_of(st.integers(max_value=-1), st.integers(min_value=2**32)))
def test_a_seed_without_a_key_of_its_own_is_refused(seed):
    """JAX keeps only the last 32 bits of a seed, so a larger seed would equal a smaller one."""
    with pytest.raises(ValueError, match=rf"seed is {seed}; it must be in 0 … 4294967295"):
        replace(TEXT, seed=seed)
    for allowed in (0, 2**32 - 1):
        assert replace(TEXT, seed=allowed).seed == allowed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": None}, "steps and minutes are None; one of them must limit the run"),
        ({"minutes": 0.0}, "minutes is 0.0; it must be above 0 and finite"),
        ({"minutes": float("inf")}, "minutes is inf; it must be above 0 and finite"),
        ({"keep": 1}, "keep is 1; it must be at least 2, since the newest may be damaged"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; it must be in [0, 1)"),
        ({"held_out": 0.6}, "held_out is 0.6; it must be in (0, 0.5]"),
        ({"optimizer": {"average_decay": 1.0}}, "average_decay is 1.0; it must be in (0, 1)"),
        ({"lora": {"lora_rank": 0}}, "lora_rank is 0; it must be at least 1"),
        ({"lora": {"lora_alpha": 0.0}}, "lora_alpha is 0.0; it must be above 0"),
        ({"model": DecoderConfig(prefix=3)}, "prefix is 3; it must be 0"),
        ({"model": ConvolutionalConfig(causal=False)}, "next tokens needs a causal model"),
    ],
)
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        nested = {
            name: replace(getattr(TEXT, name), **fields)
            for name, fields in change.items()
            if isinstance(fields, dict)
        }
        replace(TEXT, **{**change, **nested})


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_default_learning_rate_is_that_of_the_optimizer(name):
    """Also if the optimizer of settings is replaced; a given learning rate stays."""
    assert replace(OptimizerConfig(), optimizer=name).peak == LEARNING_RATES[name]
    assert replace(OptimizerConfig(learning_rate=0.5), optimizer=name).peak == 0.5
