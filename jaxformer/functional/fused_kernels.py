"""The fused attention kernels: a kernel of a platform that computes attention in one call."""

from collections.abc import Callable
from typing import NamedTuple

from jaxformer.functional import cudnn, splash


class FusedKernel(NamedTuple):
    """A fused attention kernel.

    Attributes:
        name: the kernel's name.
        unsupported_reason: (query, key, value, context) → why it does not support them, or None.
        attention: (query, key, value, context) → the output of attention.
    """

    name: str
    unsupported_reason: Callable
    attention: Callable


CUDNN = FusedKernel("cuDNN", cudnn.unsupported_reason, cudnn.fused_attention)
SPLASH = FusedKernel("splash", splash.unsupported_reason, splash.splash_attention)
