"""Functions that build a `functional.model.Model` from a config."""
