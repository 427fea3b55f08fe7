"""Losses, and the tokens that they are taken over."""
