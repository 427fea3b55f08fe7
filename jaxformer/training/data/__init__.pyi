"""Modules of this package that the documentation uses. Python imports each on first use."""

from . import corpus as corpus
