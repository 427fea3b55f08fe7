"""The names that `import jaxformer as jf` offers."""

import sys
from types import ModuleType

import pytest

import jaxformer as jf

ROOMS = "artifacts bench decoding doctor functional hub interpret models training verify".split()


@pytest.mark.parametrize("name", jf.__all__)
def test_every_public_name_is_an_attribute_of_the_package(name, monkeypatch):
    """Each name works before other imports (test_help_does_not_import_jax: without JAX)."""
    monkeypatch.delattr(jf, name, raising=False)
    value = getattr(jf, name)
    assert name in dir(jf)
    assert (value is sys.modules.get(f"jaxformer.{name}")) == (name in ROOMS)


def test_subpackages_are_attributes_of_the_jaxformer_package():
    assert set(ROOMS) <= set(jf.__all__)
    with pytest.raises(AttributeError, match="No jaxformer attribute room"):
        jf.room  # noqa: B018


@pytest.mark.parametrize("room", [jf.functional, jf.interpret, jf.verify])
def test_python_dir_of_each_subpackage_lists_only_its_public_names(room):
    """The list has names that a user can import, but no modules of the room."""
    assert dir(room) == sorted(room.__all__)
    for name in dir(room):
        assert not isinstance(getattr(room, name), ModuleType), name
