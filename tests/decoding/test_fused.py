"""Decoding works with `Execution(attention="fused")` on a platform that has a fused kernel."""

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.doctor.attention import PROMPTS, explain_attention
from jaxformer.doctor.machines import Target
from jaxformer.functional.attention import platforms
from jaxformer.functional.attention.splash import Splash
from jaxformer.models import activation_sharding
from jaxformer.models.config import Execution
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
    """Makes splash, which runs on a CPU by interpretation, the platform's fused kernel."""
    for module in (platforms, activation_sharding):
        monkeypatch.setattr(module, "fused_kernels", lambda: (Splash(interpret=True),))


def results(kind, attention):
    """Returns the results of all functions of decoding."""
    model = jf.build(CONFIGS[kind], Execution(attention=attention))
    variables, tokens = tiny.weights(model, 0), np.array([[1, 2, 3, 4, 5]] * 2)
    source = [[7, 8, 9], [3]] if model.config.reads_source else None
    new = {"max_new_tokens": 3, "source": source}
    generated = jf.generate(
        model, variables, PROMPTS_OF_IDS, sampler=jf.Sampler(temperature=0.0), **new
    )
    found = jf.beam_search(model, variables, PROMPTS_OF_IDS, beam_width=2, **new)
    cache = jf.start(model, variables, 2, 16, source)
    logits, cache = jf.advance(model, variables, tokens, cache)
    step, _ = jf.advance(model, variables, tokens[:, :1], cache)
    score = jf.score(model, variables, tokens, source=source)
    return generated[:3], tuple(found), logits, step, score


@pytest.mark.parametrize("kind", mostly_slow(CONFIGS, "relative", slow=["decoder"]))
def test_fused_attention_decodes_as_explicit_attention_does(kind):
    """In every function of decoding, though no fused kernel supports a step over a cache."""
    fused, explicit = (jax.tree.leaves(results(kind, name)) for name in ("fused", "explicit"))
    for found, expected in zip(fused, explicit, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_only_decoding_falls_back():
    """A pass without a cache is refused where no kernel supports it."""
    model = jf.build(CONFIGS["relative"], Execution(attention="fused"))
    with pytest.raises(ValueError, match='attention "fused" cannot run this'):
        model.apply(tiny.weights(model, 0), np.array([[1, 2, 3, 4]]))


def test_the_report_does_not_say_that_a_prompt_is_refused():
    """It does say so of whole sequences, if no kernel supports them."""
    fused, target = Execution(attention="fused"), Target("tpu:v5e", (1,))
    layers = explain_attention(CONFIGS["relative"], fused, target, 64)
    refused = {layer.rows for layer in layers if layer.implementation == "refused"}
    assert refused == {layer.rows for layer in layers} - {PROMPTS}
