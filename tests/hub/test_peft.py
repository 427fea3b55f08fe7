"""An adapter in PEFT's layout follows PEFT's formula: W + (alpha / r) B A."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxformer as jf
from jaxformer.artifacts.tensors import flat
from jaxformer.hub.peft import export_adapter
from jaxformer.models.config.lora import LoraConfig
from tests.errors import error_of
from tests.hub import foreign
from tests.hub.adapters import learnt
from tests.hub.configs import base
from tests.properties import tiny
from tests.slow import mostly_slow


@pytest.mark.slow
@pytest.mark.parametrize("family", foreign.MODELS)
def test_base_weights_plus_exported_update_equal_merged_weights(family, tmp_path):
    """Compares each tensor, including fused layers; tensors without an update are unchanged."""
    _, variables = foreign.write(tmp_path / "base", family)
    paths = [path for path in flat(variables["params"]) if path.endswith("/kernel")]
    maps = sorted({path.split("/")[-2] for path in paths})
    lora = LoraConfig(lora_rank=3, lora_alpha=5.0, lora_target_modules=",".join(maps))
    learnt(tmp_path / "base", lora, tmp_path / "run")
    export_adapter(tmp_path / "adapter", tmp_path / "run")
    jf.export(tmp_path / "merged", *jf.load(tmp_path / "run"), model_type=family)
    base, merged = (load_file(tmp_path / x / "model.safetensors") for x in ("base", "merged"))
    options = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    seen = set()
    for name in options["target_modules"]:
        a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        rank, alpha = (
            options[f"{kind}_pattern"].get(name, options[whole])
            for kind, whole in (("rank", "r"), ("alpha", "lora_alpha"))
        )
        assert len(a) == rank
        update = alpha / rank * (b.astype(np.float64) @ a)
        update = update.T if options["fan_in_fan_out"] else update
        seen.add(f"{name}.weight")
        np.testing.assert_allclose(
            merged[f"{name}.weight"], base[f"{name}.weight"] + update, rtol=0, atol=1e-6
        )
        assert np.abs(update).max() > 0.01
    assert 2 * len(seen) == len(adapter) > 0
    for name in set(base) - seen:
        np.testing.assert_array_equal(merged[name], base[name])


def test_exporting_adapter_without_path_of_its_base_raises_error(tmp_path):
    """Exporting a run without the path of its base raises the same error as loading it."""
    foreign.write(tmp_path / "base", "gpt2")
    learnt(tmp_path / "base", LoraConfig(lora_rank=2), tmp_path / "run")
    path = tmp_path / "run/config.json"
    sections = json.loads(path.read_text())
    del sections["init_from"]
    path.write_text(json.dumps(sections))
    message = error_of(export_adapter, tmp_path / "adapter", tmp_path / "run")
    assert message == error_of(jf.load, tmp_path / "run")
    assert message.startswith(f"{path} has no section 'init_from'")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("maps", mostly_slow(["up", "down", "router"], "up", slow=["down"]))
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_exporting_adapter_of_experts_is_rejected(family, maps, tmp_path):
    """PEFT updates linear layers only, but transformers stores experts as other parameters."""
    model = jf.build(base(family))
    jf.export(tmp_path / "base", model, tiny.weights(model, 0), model_type=family)
    learnt(tmp_path / "base", LoraConfig(lora_rank=2, lora_target_modules=maps), tmp_path / "run")
    with pytest.raises(ValueError, match=r"PEFT cannot update the router and the experts"):
        export_adapter(tmp_path / "adapter", tmp_path / "run")
    assert not (tmp_path / "adapter").exists()
