"""Builds a `functional.model.Model` from the config of each kind."""
