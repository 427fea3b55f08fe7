"""PEFT opens exported adapters, and the adapted transformers model gives jaxformer's logits.

The logits also agree if the adapter is loaded from the folder of its base model.
"""

import shutil

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
pytest.importorskip("transformers", reason="parity needs transformers")
peft = pytest.importorskip("peft", reason="PEFT's layout is compared where peft is installed")

import jaxformer as jf  # noqa: E402
from jaxformer.artifacts.tensors import flat  # noqa: E402
from jaxformer.hub.load import opened  # noqa: E402
from jaxformer.hub.peft import export_adapter  # noqa: E402
from jaxformer.models.config.encoder import ReadsSource  # noqa: E402
from jaxformer.models.config.lora import LoraConfig  # noqa: E402
from jaxformer.models.config.transformer import TransformerConfig  # noqa: E402
from jaxformer.models.parameters import shape_tree  # noqa: E402
from tests.hub.adapters import learnt  # noqa: E402
from tests.parity import checkpoints  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
pytestmark += [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn of each other


def has_experts(config):
    return isinstance(config, TransformerConfig) and config.has_experts


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_exported_adapter_has_equal_logits_in_peft(family, tmp_path):
    """Adapts every projection of every family, including fused layers of transformers."""
    theirs, base = checkpoints.saved(family, 0, tmp_path / "base")
    model, variables, _ = jf.load(base)
    paths = flat(variables["params"])
    maps = {path.split("/")[-2] for path in paths if path.endswith("/kernel")}
    if family == "gpt_neox":  # our export refuses its head, which has two names
        maps.remove("head")
    if has_experts(model.config):  # PEFT cannot update routers and experts
        maps -= {"router", "shared_gate", "up", "gate", "down"}
    lora = LoraConfig(lora_rank=3, lora_alpha=5.0, lora_target_modules=",".join(sorted(maps)))
    learnt(base, lora, tmp_path / "run")
    export_adapter(tmp_path / "adapter", tmp_path / "run")
    tokens, target = (np.random.default_rng(n).integers(4, 97, (2, 12)) for n in (0, 1))
    reads = isinstance(model.config, ReadsSource)
    given = {"input_ids": torch.tensor(tokens)}
    given |= {"decoder_input_ids": torch.tensor(target)} if reads else {}
    ours = (target, {"source": tokens}) if reads else (tokens, {})
    apply = jax.jit(model.apply)
    with torch.no_grad():
        plain = theirs(**given).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
        found = adapted(**given).logits.numpy()
    merged = opened(tmp_path / "run").read(shape_tree(model))
    wanted = apply({"params": merged}, ours[0], **ours[1])
    size = max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * size)
    assert np.abs(found - plain).max() > 0.01 * size
    shutil.copytree(tmp_path / "adapter", base, dirs_exist_ok=True)
    beside = jf.load(base)
    logits = apply(beside.variables, ours[0], **ours[1])
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5 * size)
