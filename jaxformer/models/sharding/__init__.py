"""Sharding of parameters and activations over a mesh of devices."""
