"""The machine that a program is compiled for."""

from functools import cache
from pathlib import Path

import jax


def platform() -> str:
    """Returns the target platform: that of the mesh in context, otherwise `jax.default_backend()`.

    The mesh may describe absent devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def is_hopper() -> bool:
    """Returns whether the GPUs are of NVIDIA's Hopper generation or newer."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if jax.default_backend() == "gpu":
        major = jax.local_devices()[0].compute_capability.split(".")[0]
        return major.isdecimal() and int(major) >= 9
    return absent is not None and "H100" in absent.device_kind


def has_matrix_units() -> bool:
    """Returns whether the platform is an x86 CPU with matrix units for bfloat16 (AMX)."""
    return platform() == "cpu" and _cpu_has_matrix_units()


@cache
def _cpu_has_matrix_units() -> bool:
    features = Path("/proc/cpuinfo")
    return features.exists() and "amx_bf16" in features.read_text()
