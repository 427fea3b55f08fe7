"""What a model computes on the way to its output: lenses, sweeps, the head atlas and the page."""

from jaxformer.interpret.explanation import Page, explain

__all__ = ["Page", "explain"]
