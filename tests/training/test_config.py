"""What a run's config accepts."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.models.config import DecoderConfig
from jaxformer.training.config import TrainingConfig

COUNTS = [
    (section, field.name)
    for section, kind in (("", TrainingConfig), ("model", DecoderConfig))
    for field in fields(kind)
    if field.type in (int, int | None) and field.name not in ("seed", "window_length", "prefix")
]
COUNTS.append(("optimizer", "warmup_steps"))


@pytest.mark.parametrize(("section", "name"), COUNTS)
@given(value=st.integers(min_value=2**31))
def test_a_count_that_no_device_holds_is_refused(section, name, value):
    """By name, before it overflows somewhere below."""
    config = TrainingConfig()
    with pytest.raises(ValueError, match=rf"\b{name}\b.*\b{value}\b"):
        if section:
            changed = replace(getattr(config, section), **{name: value})
            replace(config, **{section: changed})
        else:
            replace(config, **{name: value})


@given(seed=st.one_of(st.integers(max_value=-1), st.integers(min_value=2**32)))
def test_a_seed_without_a_key_of_its_own_is_refused(seed):
    """Of a larger one JAX keeps the last 32 bits: it would be the same as a smaller one."""
    with pytest.raises(ValueError, match=rf"seed is {seed}; it must be in 0 … 4294967295"):
        TrainingConfig(seed=seed)
    for allowed in (0, 2**32 - 1):
        assert TrainingConfig(seed=allowed).seed == allowed
