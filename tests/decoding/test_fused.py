"""Decoding with `Execution(attention="fused")` on a platform with a fused kernel."""

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.doctor.attention import PROMPTS, explain_attention
from jaxformer.doctor.targets import Target
from jaxformer.functional.attention import platforms
from jaxformer.functional.attention.splash import Splash
from jaxformer.models.config import Execution
from jaxformer.models.sharding import activations
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
SIZES = {"vocab_size": 19, "max_length": 256, "num_layers": 1, "embed_dim": 16, "num_heads": 2}
CONFIGS = {
    "decoder": jf.DecoderConfig(**SIZES, mlp_dim=8),
    "relative": jf.DecoderConfig(**SIZES, mlp_dim=8, positions="relative"),
    "encoder-decoder": jf.EncoderDecoderConfig(**SIZES, mlp_dim=8),
}
PROMPTS_OF_IDS = [[1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(autouse=True)
def fused_kernel(monkeypatch):
    """Makes splash attention, interpreted on the CPU, the fused kernel of the platform."""
    for module in (platforms, activations):
        monkeypatch.setattr(module, "fused_kernels", lambda: (Splash(interpret=True),))


def results(kind, attention):
    """Returns the results of all decoding functions."""
    model = jf.build(CONFIGS[kind], Execution(attention=attention))
    variables, tokens = tiny.weights(model, 0), np.array([[1, 2, 3, 4, 5]] * 2)
    source = [[7, 8, 9], [3]] if model.config.reads_source else None
    new = {"max_new_tokens": 3, "source": source}
    generated = jf.generate(
        model, variables, PROMPTS_OF_IDS, sampler=jf.Sampler(temperature=0.0), **new
    )
    found = jf.beam_search(model, variables, PROMPTS_OF_IDS, beam_width=2, **new)
    cache = jf.init_cache(model, variables, 2, 16, source)
    logits, cache = jf.extend(model, variables, tokens, cache)
    step, _ = jf.extend(model, variables, tokens[:, :1], cache)
    score = jf.score(model, variables, tokens, source=source)
    return generated[:3], tuple(found), logits, step, score


@pytest.mark.parametrize("kind", mostly_slow(CONFIGS, slow=["relative", "decoder"]))
def test_decoding_with_fused_attention_equals_decoding_with_unfused_attention(kind):
    """All decoding functions work, although no fused kernel supports a step with a cache."""
    fused, explicit = (jax.tree.leaves(results(kind, name)) for name in ("fused", "explicit"))
    for found, expected in zip(fused, explicit, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_forward_pass_without_cache_raises_error_for_unsupported_fused_kernel():
    """A forward pass without a cache raises an error if no fused kernel supports it."""
    model = jf.build(CONFIGS["relative"], Execution(attention="fused"))
    with pytest.raises(ValueError, match='attention="fused" is not possible'):
        model.apply(tiny.weights(model, 0), np.array([[1, 2, 3, 4]]))


def test_doctor_reports_fused_kernel_as_supported_for_prompts():
    """The report lists only whole sequences as unsupported by the fused kernel."""
    fused, target = Execution(attention="fused"), Target("tpu:v5e", (1,))
    layers = explain_attention(CONFIGS["relative"], fused, target, 64)
    refused = {layer.batch for layer in layers if layer.implementation == "refused"}
    assert refused == {layer.batch for layer in layers} - {PROMPTS}
