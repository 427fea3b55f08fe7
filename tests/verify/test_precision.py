"""A bfloat16 model is certified in float32, which shows bugs smaller than bfloat16's rounding."""

import pytest

import jaxformer as jf
from jaxformer.verify.certificate import check_property
from jaxformer.verify.certified_model import certified_model
from tests.properties import tiny
from tests.slow import mostly_rare

ROUNDED = ("cached = full", "batch-independent", "jitted = eager")
KINDS = {
    "decoder": {"positions": "rotary", "norm": "rms", "num_layers": 1},
    "lstm": {"kind": jf.RecurrentConfig},
    "cnn": {"kind": jf.ConvolutionalConfig},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "max_source_length": 9},
    "attention lstm": {"kind": jf.RecurrentEncoderDecoderConfig},
}


def subject(dtype="bfloat16", **options):
    model = tiny.build(dtype=dtype, **options)
    return certified_model(model, tiny.weights(model, 0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_rare(KINDS, *list(KINDS)[:1]))
def test_verification_of_bfloat16_model_equals_that_of_float32_model(kind):
    """Both run the same arithmetic in the same order, so the details are equal."""
    half, single = subject(**KINDS[kind]), subject("float32", **KINDS[kind])
    for name in ROUNDED:
        found, twin = check_property(half, name), check_property(single, name)
        assert found.holds and found.detail == f"{twin.detail}; in float32", found


@pytest.mark.slow
def test_model_verification_states_the_dtype_of_each_check():
    half, single = subject(num_layers=1), subject("float32", num_layers=1)
    for name in ("deterministic", "loss floor", "finite in bfloat16"):
        said = ("; in float32" in check_property(x, name).detail for x in (half, single))
        assert tuple(said) == (name != "finite in bfloat16", False)


class OffCache(jf.Decoder):
    """A decoder whose cached outputs are off by 0.2 %, which bfloat16 rounding would hide."""

    def forward(self, weights, inputs, cache=None, **options):
        passed = super().forward(weights, inputs, cache, **options)
        off = 1.0 if cache is None else 1.002
        return passed._replace(hidden=off * passed.hidden)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_verification_detects_an_error_of_2_per_mille_in_cached_logits(dtype):
    sound = tiny.build(dtype=dtype)
    model = OffCache(sound.config, execution=sound.execution)
    found = check_property(certified_model(model, tiny.weights(model, 0)), "cached = full")
    assert not found.holds and "differ by 0.00" in found.detail
