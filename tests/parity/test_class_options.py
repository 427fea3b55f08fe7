"""The lists of options that a class reads hold all fields of the installed class."""

import dataclasses

import pytest

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

from jaxformer.hub.class_options import GENERAL, read_by_class  # noqa: E402
from jaxformer.hub.families import FAMILIES  # noqa: E402


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_class_is_listed(name):
    """Also the other names of fields. No reader demands an option that the class does not read."""
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    if not dataclasses.is_dataclass(config):
        pytest.skip("this version of transformers does not declare the fields of its classes")
    fields = {field.name for field in dataclasses.fields(config)} | config.attribute_map.keys()
    assert fields <= read_by_class(name)
    family = FAMILIES[name]
    assert {*family.demanded, *family.repeated} <= read_by_class(name)


def test_the_options_of_the_base_class_are_listed():
    if not dataclasses.is_dataclass(transformers.PretrainedConfig):
        pytest.skip("this version of transformers does not declare the fields of its classes")
    assert {field.name for field in dataclasses.fields(transformers.PretrainedConfig)} <= GENERAL
