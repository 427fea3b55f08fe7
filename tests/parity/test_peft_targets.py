"""PEFT selects the same linear layers, ranks and scales from the options of an adapter."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
pytest.importorskip("transformers", reason="parity needs transformers")
peft = pytest.importorskip("peft", reason="PEFT's rules are compared where peft is installed")
from peft.tuners.tuners_utils import check_target_module_exists  # noqa: E402
from peft.utils.other import get_pattern_key  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.hub.adapter import pattern_value, read_targets  # noqa: E402
from jaxformer.hub.options import Options  # noqa: E402
from tests.parity import checkpoints  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

MODULES = """transformer.h.1.attn.c_attn h.1.attn.c_attn model.layers.0.self_attn.q_proj
    model.layers.11.mlp.up_proj layers.1.fc1 encoder.block.0.layer.0.SelfAttention.q
    decoder.block.1.layer.2.DenseReluDense.wi model.layers.1.experts.0.up_proj lm_head q""".split()
NAMES = ["c_attn", "q_proj", "up_proj", "attn.c_attn", "q", "proj", "lm_head", MODULES[0]]
REGEXES = [r".*\.(q|q_proj)", r".*attn", r".*\.[01]\..*", "lm_head", r"(?:.*?mlp.*?up_proj)|q"]
LISTS = [None, "layers", "h", ["block", "h"], ["experts", "layers"], "layer", []]
NUMBERS = [None, 0, 1, [1], [0, 11], []]


@given(
    st.one_of(st.sampled_from(REGEXES), st.lists(st.sampled_from(NAMES), min_size=1)),
    st.sampled_from([None, [], ["q_proj"], r".*\.1\..*"]),
    st.sampled_from(NUMBERS),
    st.sampled_from(LISTS),
)
def test_target_modules_select_the_same_layers_as_in_peft(modules, excluded, layers, lists):
    options = {"target_modules": modules, "exclude_modules": excluded}
    if isinstance(modules, list) and layers is not None:
        options |= {"layers_to_transform": layers, "layers_pattern": lists}
    theirs = peft.LoraConfig(**options)
    ours = read_targets(Options(options, "adapter_config.json"))
    for module in MODULES:
        assert ours.is_adapted(module) == bool(check_target_module_exists(theirs, module)), module


@given(st.dictionaries(st.sampled_from([*NAMES, *REGEXES, "^q", "^h.1.attn.c_attn"]), st.just(3)))
def test_rank_pattern_selects_the_same_rank_as_in_peft(patterns):
    numbered = {name: n + 1 for n, name in enumerate(patterns)}
    for module in MODULES:
        theirs = numbered.get(get_pattern_key(numbered.keys(), module), 8)
        assert pattern_value(numbered, module, 8) == theirs


OPTIONS = {
    "some layers": {"target_modules": ["c_attn", "c_fc"], "layers_to_transform": [1]},
    "a list of layers": {
        "target_modules": ["c_attn"],
        "layers_to_transform": 0,
        "layers_pattern": "h",
    },
    "a regular expression": {"target_modules": r".*\.h\.0\.(attn\.c_attn|mlp\.c_proj)"},
    "ranks and scales": {
        "target_modules": ["attn.c_proj", "c_fc"],
        "rank_pattern": {r"h\.0\.attn.*": 3, "c_fc": 2},
        "alpha_pattern": {r".*c_(fc|x)": 5},
    },
    "an exclusion": {"target_modules": ["c_proj"], "exclude_modules": r".*\.mlp\..*"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_adapter_saved_by_peft_is_loaded_with_equal_logits(case, tmp_path):
    """The adapter also survives `jf.export`, merged into the weights."""
    theirs, base = checkpoints.saved("gpt2", 0, tmp_path / "base")
    plain = jf.load(base)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **OPTIONS[case])
    adapted = peft.get_peft_model(theirs, config).eval()
    adapted.save_pretrained(base)
    assert json.loads((base / "adapter_config.json").read_text())["peft_type"] == "LORA"
    tokens = np.random.default_rng(0).integers(4, 97, (2, 12))
    with torch.no_grad():
        wanted = adapted(input_ids=torch.tensor(tokens)).logits.numpy()
    loaded = jf.load(base)
    jf.export(tmp_path / "merged", *loaded, model_type="gpt2")
    apply = jax.jit(loaded.model.apply)
    size = np.abs(wanted).max()
    for found in (loaded, jf.load(tmp_path / "merged")):
        logits = apply(found.variables, tokens)
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5 * max(1, size))
    assert np.abs(apply(plain.variables, tokens) - wanted).max() > 0.01 * size
