"""The platform that a program is compiled for, and what it decides about attention.

The formulas do not import this module: models and `dot_product_attention` do.
"""

import jax

from jaxformer.functional.fused_kernels import CUDNN, SPLASH, FusedKernel

_FUSED_KERNELS = {"gpu": CUDNN, "tpu": SPLASH}


def platform() -> str:
    """Returns the target platform: that of the mesh in context, otherwise `jax.default_backend()`.

    The mesh may describe absent devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def fused_kernel() -> FusedKernel | None:
    """Returns the fused attention kernel of the platform, or None."""
    return _FUSED_KERNELS.get(platform())


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
