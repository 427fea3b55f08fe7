"""The only private module of JAX that the package imports: `cudnn_attention`.

`jax.nn.dot_product_attention` calls it, and lacks two things that only this module has:

- The offsets and lengths of packed documents. `cudnn.documents_attention` passes them.
- The checks of this process's GPU and cuDNN. `doctor.machines.as_if_on` replaces them, because a
  program for an absent GPU cannot be traced otherwise.
"""

from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention  # noqa: F401
