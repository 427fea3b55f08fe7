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


def gpu_generation() -> int:
    """Returns the major compute capability of NVIDIA's GPUs, 9 for Hopper; 0 for other platforms.

    The GPUs of a mesh that describes absent devices are H100, or their generation is 0.
    """
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if jax.default_backend() == "gpu":
        major = jax.local_devices()[0].compute_capability.split(".")[0]
        return int(major) if major.isdecimal() else 0  # AMD's are gfx90a and so on
    return 9 if absent is not None and "H100" in absent.device_kind else 0


def multiplies_bfloat16() -> bool:
    """Returns whether the platform is a CPU that multiplies bfloat16 faster than float32.

    These are CPUs with AMX (Intel) and AMD's with AVX-512 BF16. Intel's with AVX-512 BF16 alone
    have not been measured.
    """
    return platform() == "cpu" and _cpu_multiplies_bfloat16()


@cache
def _cpu_multiplies_bfloat16() -> bool:
    path = Path("/proc/cpuinfo")
    words = set(path.read_text().split()) if path.exists() else set()
    return "amx_bf16" in words or {"AuthenticAMD", "avx512_bf16"} <= words
