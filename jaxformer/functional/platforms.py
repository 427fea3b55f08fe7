"""The platform that a program is compiled for, and what it decides about attention.

The formulas do not import this module: models and `dot_product_attention` do.
"""

import jax

from jaxformer.functional.cudnn import CuDNN
from jaxformer.functional.fused_kernels import FusedKernel
from jaxformer.functional.splash import Splash


def platform() -> str:
    """Returns the target platform: that of the mesh in context, otherwise `jax.default_backend()`.

    The mesh may describe absent devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def fused_kernel() -> FusedKernel | None:
    """Returns the fused attention kernel of the platform, or None."""
    match platform():
        case "gpu":
            return CuDNN(is_hopper())
        case "tpu":
            return Splash()
    return None


def is_hopper() -> bool:
    """Returns whether the GPUs are of NVIDIA's Hopper generation or newer."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if jax.default_backend() == "gpu":
        major = jax.local_devices()[0].compute_capability.split(".")[0]
        return major.isdecimal() and int(major) >= 9
    return absent is not None and "H100" in absent.device_kind


def implementation_here(implementation: str) -> str:
    """Returns the implementation of attention on this platform: "auto" is blockwise on a CPU.

    Raises:
        ValueError: it is "fused", and the platform has no fused kernel.
    """
    if fused_kernel() is not None:
        return implementation
    if implementation == "fused":
        raise ValueError(
            'attention "fused" cannot run this: it needs a GPU or a TPU, and the platform is '
            f"{platform()!r}"
        )
    return "blockwise" if implementation == "auto" else implementation
