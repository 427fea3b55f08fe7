"""The parts of a layer, such as norms, attention, feed-forward and recurrent sub-layers."""
