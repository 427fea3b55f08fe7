"""The updates of a PEFT adapter in the folder of a model are added, or the adapter is rejected."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxformer as jf
from jaxformer.artifacts.tensors import flat
from jaxformer.hub.adapter import CONFIG, TENSORS, pattern_value, read_patterns, read_targets
from jaxformer.hub.options import Options
from jaxformer.hub.peft import export_adapter
from jaxformer.models.config.lora import LoraConfig
from tests.errors import error_of
from tests.hub import foreign
from tests.hub.adapters import learnt
from tests.hub.configs import base
from tests.properties import tiny

QUERY = "base_model.model.transformer.h.1.attn.c_attn"


def put(folder, config=None, tensors=None, **options):
    """Writes an adapter of one fused linear layer into a folder of a GPT-2."""
    rng = np.random.default_rng(0)
    own = {
        f"{QUERY}.lora_A.weight": rng.normal(size=(2, 16)).astype(np.float32),
        f"{QUERY}.lora_B.weight": rng.normal(size=(48, 2)).astype(np.float32),
    }
    content = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["h.1.attn.c_attn"]}
    content |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": "somewhere/else"}
    (folder / CONFIG).write_text(json.dumps(config or content | options))
    save_file(own if tensors is None else tensors(own), folder / TENSORS)


@pytest.fixture
def folder(tmp_path):
    foreign.write(tmp_path / "model", "gpt2")
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.parametrize("family", foreign.MODELS)
def test_loading_base_folder_with_exported_adapter_gives_merged_weights(family, tmp_path):
    """An exported adapter in its base model's folder is loaded, for each tensor layout."""
    foreign.write(tmp_path / "base", family)
    maps = "query,value,output,up"
    learnt(tmp_path / "base", LoraConfig(lora_rank=3, lora_target_modules=maps), tmp_path / "run")
    export_adapter(tmp_path / "adapter", tmp_path / "run")
    shutil.copytree(tmp_path / "base", tmp_path / "both")
    shutil.copytree(tmp_path / "adapter", tmp_path / "both", dirs_exist_ok=True)
    found, merged = (flat(jf.load(tmp_path / x).variables) for x in ("both", "run"))
    for name in merged:
        np.testing.assert_allclose(found[name], merged[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"c_attn": 8}, "lora_alpha": 1}, 4.0),
        ({"rank_pattern": {"^transformer.h.1.attn.c_attn": 2}, "r": 7}, 3.0),
        ({"rank_pattern": {"h.0.attn.c_attn": 3}}, 3.0),
        ({"fan_in_fan_out": True, "bias": "none", "modules_to_save": None}, 3.0),
        ({"init_lora_weights": "gaussian", "layers_to_transform": None, "loftq_config": {}}, 3.0),
        ({"layers_to_transform": [1]}, 3.0),
        ({"layers_to_transform": 1, "layers_pattern": "h"}, 3.0),
        ({"target_modules": r".*\.1\.attn\.c_(attn|wrong)"}, 3.0),
        ({"target_modules": ["attn.c_attn"], "exclude_modules": r".*\.0\..*"}, 3.0),
        ({"rank_pattern": {r"h\.[1-3]\..*": 2}, "alpha_pattern": {".*attn": 8}, "r": 5}, 4.0),
    ],
)
def test_loaded_lora_update_is_scaled_as_in_peft(options, scale, folder):
    """W + scale · (B A)ᵀ, because the weights of this class are [inputs, outputs].

    A layer without tensors in the adapter keeps its original weights.
    """
    plain = jf.load(folder).variables["params"]["blocks"]["attention"]
    put(folder, **options)
    name = "transformer.h.1.attn.c_attn.weight"
    base = load_file(folder / "model.safetensors")[name]
    factors = load_file(folder / TENSORS)
    update = factors[f"{QUERY}.lora_B.weight"] @ factors[f"{QUERY}.lora_A.weight"]
    blocks = jf.load(folder).variables["params"]["blocks"]["attention"]
    found = np.concatenate([blocks[x]["kernel"][1] for x in ("query", "key", "value")], axis=-1)
    np.testing.assert_allclose(found, base + scale * update.T, rtol=0, atol=1e-5)
    for x in ("query", "key", "value"):
        np.testing.assert_array_equal(blocks[x]["kernel"][0], plain[x]["kernel"][0])


