"""Measures the speed of this machine's devices with the package's own programs."""
