"""Each option of config.json that is read reaches the config or is known to have no effect."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer import hub
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.options import Options
from jaxformer.models.config.check import entries
from tests.hub.configs import EDITS, ROPES, base
from tests.slow import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore:.*unknown to the class in transformers")
CHECKED = {"architectures", "num_labels", "id2label"}  # only some classes depend on these
CHECKED |= {"num_experts", "num_local_experts"}  # two names of one number: both must be equal


class Recorded(Options):
    """Records the options that must have a certain value."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.required = set()

    def require(self, demanded):
        self.required |= demanded.keys()
        super().require(demanded)


def read(family: str, content: dict):
    """Returns the config of this content, and the options."""
    tensors = () if content.get("tie_word_embeddings", True) else ("lm_head.weight",)
    options = Recorded(json.loads(json.dumps(content)), "config.json", tensors)
    return FAMILIES[family].to_config(options), options


def contents(family: str):
    """Yields a config.json of the family, then variants as other versions write them."""
    config = base(family)
    content = FAMILIES[family].to_options(config)
    yield content
    yield content | {"quantization_config": {"quant_method": "mxfp4"}}
    if getattr(config, "has_experts", False):
        number = max(entries(config.num_experts))
        yield content | {"num_experts": number, "num_local_experts": number}
        yield content | {"use_sliding_window": True, "sliding_window": 4, "layer_types": None}
    for changes in (
        *({"rope_parameters": rope} for rope in ROPES),
        {"rope_parameters": None, "layer_types": None},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": None},
        {"no_rope_layers": None, "layer_types": None},
    ):
        if changes.keys() <= content.keys():
            windows = {"max_window_layers": 0}
            windows |= {"no_rope_layers": [0, 1]} if "no_rope_layers" in content else {}
            yield content | (windows if "sliding_window" in changes else {}) | changes


def other_values(key: str, value) -> tuple:
    """Returns other values for an option."""
    number = (value * 2, value * 1.5) if type(value) in (int, float) else ()
    quantized = ({"quant_method": "gptq"},) if key == "quantization_config" else ()
    return (*EDITS.get(key, ()), *quantized, *number, True, False, 1, 2, 3, 0.5)


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "llama", "gemma3_text", "bert"))
def test_every_config_json_option_changes_the_config_or_is_rejected(family):
    """In some config of the family, another value changes the result or is rejected."""
    taken, used, ignored = set(), set(), set()
    for content in contents(family):
        try:
            config, options = read(family, content)
        except ValueError:
            continue
        taken |= options.taken.keys() - options.required
        ignored |= options.ignored.keys()
        for key in taken - used:
            for value in other_values(key, content.get(key)):
                try:
                    changed = read(family, content | {key: value})[0] != config
                except ValueError:
                    changed = type(value) is type(content.get(key))
                if changed:
                    used.add(key)
                    break
    assert taken - used - CHECKED == set(), f"{family} reads these and drops them"
    assert not ignored & {"vocab_size", "hidden_size", "d_model", "num_hidden_layers"}


