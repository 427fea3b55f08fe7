"""What the platform decides about attention.

The formulas do not import this module: models and `dot_product_attention` do.
"""

from jaxformer.functional.attention.cudnn import CuDNN
from jaxformer.functional.attention.fused_kernels import FusedKernel
from jaxformer.functional.attention.splash import Splash
from jaxformer.functional.attention.tokamax import Tokamax
from jaxformer.functional.machine import gpu_generation, platform


def fused_kernels() -> tuple[FusedKernel, ...]:
    """Returns the fused attention kernels of the platform, in the order of preference."""
    return kernels_of(platform(), gpu_generation())


def kernels_of(platform: str, generation: int) -> tuple[FusedKernel, ...]:
    """Returns the fused attention kernels of a platform.

    Args:
        platform: the platform.
        generation: the major compute capability of NVIDIA's GPUs, 9 for Hopper.
    """
    match platform:
        case "gpu":
            return CuDNN(generation >= 9), Tokamax(generation)
        case "tpu":
            return (Splash(),)
    return ()


def implementation_here(implementation: str) -> str:
    """Returns the implementation of attention on this platform: "auto" is blockwise on a CPU.

    Raises:
        ValueError: it is "fused", and the platform has no fused kernel.
    """
    if fused_kernels():
        return implementation
    if implementation == "fused":
        raise ValueError(
            'attention "fused" cannot run this: it needs a GPU or a TPU, and the platform is '
            f"{platform()!r}"
        )
    return "blockwise" if implementation == "auto" else implementation
