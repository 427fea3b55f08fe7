"""Weights of 4 bits are decoded as by transformers, bit for bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.hub.mxfp4 import decode  # noqa: E402
from tests.hub.test_mxfp4 import write  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_mxfp4_byte_and_scale_decodes_as_in_transformers(dtype):
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(256, axis=1)
    scales = np.arange(256, dtype=np.uint8)[None, :, None].repeat(16, axis=2)
    found = torch.tensor(np.ascontiguousarray(decode(blocks, scales))).to(getattr(torch, dtype))
    packed = torch.tensor(blocks), torch.tensor(scales)
    expected = convert_moe_packed_tensors(*packed, dtype=getattr(torch, dtype))
    bits = torch.int32 if dtype == "float32" else torch.int16
    assert (found.view(bits) == expected.view(bits)).all()


def test_mxfp4_checkpoint_logits_equal_transformers(tmp_path):
    """The weights are so large that both halves of the gates are clipped."""
    write(tmp_path / "packed")
    model, variables, _ = jf.load(tmp_path / "packed")
    tokens = np.random.default_rng(0).integers(4, 61, (2, 40))
    theirs = transformers.GptOssForCausalLM.from_pretrained(
        tmp_path / "packed",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    found = model.apply(variables, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    seen = jf.inspect(model, variables, tokens, capture=("block.output",)).captured
    assert np.abs(seen["block.output"]).max() > 7
