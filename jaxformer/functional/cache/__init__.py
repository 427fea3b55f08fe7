"""Caches: what a model keeps of the tokens that it has read."""