def test_adapter_tensor_names_may_omit_the_transformer_prefix(folder):
    def bare(tensors):
        return {name.replace("transformer.", ""): x for name, x in tensors.items()}

    put(folder, tensors=bare)
    named = folder.parent / "named"
    foreign.write(named, "gpt2")
    put(named)
    some, other = (flat(jf.load(x).variables) for x in (folder, named))
    for name in some:
        np.testing.assert_array_equal(some[name], other[name])


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (["c_attn"], r"transformer\.h\.0\.attn\.c_attn, "),
        (["h.1.attn.c_attn", "h.0.mlp.c_fc"], r"transformer\.h\.0\.mlp\.c_fc, "),
        ("all-linear", r"transformer\.h\.0\.attn\.c_attn and 6 more modules, "),
    ],
)
def test_adapter_without_update_of_a_selected_layer_gives_a_warning(targets, missing, folder):
    """PEFT loads such a file with a warning: B of a missing update is 0."""
    put(folder)
    expected = flat(jf.load(folder).variables)
    put(folder, target_modules=targets)
    with pytest.warns(UserWarning, match=r"has no LoRA weights for " + missing):
        found = flat(jf.load(folder).variables)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_load_rejects_peft_adapter_of_experts(tmp_path):
    model = jf.build(base("gpt_oss"))
    jf.export(tmp_path / "model", model, tiny.weights(model, 0), model_type="gpt_oss")
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    named = renamed("transformer.h.1.attn.c_attn", experts)
    put(tmp_path / "model", tensors=named, target_modules=["gate_up_proj"])
    with pytest.raises(ValueError, match=f"the model has no linear layer {experts}"):
        jf.load(tmp_path / "model")


def without(part):
    return lambda tensors: {name: x for name, x in tensors.items() if part not in name}


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


