"""What the platform decides about attention.

The formulas do not import this module: models and `dot_product_attention` do.
"""

from jaxformer.functional.cudnn import CuDNN
from jaxformer.functional.fused_kernels import FusedKernel
from jaxformer.functional.machine import gpu_generation, platform
from jaxformer.functional.splash import Splash


def fused_kernel() -> FusedKernel | None:
    """Returns the fused attention kernel of the platform, or None."""
    match platform():
        case "gpu":
            return CuDNN(gpu_generation() >= 9)
        case "tpu":
            return Splash()
    return None


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
