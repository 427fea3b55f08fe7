"""Flax modules of the models, their configs, and the sharding of their parameters."""
