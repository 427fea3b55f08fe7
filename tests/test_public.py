"""The names that `import jaxformer as jf` offers."""

import sys

import pytest

import jaxformer as jf

ROOMS = "artifacts bench decoding doctor functional hub interpret models training verify".split()


@pytest.mark.parametrize("name", jf.__all__)
def test_every_public_name_is_an_attribute(name, monkeypatch):
    """Works before anything else has imported it (test_help_does_not_wait_for_jax: without JAX)."""
    monkeypatch.delattr(jf, name, raising=False)
    value = getattr(jf, name)
    assert name in dir(jf)
    assert (value is sys.modules.get(f"jaxformer.{name}")) == (name in ROOMS)


def test_the_subpackages_are_public():
    assert set(ROOMS) <= set(jf.__all__)
    with pytest.raises(AttributeError, match="No jaxformer attribute room"):
        jf.room  # noqa: B018
