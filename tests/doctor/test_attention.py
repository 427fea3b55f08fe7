"""The doctor's report on attention agrees with the traced program."""

import jax
import pytest

import jaxformer as jf
from jaxformer.doctor.attention import (
    DENSE,
    GPU_GENERATION,
    PACKED,
    PROMPTS,
    attention_rows,
    explain_attention,
)
from jaxformer.doctor.targets import as_if_on, parse_target
from jaxformer.functional.attention import tokamax
from jaxformer.functional.attention.platforms import platform_kernels
from jaxformer.functional.inputs import Inputs, Run
from jaxformer.functional.placement import OneDevice
from jaxformer.models.check import source_shape
from jaxformer.models.config import Execution
from jaxformer.models.parameters import shape_tree
from tests.slow import mostly_rare

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 29, "max_length": 128, "embed_dim": 32, "num_heads": 2, "dtype": "bfloat16"}
CONFIGS = {
    "gpt2": jf.DecoderConfig(num_layers=3, **SIZES),
    "windows": jf.DecoderConfig(num_layers=4, window=(5, None, None, 5), **SIZES),
    "cap": jf.DecoderConfig(num_layers=2, attention_softcap=5.0, **SIZES),
    "bias": jf.DecoderConfig(num_layers=2, positions="alibi", **SIZES),
    "float32": jf.DecoderConfig(num_layers=2, **{**SIZES, "dtype": "float32"}),
    "head_dim 20": jf.DecoderConfig(num_layers=2, head_dim=20, **SIZES),
    "encoder": jf.EncoderConfig(num_layers=2, **SIZES),
    "pairs": jf.EncoderDecoderConfig(num_layers=3, num_encoder_layers=2, **SIZES),
    "frames": jf.EncoderDecoderConfig(
        num_layers=2, num_encoder_layers=2, source_features=7, **SIZES
    ),
    "T5": jf.EncoderDecoderConfig(num_layers=2, positions="relative", **SIZES),
}
# The primitive that calls a kernel.
PRIMITIVES = {"gpu:h100:1": "dot_product_attention_fwd", "tpu:v5e:1x1": "pallas_call"}


@pytest.fixture(autouse=True)
def without_tokamax(monkeypatch):
    monkeypatch.setattr(tokamax, "missing", lambda: "it is absent")


