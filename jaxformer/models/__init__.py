"""Flax modules: they declare the parameters and call pure functions."""
