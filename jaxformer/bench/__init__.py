"""Speed of this machine's devices, measured with the package's own programs."""
