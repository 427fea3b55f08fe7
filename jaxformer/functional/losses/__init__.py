"""Losses, and the choice of masked tokens."""
