"""The parts of a layer: norms, the feed-forward layer, recurrent cells."""
