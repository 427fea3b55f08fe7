"""Selects the attention implementation for the platform (CPU, GPU or TPU).

Models and `dot_product_attention` import this module, but the modules with the formulas do not.
"""

from jaxformer.functional.attention.cudnn import CuDNN
from jaxformer.functional.attention.fused_kernels import FusedKernel
from jaxformer.functional.attention.splash import Splash
from jaxformer.functional.attention.tokamax import Tokamax
from jaxformer.functional.machine import gpu_generation, platform


def fused_kernels() -> tuple[FusedKernel, ...]:
    """Returns the fused attention kernels of the current platform, in order of preference."""
    return platform_kernels(platform(), gpu_generation())


def platform_kernels(platform: str, generation: int) -> tuple[FusedKernel, ...]:
    """Returns the fused attention kernels of a platform, in order of preference.

    Args:
        platform: "cpu", "gpu", "cuda" or "tpu".
        generation: the major compute capability of NVIDIA GPUs, such as 9 for Hopper.
    """
    match platform:
        case "gpu":
            return CuDNN(generation >= 9), Tokamax(generation)
        case "tpu":
            return (Splash(),)
    return ()


def implementation_here(implementation: str) -> str:
    """Returns the implementation for this platform; on a CPU, "auto" becomes "blockwise".

    Raises:
        ValueError: The implementation is "fused", but the platform is a CPU.
    """
    if fused_kernels():
        return implementation
    if implementation == "fused":
        raise ValueError(
            'attention="fused" is not possible: fused kernels need a GPU or a TPU, not '
            f"{platform()!r}"
        )
    return "blockwise" if implementation == "auto" else implementation
