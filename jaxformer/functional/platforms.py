"""The platform that a program is compiled for, and what it decides about attention.

The formulas do not import this module: models and `dot_product_attention` do.
"""

import jax


def platform() -> str:
    """Returns the target platform: that of the mesh in context, otherwise `jax.default_backend()`.

    The mesh may describe absent devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def implementation_here(implementation: str) -> str:
    """Returns the implementation of attention on this platform: "auto" is fused on a GPU only.

    Raises:
        ValueError: it is "fused", and the platform has no cuDNN.
    """
    if platform() == "gpu":
        return implementation
    if implementation == "fused":
        raise ValueError(
            f'attention "fused" cannot run this: it needs a GPU, and the platform is {platform()!r}'
        )
    return "blockwise" if implementation == "auto" else implementation
