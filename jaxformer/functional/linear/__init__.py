"""Linear layers, and kernels that are packed, quantized to int8 or updated by LoRA."""
