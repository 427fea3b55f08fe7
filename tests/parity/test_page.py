"""StableLM, the family that docs/checkpoints.md adds, agrees with transformers."""

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from jaxformer.hub import families  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}


@pytest.fixture
def added(monkeypatch):
    """Runs the page's code and registers its family."""
    code = re.search(r"## One more family.*?```python\n(.*?)FAMILIES\[", PAGE.read_text(), re.S)[1]
    assert len(code.splitlines()) < 60
    namespace = {"jf": jf}
    exec(code, namespace)
    monkeypatch.setitem(families.FAMILIES, "stablelm", namespace["STABLELM"])


@pytest.mark.parametrize(
    "options",
    [{}, {"use_qkv_bias": True, "tie_word_embeddings": True}, {"use_parallel_residual": True}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_model_family_from_docs_example_gives_logits_of_transformers(options, added, tmp_path):
    """Logits agree within 1e-4, and the export gives transformers the same model again."""
    torch.manual_seed(0)
    theirs = transformers.StableLmForCausalLM(transformers.StableLmConfig(**SIZES | options))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    theirs.eval().save_pretrained(tmp_path / "theirs")
    model, variables, _ = jf.load(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(0, 97, (2, 40))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model.apply(variables, tokens), expected, rtol=0, atol=1e-4)
    jf.export(tmp_path / "again", model, variables, model_type="stablelm")
    again = transformers.StableLmForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.tensor(tokens)).logits, expected, atol=1e-5)