def primitives(jaxpr):
    """Yields the names of all primitives of a traced program, except those inside a kernel."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name
        inner = jax.tree.leaves([*equation.params.values()], is_leaf=lambda p: hasattr(p, "jaxpr"))
        for p in [] if name in PRIMITIVES.values() else inner:
            if hasattr(p, "eqns") or hasattr(p, "jaxpr"):
                yield from primitives(getattr(p, "jaxpr", p))


def traced_calls(config, target, segment_ids):
    """Counts the calls of the kernel in a traced forward pass."""
    model = jf.build(config)
    tokens = jax.numpy.ones((2, 128), int)
    shape = source_shape(config, *tokens.shape)
    source = None if shape is None else jax.numpy.ones(shape.shape, shape.dtype)
    inputs = Inputs(tokens, segment_ids, None, source, None if source is None else segment_ids)
    run = Run(
        Execution(layers="unrolled"),
        placement=OneDevice(platform_kernels(target.platform, GPU_GENERATION)),
    )

    def forward(params):
        return model.architecture.forward(params, inputs, run).hidden

    with as_if_on(target):
        jaxpr = jax.make_jaxpr(forward)(shape_tree(model)).jaxpr
    return sum(name.startswith(PRIMITIVES[str(target)]) for name in primitives(jaxpr))


@pytest.mark.parametrize("text", PRIMITIVES)
@pytest.mark.parametrize("name", mostly_rare(CONFIGS, "windows", "pairs"))
def test_number_of_layers_reported_as_fused_equals_fused_kernel_calls(name, text):
    target, config = parse_target(text), CONFIGS[name]
    found = explain_attention(config, Execution(), target, 128)
    for batch, segment_ids in ((DENSE, None), (PACKED, jax.numpy.ones((2, 128), int))):
        layers = [x for x in found if x.batch == batch]
        assert all((x.reason is None) == (x.implementation != "blockwise") for x in layers)
        fused = sum(len(x.numbers) for x in layers if x.reason is None)
        assert fused == traced_calls(config, target, segment_ids), layers
        parts = {part: [] for part in (x.part for x in layers)}
        for x in layers:
            parts[x.part] += x.numbers
        encoder = {"encoder layers": 2} if config.reads_source else {}
        for part, numbers in parts.items():
            number = encoder.get(part, config.num_layers)
            assert sorted(numbers) == list(range(1, number + 1))


def test_attention_report_lists_features_that_fused_kernels_lack():
    def reasons(name, target, batch=DENSE):
        found = explain_attention(CONFIGS[name], Execution(), parse_target(target), 128)
        return {x.numbers: x.reason for x in found if x.batch == batch}

    cap = "cuDNN: the kernel does not support a soft cap of the scores; tokamax: it is absent"
    assert reasons("cap", "gpu:h100:1") == {(1, 2): cap}
    assert "bias" in reasons("bias", "tpu:v5e:1x1")[1, 2]
    assert "float32" in reasons("float32", "gpu:h100:1")[1, 2]
    assert reasons("gpt2", "tpu:v5e:1x1", PROMPTS) == {(1, 2, 3): None}
    assert "sliding window" in reasons("windows", "gpu:h100:1", PROMPTS)[1, 4]
    windows = reasons("windows", "gpu:h100:1", PACKED)
    assert windows[2, 3] is None and "sliding window" in windows[1, 4]


@pytest.mark.parametrize(
    "attention, target, implementation",
    [
        ("explicit", "tpu:v5e:1x1", "explicit"),
        ("blockwise", "gpu:h100:1", "blockwise"),
        ("auto", "cpu:1", "blockwise"),
        ("fused", "cpu:1", "refused"),
        ("fused", "tpu:v5e:1x1", "splash"),
    ],
)
def test_attention_setting_overrides_automatic_implementation_choice(
    attention, target, implementation
):
    found = explain_attention(
        CONFIGS["gpt2"], Execution(attention=attention), parse_target(target), 128
    )
    assert found[0].implementation == implementation
    assert (found[0].reason is None) == (implementation == "splash")


def test_tokamax_is_used_where_cudnn_is_unsupported(monkeypatch):
    monkeypatch.setattr(tokamax, "missing", lambda: None)

    def chosen(name, batch):
        found = explain_attention(CONFIGS[name], Execution(), parse_target("gpu:h100:1"), 128)
        return {x.numbers: x.implementation for x in found if x.batch == batch}

    assert chosen("windows", DENSE) == {(1, 2, 3, 4): "cuDNN"}
    assert chosen("windows", PACKED) == {(1, 4): "tokamax", (2, 3): "cuDNN"}
    assert chosen("cap", PROMPTS) == chosen("cap", DENSE) == {(1, 2): "tokamax"}
    assert chosen("bias", DENSE) == {(1, 2): "blockwise"}


def test_attention_report_prints_layer_numbers_as_ranges():
    found = explain_attention(CONFIGS["windows"], Execution(), parse_target("gpu:h100:1"), 128)
    lines = attention_rows(found)
    assert (DENSE, "", "") in lines and ("  layers 1–4", "cuDNN", "") in lines
    limited = [line[0] for line in lines if line and "sliding window" in line[2]]
    assert limited == ["  layers 1, 4"] * 2  # for packed documents and for prompts


def test_attention_report_rejects_model_without_attention():
    config = jf.RecurrentConfig(vocab_size=29, embed_dim=8)
    with pytest.raises(ValueError, match="a Recurrent has no attention layers to report"):
        explain_attention(config, Execution(), parse_target("cpu:1"), 8)
