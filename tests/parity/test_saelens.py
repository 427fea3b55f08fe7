"""Autoencoders that SAELens saves compute the same features and reconstructions.

`.ci/run` skips this test, because SAELens 6 requires a TransformerLens below version 4.
"""

import numpy as np
import pytest

from jaxformer.interpret import load_autoencoder
from tests.properties import tiny

torch = pytest.importorskip("torch", reason="torch is not installed")
saes = pytest.importorskip("sae_lens", reason="SAELens is not installed")

KINDS = {
    "standard": (saes.StandardSAE, saes.StandardSAEConfig, {}),
    "topk": (saes.TopKSAE, saes.TopKSAEConfig, {"k": 4}),
    "jumprelu": (saes.JumpReLUSAE, saes.JumpReLUSAEConfig, {}),
    "gated": (saes.GatedSAE, saes.GatedSAEConfig, {}),
}


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_autoencoder_equals_that_of_saelens(kind, centred, tmp_path):
    make, config, options = KINDS[kind]
    metadata = saes.saes.sae.SAEMetadata(hook_name="blocks.3.hook_resid_pre")
    theirs = make(
        config(d_in=8, d_sae=20, apply_b_dec_to_input=centred, metadata=metadata, **options)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    theirs.save_model(tmp_path)
    ours = load_autoencoder(tmp_path)
    assert (ours.layer, ours.point) == (3, "block.input")
    x = torch.randn(50, 8, generator=generator)
    with torch.no_grad():
        features, output = theirs.encode(x), theirs(x)
    assert (features > 0).any(0).sum() > 10
    tiny.close(ours.encode(np.asarray(x)), features)
    tiny.close(ours(np.asarray(x)), output)
