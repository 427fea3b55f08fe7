"""Captured hidden states and attention weights are those that transformers returns."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from jaxformer.interpret.attribution import attribute  # noqa: E402
from tests.parity import checkpoints  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH = 24


@pytest.fixture(params=["gpt2", "llama", "bert", "t5"], scope="module")
def pair(request, tmp_path_factory):
    """Returns (transformers model, our checkpoint, tokens, {"source": …} or {})."""
    folder = tmp_path_factory.mktemp("theirs") / "model"
    theirs, _ = checkpoints.saved(request.param, 0, folder)
    theirs.set_attn_implementation("eager")
    rng = np.random.default_rng(0)
    tokens, source = rng.integers(4, checkpoints.VOCAB, (2, 2, LENGTH))
    return theirs, jf.load(folder), tokens, {"source": source} if request.param == "t5" else {}


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=1e-5)


def test_hidden_states_and_attentions_equal_transformers(pair):
    theirs, (model, variables, _), tokens, source = pair
    capture = ("embedding", "block.output", "final_norm", "attention.weights")
    prefix = ("", "encoder.") if source else ("",)
    capture = [p + name for p in prefix for name in capture]
    capture += ["cross_attention.weights"] * bool(source)
    seen = jf.inspect(model, variables, tokens, capture=capture, **source).captured
    given = {"input_ids": torch.tensor(tokens)}
    if source:
        given = {"input_ids": torch.tensor(source["source"])}
        given["decoder_input_ids"] = torch.tensor(tokens)
    with torch.no_grad():
        wanted = theirs(**given, output_hidden_states=True, output_attentions=True)
    names = {"": "decoder_", "encoder.": "encoder_"} if source else {"": ""}
    for prefix, name in names.items():
        states = wanted[f"{name}hidden_states"]
        assert len(states) == len(seen[prefix + "block.output"]) + 1
        close([seen[prefix + "embedding"], *seen[prefix + "block.output"][:-1]], states[:-1])
        # T5 scales its final states before the head. `hidden_states` contains the unscaled states.
        scale = 1.0 if prefix else getattr(model.config, "output_scale", None) or 1.0
        close([seen[prefix + "final_norm"] / scale], states[-1:])
        close(seen[prefix + "attention.weights"], wanted[f"{name}attentions"])
    if source:
        close(seen["cross_attention.weights"], wanted["cross_attentions"])


def test_logit_attributions_sum_to_transformers_logits(pair):
    """Within 1e-4. BERT's logits are no sum, because of its transform."""
    theirs, (model, variables, _), tokens, source = pair
    if getattr(model.config, "transform", False):
        with pytest.raises(ValueError, match="transform"):
            attribute(model, variables, tokens, tokens[:, 0])
        return
    given = {"input_ids": torch.tensor(tokens)}
    if source:
        given = {"input_ids": torch.tensor(source["source"])}
        given["decoder_input_ids"] = torch.tensor(tokens)
    with torch.no_grad():
        logits = theirs(**given).logits.numpy()
    for position in (0, 7, LENGTH - 1):
        found = attribute(model, variables, tokens, tokens[:, 0], position, **source)
        wanted = logits[[0, 1], position, tokens[:, 0]]
        np.testing.assert_allclose(found.total, wanted, rtol=0, atol=1e-4)