# Fault: (options of the adapter, change of its tensors, words of the message).
REFUSED = {
    "another method": ({"peft_type": "IA3"}, None, ["peft_type is 'IA3'"]),
    "DoRA": ({"use_dora": True}, None, ["use_dora is True"]),
    "biases": ({"bias": "lora_only"}, None, ["bias is 'lora_only'"]),
    "biases of factors": ({"lora_bias": True}, None, ["lora_bias is True"]),
    "whole modules": ({"modules_to_save": ["lm_head"]}, None, ["modules_to_save"]),
    "other layers": (
        {"layers_to_transform": [0]},
        None,
        ["has LoRA weights for transformer.h.1.attn"],
    ),
    "another list of layers": (
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        None,
        ["has LoRA weights for transformer.h.1.attn"],
    ),
    "tokens": ({"trainable_token_indices": [1]}, None, ["trainable_token_indices"]),
    "weights that were changed at first": (
        {"init_lora_weights": "pissa"},
        None,
        ["init_lora_weights is 'pissa'"],
    ),
    "an option of later versions": ({"new_option": 3}, None, ["new_option is 3"]),
    "another pattern": ({"target_modules": ".*mlp"}, None, ["target_modules is '.*mlp'"]),
    "look-ahead": ({"target_modules": "(?=t).*attn"}, None, ["target_modules", "not supported"]),
    "layers beside a pattern": (
        {"target_modules": ".*attn", "layers_to_transform": [1]},
        None,
        ["layers_to_transform", "only if target_modules is a list"],
    ),
    "other targets": ({"target_modules": ["c_fc"]}, None, ["target_modules", "c_attn"]),
    "a pattern of ranks": ({"rank_pattern": {"(a+": 2}}, None, ["rank_pattern"]),
    "another rank": ({"r": 4}, None, ["lora_A", "(2, 16)", "rank 4"]),
    "rank is text": ({"r": "2"}, None, ["r is '2'"]),
    "half of it": ({}, without("lora_B"), ["only one of lora_A and lora_B"]),
    "another model": (
        {"target_modules": ["c_attn"]},
        renamed("h.1", "h.9"),
        ["no linear layer transformer.h.9.attn.c_attn"],
    ),
    "another architecture": (
        {"target_modules": ["q_proj"]},
        renamed("transformer.h.1.attn.c_attn", "model.layers.1.self_attn.q_proj"),
        ["no linear layer model.layers.1.self_attn.q_proj"],
    ),
    "another size": (
        {},
        lambda x: {name: y[:24].copy() if "_B" in name else y for name, y in x.items()},
        ["lora_B", "(24, 2)", "(48, 2)"],
    ),
    "a table of embeddings": ({}, renamed("lora_A", "lora_embedding_A"), ["lora_embedding_A"]),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_load_rejects_unsupported_peft_adapter(wrong, folder):
    options, tensors, words = REFUSED[wrong]
    put(folder, tensors=tensors, **options)
    with pytest.raises(ValueError, match=r"adapter_(config|model)") as error:
        jf.load(folder)
    assert all(word in str(error.value) for word in words), error.value


def test_adapter_with_missing_files_is_rejected(folder, tmp_path):
    """An adapter without weights or model is rejected; a pickle file, which can run code, too."""
    put(folder)
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors does not exist"):
        jf.load(folder)
    put(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="contains a PEFT adapter without its model"):
        jf.load(folder)
    foreign.write(tmp_path / "theirs", "gpt2")
    jf.save(tmp_path / "ours", *jf.load(tmp_path / "theirs"))
    put(tmp_path / "ours")
    with pytest.raises(ValueError, match="this folder has jaxformer's format"):
        jf.load(tmp_path / "ours")


# ---- options that select linear layers

QUERIES, UPS = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.up_proj"
MODULES = [*(name.format(layer) for name in (QUERIES, UPS) for layer in (0, 1, 11)), "lm_head"]
BOTH = ["q_proj", "up_proj"]

# Each row: (options, the selected modules as a number of the layer for each of QUERIES and UPS).
SELECTED = [
    ({"target_modules": ["q_proj"]}, [0, 1, 11], []),
    ({"target_modules": ["proj"]}, [], []),
    ({"target_modules": ["self_attn.q_proj", UPS.format(1)]}, [0, 1, 11], [1]),
    ({"target_modules": r".*\.1\.self_attn\.(q|k)_proj"}, [1], []),
    ({"target_modules": r".*(q_proj|up_proj)"}, [0, 1, 11], [0, 1, 11]),
    ({"target_modules": "q_proj"}, [], []),
    ({"target_modules": BOTH, "layers_to_transform": 1}, [1], [1]),
    ({"target_modules": BOTH, "layers_to_transform": [0, 11]}, [0, 11], [0, 11]),
    ({"target_modules": BOTH, "layers_to_transform": []}, [0, 1, 11], [0, 1, 11]),
    (
        {"target_modules": BOTH, "layers_to_transform": [1], "layers_pattern": "layers"},
        [1],
        [1],
    ),
    ({"target_modules": BOTH, "layers_to_transform": [1], "layers_pattern": ["h"]}, [], []),
    ({"target_modules": ["up_proj", QUERIES.format(0)], "layers_to_transform": 1}, [0], [1]),
    ({"target_modules": BOTH, "exclude_modules": ["up_proj"]}, [0, 1, 11], []),
    ({"target_modules": BOTH, "exclude_modules": r".*\.1\..*"}, [0, 11], [0, 11]),
]


@pytest.mark.parametrize(("options", "queries", "ups"), SELECTED)
def test_adapter_config_options_determine_which_layers_are_adapted(options, queries, ups):
    targets = read_targets(Options(options, "adapter_config.json"))
    wanted = {QUERIES.format(layer) for layer in queries} | {UPS.format(layer) for layer in ups}
    assert {name for name in MODULES if targets.is_adapted(name)} == wanted


def test_adapter_target_named_all_linear_selects_every_linear_layer():
    targets = read_targets(Options({"target_modules": "All-Linear"}, "adapter_config.json"))
    assert all(targets.is_adapted(name) for name in MODULES)


@pytest.mark.parametrize(
    ("patterns", "value"),
    [
        ({}, 8),
        ({"q_proj": 4}, 4),
        ({"up_proj": 4}, 8),
        ({"proj": 4}, 8),
        ({r"layers\.(0|1)\..*": 2, "q_proj": 4}, 2),
        ({r"layers\.[2-9]\..*": 2, "q_proj": 4}, 4),
        ({"^model.layers.1.self_attn.q_proj": 3}, 3),
        ({"^layers.1.self_attn.q_proj": 3}, 8),
    ],
)
def test_first_matching_rank_pattern_of_adapter_determines_the_rank(patterns, value):
    read = read_patterns(Options({"rank_pattern": patterns}, "file"), "rank_pattern")
    assert pattern_value(read, QUERIES.format(1), 8) == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["target_modules is None"]),
        ({"target_modules": [1]}, ["target_modules is [1]", "a list of names"]),
        ({"target_modules": "(a"}, ["target_modules is '(a'", "not a regular expression"]),
        ({"target_modules": BOTH, "layers_to_transform": ["1"]}, ["layers_to_transform is ['1']"]),
        ({"target_modules": BOTH, "layers_to_transform": True}, ["layers_to_transform is True"]),
        (
            {"target_modules": ".*", "layers_to_transform": 1},
            ["layers_to_transform is 1", "a list"],
        ),
        ({"target_modules": BOTH, "layers_to_transform": 1, "layers_pattern": "("}, ["'('"]),
        ({"target_modules": BOTH, "exclude_modules": {"a": 1}}, ["exclude_modules is"]),
    ],
)
def test_adapter_config_with_invalid_target_modules_is_rejected(options, words):
    said = error_of(read_targets, Options(options, "adapter_config.json"))
    assert all(word in said for word in words), said
