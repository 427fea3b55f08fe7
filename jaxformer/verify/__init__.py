"""Certificates: checks of properties of a model, or of any function that JAX can trace."""

from jaxformer.verify.certificate import PROPERTIES, Property, certify
from jaxformer.verify.comparison import (
    Comparison,
    Edge,
    RemarkWarning,
    assert_dependencies,
    compare,
)
from jaxformer.verify.dependency import Dependency, dependency_matrix

__all__ = [
    "PROPERTIES",
    "Comparison",
    "Dependency",
    "Edge",
    "Property",
    "RemarkWarning",
    "assert_dependencies",
    "certify",
    "compare",
    "dependency_matrix",
]


def __dir__() -> list[str]:
    """Lists the public names only."""
    return __all__
