"""Weights of 4 bits are read as the numbers that the format defines."""

import itertools
import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import jaxformer as jf
from jaxformer.artifacts.tensors import Tensor
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.mxfp4 import PackedTensor, decode
from tests.hub import foreign
from tests.properties import tiny

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DIM, WIDTH, EXPERTS = 32, 64, 3
PACKED = [
    f"model.layers.{layer}.mlp.experts.{name}"
    for layer, name in itertools.product(range(2), ("gate_up_proj", "down_proj"))
]


def number(code, scale):
    """Returns one number by the definition of the format."""
    return (-1) ** (code >> 3) * VALUES[code & 7] * 2.0 ** (scale - 127)


@given(byte=st.integers(0, 255), scale=st.integers(0, 255), place=st.integers(0, 15))
def test_lower_four_bits_of_mxfp4_byte_are_the_first_number(byte, scale, place):
    blocks, scales = np.zeros((1, 2, 1, 16), np.uint8), np.full((1, 2, 1), 127, np.uint8)
    blocks[0, 1, 0, place], scales[0, 1, 0] = byte, scale
    found = decode(blocks, scales)
    expected = np.zeros((1, 32, 2))
    with np.errstate(over="ignore"):
        pair = np.float32([number(byte & 15, scale), number(byte >> 4, scale)])
    expected[0, 2 * place : 2 * place + 2, 1] = pair
    np.testing.assert_array_equal(found, expected)


def packed(seed, shape):
    """Returns random blocks and scales of a tensor [experts, inputs, outputs]."""
    rng = np.random.default_rng(seed)
    experts, inputs, outputs = shape
    scales = rng.integers(120, 126, (experts, outputs, inputs // 32), np.uint8)
    return rng.integers(0, 256, (*scales.shape, 16), np.uint8), scales


@cache
def model():
    config = jf.DecoderConfig(
        **{**FAMILIES["gpt_oss"].fixed, "attention_output_bias": True},
        **{"vocab_size": 61, "max_length": 64, "num_layers": 2, "embed_dim": DIM, "num_heads": 4},
        **{"query_key_value_bias": True, "num_experts": EXPERTS, "expert_dim": WIDTH},
        tie_embeddings=False,
    )
    return jf.build(config)


def write(folder, change=lambda tensors: tensors, **options):
    """Writes a folder of gpt-oss whose experts are packed."""
    jf.export(folder, model(), tiny.weights(model(), 0), model_type="gpt_oss")

    def pack(tensors):
        for seed, name in enumerate(PACKED):
            parts = packed(seed, tensors.pop(name).shape)
            tensors |= zip((f"{name}_blocks", f"{name}_scales"), parts, strict=True)
        return change(tensors)

    foreign.tensors(folder, pack)
    foreign.options(folder, **({"quantization_config": {"quant_method": "mxfp4"}} | options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_weights_are_unpacked_by_load_and_stay_unpacked_in_export(dtype, tmp_path):
    """The columns of `gate_up_proj` belong to gate and up in turn."""
    write(tmp_path / "packed")
    found = jf.load(tmp_path / "packed", dtype=dtype)
    experts = found.variables["params"]["blocks"]["feedforward"]
    for layer in range(2):
        both = decode(*packed(2 * layer, (EXPERTS, DIM, 2 * WIDTH)))
        np.testing.assert_array_equal(experts["gate"]["kernel"][layer], both[..., 0::2])
        np.testing.assert_array_equal(experts["up"]["kernel"][layer], both[..., 1::2])
        down = decode(*packed(2 * layer + 1, (EXPERTS, WIDTH, DIM)))
        np.testing.assert_array_equal(experts["down"]["kernel"][layer], down)
    jf.export(tmp_path / "again", found.model, found.variables)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["model_type"] == "gpt_oss" and written["dtype"] == dtype
    assert "quantization_config" not in written
    names = load_file(tmp_path / "again" / "model.safetensors").keys()
    assert names >= {*PACKED} and not any(name.endswith(("_blocks", "_scales")) for name in names)


def without(name):
    return lambda tensors: {x: y for x, y in tensors.items() if x != name}


def with_part(name, array):
    return lambda tensors: tensors | {name: array}


FIRST = PACKED[1]  # [3, 64, 32]: blocks [3, 32, 2, 16] and scales [3, 32, 2]
BROKEN = {
    "no scales": (without(f"{FIRST}_scales"), {}, f"tensor {FIRST} is missing"),
    "scales of other blocks": (
        with_part(f"{FIRST}_scales", np.zeros((3, 32, 1), np.uint8)),
        {},
        r"_scales is \(3, 32, 1\); config.json requires \(3, 32, 2\)",
    ),
    "blocks of another shape": (
        with_part(f"{FIRST}_blocks", np.zeros((3, 32, 2, 8), np.uint8)),
        {},
        r"_blocks is \(3, 32, 2, 8\); config.json requires \(3, 32, 2, 16\)",
    ),
    "blocks are floats": (
        with_part(f"{FIRST}_blocks", np.zeros((3, 32, 2, 16), np.float32)),
        {},
        "_blocks is F32; it must be U8",
    ),
    "another width": (
        lambda x: x,
        {"intermediate_size": 32},
        r"config.json requires \(3, 64,",
    ),
    "another method": (
        lambda x: x,
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quant_method must be 'mxfp4'",
    ),
    "no method": (lambda x: x, {"quantization_config": {"bits": 4}}, "must be 'mxfp4'"),
    "the option is missing": (lambda x: x, {"quantization_config": None}, "are missing"),
    "another clip": (lambda x: x, {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; only 7.0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_mxfp4_folder_is_rejected(name, tmp_path):
    change, options, message = BROKEN[name]
    write(tmp_path / "packed", change, **options)
    with pytest.raises(ValueError, match=message) as caught:
        jf.load(tmp_path / "packed")
    assert "\n" not in str(caught.value)


def test_incomplete_mxfp4_block_is_rejected(tmp_path):
    blocks, scales = (
        Tensor(f"down_{part}", tmp_path / "weights", "U8", shape, 0)
        for part, shape in (("blocks", (3, 8, 1, 16)), ("scales", (3, 8, 1)))
    )
    PackedTensor("down", blocks, scales).check((3, 32, 8))
    with pytest.raises(ValueError, match=r"of 32 inputs, but config.json requires 48"):
        PackedTensor("down", blocks, scales).check((3, 48, 8))
