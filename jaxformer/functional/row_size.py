"""The size of a row, from which sub-layers count their operations.

A multiplication and an addition count as two operations. Products with weights count for each token
that they are applied to, and scores for each pair of a query and a key. Norms, activations, softmax
and lookups are not counted, because they are no matrix products.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo

_BLOCK = 1024  # queries whose keys are counted at once
_MATRICES = ("kernel", "filter")  # the names of weights that are matrices or convolutions


class RowSize(NamedTuple):
    """The size of a row.

    Attributes:
        length: number of its tokens.
        source_length: number of tokens of its source.
        only_visible: whether to count only the keys that the mask lets each query see. Otherwise
            each query counts as many keys as the query with the most.
    """

    length: int
    source_length: int
    only_visible: bool = False

    def pairs(self, mask: Mask) -> int:
        """Returns the pairs of a query and a key that count."""
        if self.only_visible:
            return visible_pairs(mask, self.length)
        return self.length * _most_keys(mask, self.length)


@lru_cache(maxsize=256)
def _most_keys(mask: Mask, length: int) -> int:
    ranges = (mask.key_range(i, i + 1, length) for i in range(length))
    return max((stop - start for start, stop in ranges), default=0)


@lru_cache(maxsize=256)
def visible_pairs(mask: Mask, length: int) -> int:
    """Returns the pairs of a query and a key that a mask allows, in one document."""
    count, row = 0, TokenInfo(length)
    for start in range(0, length, _BLOCK):
        queries = row.part(slice(start, min(start + _BLOCK, length)))
        visible = np.asarray(mask(queries, row))
        count += int(np.broadcast_to(visible, (queries.length, length)).sum())
    return count


def product_flops(weights: Any, num_tokens: int) -> int:
    """Returns the operations of the products of all matrices in a tree with `num_tokens` tokens.

    Args:
        weights: weights, or their shapes.
        num_tokens: the number of tokens that each matrix is applied to.
    """
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    sizes = [x.size for path, x in leaves if path[-1].key in _MATRICES]
    return 2 * sum(sizes) * num_tokens
