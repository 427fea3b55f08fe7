"""Flax modules: they own parameters and hold no mathematics."""
