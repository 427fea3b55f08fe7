"""The options that a class reads are known: read, harmless, or listed as not implemented."""

import dataclasses

import pytest

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

from jaxformer.hub.families import FAMILIES  # noqa: E402
from jaxformer.hub.generation import OPTIONS  # noqa: E402
from jaxformer.hub.options import HARMLESS, READ_BY_ALL, Options  # noqa: E402
from tests.hub.configs import base  # noqa: E402


def fields_of(config) -> set[str]:
    """Returns the options that a class declares, with the other names of its fields."""
    if not dataclasses.is_dataclass(config):
        pytest.skip("this version of transformers does not declare the fields of its classes")
    return {field.name for field in dataclasses.fields(config)} | config.attribute_map.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_class_is_known(name):
    """No reader demands an option that the class does not read."""
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    family = FAMILIES[name]
    options = Options(family.to_options(base(name)), "config.json")
    family.to_config(options)
    known = READ_BY_ALL.union(HARMLESS, OPTIONS, options.taken, options.ignored)
    assert fields_of(config) <= known.union(family.renamed, family.not_implemented)
    demanded = {*family.demanded, *family.repeated}
    assert demanded <= fields_of(config) | READ_BY_ALL | HARMLESS


def test_the_options_of_the_base_class_are_known():
    assert fields_of(transformers.PretrainedConfig) <= READ_BY_ALL | HARMLESS | OPTIONS
