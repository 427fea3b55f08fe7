"""A PEFT adapter in the folder of a model: its updates are added, or it is refused by name."""

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
    """Writes an adapter of one fused map into a folder of a GPT-2."""
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
def test_an_exported_adapter_loads_as_if_merged(family, tmp_path):
    """In the folder of its base model, for each layout of the tensors of transformers."""
    foreign.write(tmp_path / "base", family)
    maps = "query,value,output,up"
    learnt(tmp_path / "base", LoraConfig(lora_rank=3, lora_maps=maps), tmp_path / "run")
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
def test_the_scale_of_an_update(options, scale, folder):
    """W + scale · (B A)ᵀ, because the weights of this class are [inputs, outputs].

    A layer without tensors in the adapter has its weights of the model.
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


def test_an_adapter_of_a_bare_model_omits_the_prefix(folder):
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
def test_a_missing_update_of_a_selected_map_gives_a_warning(targets, missing, folder):
    """PEFT loads such a file with a warning: B of a missing update is 0."""
    put(folder)
    expected = flat(jf.load(folder).variables)
    put(folder, target_modules=targets)
    with pytest.warns(UserWarning, match=r"has no update of " + missing):
        found = flat(jf.load(folder).variables)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_an_adapter_of_experts_is_refused(tmp_path):
    model = jf.build(base("gpt_oss"))
    jf.export(tmp_path / "model", model, tiny.weights(model, 0), family="gpt_oss")
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    named = renamed("transformer.h.1.attn.c_attn", experts)
    put(tmp_path / "model", tensors=named, target_modules=["gate_up_proj"])
    with pytest.raises(ValueError, match=f"the model has no linear map {experts}"):
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
    "other layers": ({"layers_to_transform": [0]}, None, ["no update of transformer.h.1.attn"]),
    "another list of layers": (
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        None,
        ["no update of transformer.h.1.attn"],
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
    "another rank": ({"r": 4}, None, ["lora_A", "(2, 16)", "r is 4"]),
    "rank is text": ({"r": "2"}, None, ["r is '2'"]),
    "half of it": ({}, without("lora_B"), ["only one of lora_A and lora_B"]),
    "another model": (
        {"target_modules": ["c_attn"]},
        renamed("h.1", "h.9"),
        ["no linear map transformer.h.9.attn.c_attn"],
    ),
    "another architecture": (
        {"target_modules": ["q_proj"]},
        renamed("transformer.h.1.attn.c_attn", "model.layers.1.self_attn.q_proj"),
        ["no linear map model.layers.1.self_attn.q_proj"],
    ),
    "another size": (
        {},
        lambda x: {name: y[:24].copy() if "_B" in name else y for name, y in x.items()},
        ["lora_B", "(24, 2)", "(48, 2)"],
    ),
    "a table of embeddings": ({}, renamed("lora_A", "lora_embedding_A"), ["lora_embedding_A"]),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_an_adapter_that_is_not_implemented_is_refused(wrong, folder):
    options, tensors, words = REFUSED[wrong]
    put(folder, tensors=tensors, **options)
    with pytest.raises(ValueError, match=r"adapter_(config|model)") as error:
        jf.load(folder)
    assert all(word in str(error.value) for word in words), error.value


def test_an_adapter_that_lacks_its_files_is_refused(folder, tmp_path):
    """It lacks its weights or its model. A pickle file, which can run code, is not read."""
    put(folder)
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors does not exist"):
        jf.load(folder)
    put(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="holds an adapter of PEFT without its model"):
        jf.load(folder)
    foreign.write(tmp_path / "theirs", "gpt2")
    jf.save(tmp_path / "ours", *jf.load(tmp_path / "theirs"))
    put(tmp_path / "ours")
    with pytest.raises(ValueError, match="own format, for which PEFT has no adapters"):
        jf.load(tmp_path / "ours")


# ---- which linear maps the options select

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
def test_the_options_select_these_maps(options, queries, ups):
    targets = read_targets(Options(options, "adapter_config.json"))
    wanted = {QUERIES.format(layer) for layer in queries} | {UPS.format(layer) for layer in ups}
    assert {name for name in MODULES if targets.is_adapted(name)} == wanted


def test_all_linear_selects_every_map():
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
def test_the_first_matching_pattern_gives_the_value(patterns, value):
    read = read_patterns(Options({"rank_pattern": patterns}, "file"), "rank_pattern")
    assert pattern_value(read, QUERIES.format(1), 8) == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["target_modules is None"]),
        ({"target_modules": [1]}, ["target_modules is [1]", "a list of names"]),
        ({"target_modules": "(a"}, ["target_modules is '(a'", "no regular expression"]),
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
def test_an_option_that_selects_no_maps_is_refused(options, words):
    said = error_of(read_targets, Options(options, "adapter_config.json"))
    assert all(word in said for word in words), said
