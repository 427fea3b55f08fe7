"""What a model computes on the way to its output: lenses, sweeps, the head atlas and the page."""
