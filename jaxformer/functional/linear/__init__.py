"""The affine map, and the forms of its kernel: arrays, integers, LoRA updates, packed columns."""
