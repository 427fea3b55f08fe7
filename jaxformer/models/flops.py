"""FLOPs of a model, by a formula. A multiplication and an addition count as two FLOPs.

The FLOPs of a forward pass are the sum of

- 2 · (elements) · (tokens) for each matrix and for the filters of each convolution, where (tokens)
  is the number of tokens to which the matrix or the filters are applied. In a mixture of
  experts, a token is counted only for the experts that are chosen for it.
- 4 · heads · head_dim · (queries) · (keys) for each attention layer. Sub-layers that combine tokens
  without attention define their own formula in `SubLayer.flops`.

Training has 3 times the FLOPs of the forward pass, because the gradient needs two products for each
product of the forward pass.

The formula follows Kaplan et al. 2020, §2.1, and Chowdhery et al. 2022, appendix B. Both papers
count all pairs of queries and keys, even with a causal mask. `only_visible` restricts the count to
the pairs that the mask allows; a causal mask allows (length + 1) / 2 keys per query on average.
"Model FLOPs utilization" is the FLOPs of a step by this formula, divided by the FLOPs that the
devices could have computed during the step. Rematerialized operations do not count.
"""

from functools import cache, lru_cache, partial

import jax

from jaxformer.functional.layers.layer import Layer, init_layer, list_sublayers
from jaxformer.functional.layers.sublayer import Initial
from jaxformer.functional.model import Model, weight_shapes
from jaxformer.functional.sequence_size import SequenceSize, product_flops
from jaxformer.functional.stack import Stack
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel


def forward_flops(
    model: LanguageModel,
    length: int,
    source_length: int | None = None,
    *,
    only_visible: bool = False,
) -> int:
    """Returns the FLOPs of a forward pass over one sequence, including the logits of all tokens.

    Args:
        model: any model, also with user-defined layers.
        length: number of tokens of the sequence.
        source_length: number of tokens of the source; defaults to `length`.
        only_visible: whether to count only the keys that the mask allows for each query.
    """
    source_length = length if source_length is None else source_length
    return _model_flops(model.architecture, SequenceSize(length, source_length, only_visible))


def training_flops(
    model: LanguageModel,
    length: int,
    source_length: int | None = None,
    *,
    only_visible: bool = False,
) -> int:
    """Returns the FLOPs of a forward and backward pass over one sequence; see `forward_flops`."""
    return 3 * forward_flops(model, length, source_length, only_visible=only_visible)


def flops_per_token(model: LanguageModel, length: int, source_length: int | None = None) -> float:
    """Returns the FLOPs of training per token, for sequences of `length` tokens.

    Model FLOPs utilization is the returned number times the tokens per second, divided by the peak
    FLOP/s of the devices.
    """
    return training_flops(model, length, source_length) / length


@lru_cache(maxsize=64)
def _model_flops(model: Model, size: SequenceSize) -> int:
    total, shapes = stack_flops(model.stack, size), weight_shapes(model)
    if model.encoder is not None:
        total += _model_flops(model.encoder, SequenceSize(size.source_length, 0, size.only_visible))
    if model.head is not None and model.head.is_tied:
        total += 2 * shapes["embedding"]["tokens"].size * size.length
    for name in shapes.keys() - {"blocks", "encoder"}:
        # The pooler and the classifier read one vector per sequence.
        per_sequence = name in ("pooler", "classifier")
        total += product_flops(shapes[name], 1 if per_sequence else size.length)
    return total


@cache
def _layer_shapes(layer: Layer, dim: int) -> Weights:
    return jax.eval_shape(partial(init_layer, layer, Initial(1), dim), jax.random.key(0))


def stack_flops(stack: Stack, size: SequenceSize) -> int:
    """Returns the FLOPs of all layers for one sequence."""
    total = 0
    for layer, dim in zip(stack.layers, stack.dims, strict=False):
        weights = _layer_shapes(layer, dim)
        total += sum(x.flops(weights[x.name], size) for x in list_sublayers(layer))
    return total
