"""Which linear maps the options of an adapter select."""

import pytest

from jaxformer.hub.adapter_targets import pattern_value, read_patterns, read_targets
from jaxformer.hub.options import Options
from tests.errors import error_of

QUERY, UP = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.up_proj"
MODULES = [*(name.format(layer) for name in (QUERY, UP) for layer in (0, 1, 11)), "lm_head"]
BOTH = ["q_proj", "up_proj"]

# Each row: (options, the selected modules as a number of the layer for each of QUERY and UP).
SELECTED = [
    ({"target_modules": ["q_proj"]}, [0, 1, 11], []),
    ({"target_modules": ["proj"]}, [], []),
    ({"target_modules": ["self_attn.q_proj", UP.format(1)]}, [0, 1, 11], [1]),
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
    ({"target_modules": ["up_proj", QUERY.format(0)], "layers_to_transform": 1}, [0], [1]),
    ({"target_modules": BOTH, "exclude_modules": ["up_proj"]}, [0, 1, 11], []),
    ({"target_modules": BOTH, "exclude_modules": r".*\.1\..*"}, [0, 11], [0, 11]),
]


@pytest.mark.parametrize(("options", "queries", "ups"), SELECTED)
def test_the_options_select_these_maps(options, queries, ups):
    targets = read_targets(Options(options, "adapter_config.json"))
    wanted = {QUERY.format(layer) for layer in queries} | {UP.format(layer) for layer in ups}
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
    assert pattern_value(read, QUERY.format(1), 8) == value


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
