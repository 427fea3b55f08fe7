"""The platform for which a program is compiled."""

from functools import cache
from pathlib import Path

import jax


def platform() -> str:
    """Returns the platform of the mesh in context, otherwise `jax.default_backend()`.

    The mesh may describe absent devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def gpu_generation() -> int:
    """Returns the major compute capability of NVIDIA GPUs, such as 9 for Hopper; otherwise 0.

    For a mesh of absent devices, the function returns 9 for H100 and 0 for other GPUs.
    """
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if jax.default_backend() == "gpu":
        major = jax.local_devices()[0].compute_capability.split(".")[0]
        return int(major) if major.isdecimal() else 0  # AMD GPUs have names such as gfx90a.
    return 9 if absent is not None and "H100" in absent.device_kind else 0


def multiplies_bfloat16() -> bool:
    """Returns whether the platform is a CPU that multiplies bfloat16 faster than float32.

    True for Intel CPUs with AMX and for AMD CPUs with AVX-512 BF16. Intel CPUs with AVX-512 BF16
    but without AMX have not been measured.
    """
    return platform() == "cpu" and _cpu_multiplies_bfloat16()


@cache
def _cpu_multiplies_bfloat16() -> bool:
    path = Path("/proc/cpuinfo")
    words = set(path.read_text().split()) if path.exists() else set()
    return "amx_bf16" in words or {"AuthenticAMD", "avx512_bf16"} <= words
