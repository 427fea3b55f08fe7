"""Imports `cudnn_attention`, the only private module of JAX that this package uses.

The public `jax.nn.dot_product_attention` calls this module, but does not expose two features:

- Offsets and lengths of packed documents, which `cudnn.documents_attention` passes.
- The functions that check the GPU generation and the cuDNN version. `doctor.targets.as_if_on`
  replaces these functions, so that programs for absent GPUs can be traced.
"""

from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention  # noqa: F401
