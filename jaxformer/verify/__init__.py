"""Certificates: what a model, or any function that JAX can trace, provably does."""

from jaxformer.verify.certificate import PROPERTIES, Property, certify
from jaxformer.verify.dependency import (
    Comparison,
    Dependency,
    Edge,
    assert_dependencies,
    compare,
    dependency_matrix,
)

__all__ = [
    "PROPERTIES",
    "Comparison",
    "Dependency",
    "Edge",
    "Property",
    "assert_dependencies",
    "certify",
    "compare",
    "dependency_matrix",
]
