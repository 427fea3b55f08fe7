"""Which values the config of a training run accepts."""

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.models.config import DecoderConfig, EncoderDecoderConfig
from jaxformer.training.config import (
    LEARNING_RATES,
    OptimizerConfig,
    PairTraining,
    PreferenceTraining,
    TextTraining,
    TuningTraining,
)

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
def test_training_config_rejects_counts_above_the_integer_limit(config, section, name, value):
    """The error names the field, instead of an overflow elsewhere."""
    with pytest.raises(ValueError, match=rf"\b{name}\b.*\b{value}\b"):
        if section:
            changed = replace(getattr(config, section), **{name: value})
            replace(config, **{section: changed})
        else:
            replace(config, **{name: value})


@given(seed=st.one_of(st.integers(max_value=-1), st.integers(min_value=2**32)))
def test_training_config_rejects_seed_of_more_than_32_bits(seed):
    """JAX uses only the last 32 bits of a seed, so a larger seed would equal a smaller seed."""
    with pytest.raises(ValueError, match=rf"seed is {seed}; it must be in 0 … 4294967295"):
        replace(TEXT, seed=seed)
    for allowed in (0, 2**32 - 1):
        assert replace(TEXT, seed=allowed).seed == allowed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": None}, "steps and max_minutes are both None; set at least one to limit the run"),
        ({"max_minutes": 0.0}, "max_minutes is 0.0; it must be above 0 and finite"),
        ({"max_minutes": float("inf")}, "max_minutes is inf; it must be above 0 and finite"),
        (
            {"max_to_keep": 1},
            "max_to_keep is 1; it must be at least 2, because the newest checkpoint may be damaged",
        ),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; it must be in [0, 1)"),
        ({"validation_fraction": 0.6}, "validation_fraction is 0.6; it must be in (0, 0.5]"),
        ({"optimizer": {"ema_decay": 1.0}}, "ema_decay is 1.0; it must be in (0, 1)"),
        ({"lora": {"lora_rank": 0}}, "lora_rank is 0; it must be at least 1"),
        ({"lora": {"lora_alpha": 0.0}}, "lora_alpha is 0.0; it must be above 0"),
        ({"model": DecoderConfig(prefix=3)}, "prefix is 3; it must be 0"),
    ],
)
def test_training_config_rejects_invalid_settings(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        nested = {
            name: replace(getattr(TEXT, name), **fields)
            for name, fields in change.items()
            if isinstance(fields, dict)
        }
        replace(TEXT, **{**change, **nested})


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_default_learning_rate_depends_on_the_optimizer(name):
    """Replacing the optimizer also changes the default, but not an explicit learning rate."""
    assert replace(OptimizerConfig(), optimizer=name).peak == LEARNING_RATES[name]
    assert replace(OptimizerConfig(learning_rate=0.5), optimizer=name).peak == 0.5


@pytest.mark.parametrize("kind", [TextTraining, TuningTraining, PreferenceTraining])
def test_training_configs_reject_prefix_models_and_unsuitable_lengths_and_batch_sizes(kind):
    for options, reason in (
        ({"model": DecoderConfig(prefix=3)}, "prefix is 3"),
        ({"model": DecoderConfig(max_length=1)}, "max_length is 1"),
        ({"model": DecoderConfig(max_length=8), "window_length": 9}, "window_length is 9"),
        ({"model": DecoderConfig(), "batch_size": 3, "mesh": {"data": 2}}, "batch_size is 3"),
    ):
        with pytest.raises(ValueError, match=reason):
            kind(**options)
