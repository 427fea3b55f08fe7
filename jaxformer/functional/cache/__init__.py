"""Decoding caches: keys, values and recurrent states of the tokens that a model has read."""
