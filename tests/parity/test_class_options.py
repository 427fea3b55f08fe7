"""The options that a class reads are known: read, harmless, or listed as not implemented."""

import dataclasses

import pytest

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

from jaxformer.hub.families import FAMILIES  # noqa: E402
from jaxformer.hub.generation import OPTIONS  # noqa: E402
from jaxformer.hub.options import HARMLESS, READ_BY_ALL, Options, per_layer  # noqa: E402
from tests.hub.configs import GLOBAL, base  # noqa: E402

SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def fields_of(config) -> set[str]:
    """Returns the options that a class declares, with the other names of its fields."""
    if not dataclasses.is_dataclass(config):
        pytest.skip("this version of transformers does not declare the fields of its classes")
    return {field.name for field in dataclasses.fields(config)} | config.attribute_map.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_config_field_of_a_transformers_class_is_read_or_ignored_or_rejected(name):
    """No reader demands an option that the class does not read."""
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    family = FAMILIES[name]
    options = Options(family.to_options(base(name)), "config.json")
    family.to_config(options)
    known = READ_BY_ALL.union(HARMLESS, OPTIONS, options.taken, options.ignored)
    assert fields_of(config) <= known.union(family.renamed, family.not_implemented)
    demanded = {*family.demanded, *family.repeated}
    assert demanded <= fields_of(config) | READ_BY_ALL | HARMLESS


def rotary_families() -> list[str]:
    """Returns the families whose class reads `rope_parameters`."""
    return [name for name in FAMILIES if "rope_parameters" in FAMILIES[name].to_options(base(name))]


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("name", rotary_families())
def test_rope_scaling_without_original_length_gets_the_default_of_transformers(name, kind):
    """Scaled positions without a length have the class's default of max_position_embeddings."""
    content = FAMILIES[name].to_options(base(name))
    del content["max_position_embeddings"]
    written, own = content["rope_parameters"], {"rope_theta": 1e4, **SCALINGS[kind]}
    content["rope_parameters"] = {GLOBAL: own} if GLOBAL in written else own
    try:
        config = FAMILIES[name].to_config(Options(content, "config.json"))
    except ValueError as error:
        assert "rope_type" in str(error)  # of a class that does not implement this kind
        return
    ours = [x for x in per_layer(config.rotary_scaling, config.num_layers) if x is not None]
    theirs = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name](**content)
    theirs.standardize_rope_params()
    rope = theirs.rope_parameters.get(GLOBAL, theirs.rope_parameters)
    lengths = {x.original_length for x in ours}
    assert lengths == {rope["original_max_position_embeddings"]} == {theirs.max_position_embeddings}


def test_every_option_of_transformers_base_config_is_read_or_known_as_harmless():
    assert fields_of(transformers.PretrainedConfig) <= READ_BY_ALL | HARMLESS | OPTIONS
