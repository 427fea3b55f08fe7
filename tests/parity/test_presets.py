"""Every preset exports to a transformers class that computes the same logits."""

from dataclasses import replace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from jaxformer.models.config import PRESETS  # noqa: E402
from jaxformer.models.parameters import shape_tree  # noqa: E402
from tests.hub.test_presets import EXPORTED, PROMPT, default_run  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")
SMALL = {"vocab_size": 97, "max_length": 64, "num_layers": 2, "embed_dim": 64, "num_heads": 4}


@pytest.mark.parametrize("name", EXPORTED)
def test_preset_logits_equal_transformers(name, tmp_path):
    """All weights are random, biases and scales included. Published presets are made smaller."""
    config = EXPORTED[name]
    if name in PRESETS:
        grouped = config.num_kv_heads is not None
        widths = {x: getattr(config, x) and 96 for x in ("mlp_dim", "expert_dim")}
        config = replace(config, **SMALL, **widths, num_kv_heads=2 if grouped else None)
    model = jf.build(config)
    random = np.random.default_rng(0)
    shapes = shape_tree(model)
    params = jax.tree.map(lambda x: 0.1 * random.normal(size=x.shape).astype(np.float32), shapes)
    tokens = random.integers(4, config.vocab_size, (2, 48))
    theirs_read, ours_read = {"input_ids": torch.tensor(tokens)}, {}
    if isinstance(config, jf.EncoderDecoderConfig):
        ours_read = {"source": random.integers(4, config.vocab_size, (2, 40))}
        theirs_read = {"input_ids": torch.tensor(ours_read["source"])}
        theirs_read["decoder_input_ids"] = torch.tensor(tokens)
    variables = {"params": params}
    class_name = jf.export(tmp_path / "out", model, variables)
    theirs, loading = getattr(transformers, class_name).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    with torch.no_grad():
        outputs = theirs.eval()(**theirs_read)
    logits = outputs.get("logits", outputs.get("prediction_logits"))
    ours = jax.jit(model.apply)(variables, tokens, **ours_read)
    np.testing.assert_allclose(ours, logits, rtol=0, atol=1e-4)


def test_model_trained_with_defaults_generates_the_same_text_in_transformers(tmp_path):
    """Trained, exported and opened as in the README: the same ids and the same greedy text."""
    checkpoint, prompt, expected = default_run(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(PROMPT).input_ids == prompt
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=len(expected), do_sample=False, eos_token_id=None
        )
    found = found.numpy()[0, len(prompt) :]
    np.testing.assert_array_equal(found, expected)
    assert tokenizer.decode(found) == checkpoint.tokenizer.decode(expected.tolist())
