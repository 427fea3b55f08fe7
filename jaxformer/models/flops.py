"""Number of operations of a model by formula; a multiplication and an addition count as two.

    forward:  2 · Σ (elements of a matrix, or of the filters of a convolution)
                · (tokens that it is applied to)
              of experts: those that a token is sent to
            + 4 · heads · head_dim · (queries) · (keys that each query is compared with), or what
                `SubLayer.flops` says of another sub-layer that reads other tokens
    training: three times that, since the gradient needs two products for each product

The formula is that of Kaplan et al. 2020, §2.1, and Chowdhery et al. 2022, appendix B, which counts
attention in full, causal or not. With `only_visible`, (queries) · (keys) becomes the number of
pairs that the mask allows. For a causal mask each query then has (length + 1) / 2 keys on average,
the average causal context. "Model FLOPs utilization" is the number of operations of a step by this
formula, divided by the number that the devices could have done in its time. Operations that are
repeated to save memory do not count.
"""

from functools import cache, lru_cache, partial

import jax

from jaxformer.functional.layers.layer import Layer, init_layer, sublayers_of
from jaxformer.functional.layers.sublayer import Initial
from jaxformer.functional.model import Model, weight_shapes
from jaxformer.functional.row_size import RowSize, product_flops
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
    """Returns the operations of a forward pass over one row, including the logits of all tokens.

    Args:
        model: a model of any kind, with layers of any kind.
        length: number of tokens of the row.
        source_length: number of tokens of the row's source; None: `length`.
        only_visible: whether to count only the keys that the mask lets each query see.
    """
    source_length = length if source_length is None else source_length
    return _model_flops(model.architecture, RowSize(length, source_length, only_visible))


def training_flops(
    model: LanguageModel,
    length: int,
    source_length: int | None = None,
    *,
    only_visible: bool = False,
) -> int:
    """Returns the operations of a forward and backward pass over one row; see `forward_flops`."""
    return 3 * forward_flops(model, length, source_length, only_visible=only_visible)


def flops_per_token(model: LanguageModel, length: int, source_length: int | None = None) -> float:
    """Returns the operations of training per token, in rows of `length` tokens.

    Times tokens per second, divided by the operations per second that the devices can do, it is the
    model FLOPs utilization.
    """
    return training_flops(model, length, source_length) / length


@lru_cache(maxsize=64)
def _model_flops(model: Model, row: RowSize) -> int:
    total, shapes = _stack_flops(model.stack, row), weight_shapes(model)
    if model.encoder is not None:
        total += _model_flops(model.encoder, RowSize(row.source_length, 0, row.only_visible))
    if model.head is not None and model.head.is_tied:
        total += 2 * shapes["embedding"]["tokens"].size * row.length
    for name in shapes.keys() - {"blocks", "encoder"}:
        of_rows = name in ("pooler", "classifier")  # these read one vector of the row
        total += product_flops(shapes[name], 1 if of_rows else row.length)
    return total


@cache
def _layer_shapes(layer: Layer, dim: int) -> Weights:
    return jax.eval_shape(partial(init_layer, layer, Initial(None), dim), jax.random.key(0))


def _stack_flops(stack: Stack, row: RowSize) -> int:
    total = 0
    for layer, dim in zip(stack.layers, stack.dims, strict=False):
        weights = _layer_shapes(layer, dim)
        total += sum(x.flops(weights[x.name], row) for x in sublayers_of(layer))
    return total