def test_code_uses_the_value_of_every_config_json_option_it_reads():
    """An option whose value is unused is declared with `ignore` or checked with `require`."""
    found = []
    for path in Path(hub.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                function = node.value.func
                owner = getattr(getattr(function, "value", None), "id", None)
                name = getattr(function, "attr", None)
                if owner == "options" and name not in ("ignore", "require", "nothing_left"):
                    found.append(f"{path.name}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
@pytest.mark.parametrize("option", ["rope_parameters", "rope_scaling"])
def test_top_level_original_context_length_overrides_the_one_in_the_rope_options(kind, option):
    """As in transformers, the outer length takes precedence over the inner length."""
    content = FAMILIES["llama"].to_options(base("llama"))
    scaling = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        scaling = {"rope_type": kind, "factor": 4.0}
    for outside, inside, longest, right in (
        (32, 16, 64, 32),
        (32, None, 64, 32),
        (None, 16, 64, 16),
        (None, None, 64, 64),
        (32, 16, None, 32),
        (None, 16, None, 16),
        (None, None, None, 2048),  # the default of max_position_embeddings
    ):
        own = scaling | {"original_max_position_embeddings": inside}
        edits = {"rope_parameters": None, option: own, "max_position_embeddings": longest}
        edits |= {"original_max_position_embeddings": outside}
        config, _ = read("llama", content | edits)
        assert config.rotary_scaling == jf.RotaryScaling(kind, 4.0, right)


WHOLE_HEADS = ["llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3", "gemma", "gemma2"]
WHOLE_HEADS += ["starcoder2"]


@pytest.mark.parametrize("family", [*WHOLE_HEADS, "gemma3_text", "modernbert"])
def test_export_rejects_partial_rotary_for_families_that_rotate_whole_heads(family):
    """Export rejects a partial rotation, which such a class would ignore."""
    config = base(family)
    with pytest.raises(ValueError, match=r"rotary_fraction is 0\.5"):
        FAMILIES[family].to_options(replace(config, rotary_fraction=0.5))
    content = FAMILIES[family].to_options(config)
    assert read(family, content | {"partial_rotary_factor": 0.5})[0] == read(family, content)[0]
    if family in WHOLE_HEADS:
        scaled = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
        with pytest.raises(ValueError, match=r"partial_rotary_factor is 0\.5"):
            read(family, content | {"rope_parameters": scaled})


# family: fields that its class lacks
NOT_THERE = {
    "gemma3_text": {"attention_softcap": 2.0},
    "gemma2": {"attention_scale": 0.3},
    "olmoe": {"head_dim": 4},
    "phi3": {"rotary_scaling": jf.RotaryScaling("linear", 2.0)},
    "llama": {"rotary_scaling": (jf.RotaryScaling("linear", 2.0), None)},
    "qwen3": {"rotary_base": (100.0, 1000.0)},
    "roberta": {"activation": "relu"},
    "mistral": {"window": (4, None)},
}


@pytest.mark.parametrize("family", NOT_THERE)
def test_export_error_names_config_field_unsupported_by_the_family(family):
    changes = NOT_THERE[family]
    name = "hidden_act" if family == "roberta" else next(iter(changes))
    if family == "phi3":
        name = "rope_parameters"
    with pytest.raises(ValueError, match=name):
        FAMILIES[family].to_options(replace(base(family), **changes))


def test_equivalent_configs_export_to_equal_options():
    """None equals 1/√head_dim; some fields have no effect; some patterns have equal entries."""
    for family in ("gemma2", "gemma3_text", "llama"):
        config = base(family)
        same = (
            {"attention_scale": None},
            {"attention_scale": config.head_dim**-0.5},
            {"relative_buckets": 8, "position_offset": 2},
            {"rotary_base": (config.rotary_base, config.rotary_base)},
        )
        written = [FAMILIES[family].to_options(replace(config, **x)) for x in same]
        assert all(x == written[0] for x in written)
    gpt2 = replace(base("gpt2"), rotary_base=500.0, rotary_fraction=0.5)
    assert FAMILIES["gpt2"].to_options(gpt2) == FAMILIES["gpt2"].to_options(base("gpt2"))


@pytest.mark.parametrize("named", [["RobertaForMaskedLM"], "RobertaForMaskedLM", None, []])
def test_only_roberta_with_a_masked_token_head_requires_gelu(named):
    """Only the class with the masked-token head restricts the activation to GELU."""
    content = FAMILIES["roberta"].to_options(base("roberta"))
    with pytest.raises(ValueError, match="hidden_act is 'relu'"):
        read("roberta", content | {"hidden_act": "relu", "architectures": named})
    bare = content | {"hidden_act": "relu", "architectures": ["RobertaModel"]}
    assert read("roberta", bare)[0].activation == "relu"
