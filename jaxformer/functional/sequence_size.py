"""Sequence sizes, from which sub-layers compute their FLOPs.

A multiplication and an addition count as two operations. Products with weights are counted per
token, and attention scores per pair of a query and a key. Only matrix products are counted, so
norms, activations, softmax and lookups are not.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo

# `visible_pairs` evaluates the mask for this many queries at a time.
_BLOCK = 1024
# The names of weights that are matrices or convolution filters.
_MATRICES = ("kernel", "filter")


class SequenceSize(NamedTuple):
    """Size of a sequence, for counting FLOPs.

    Attributes:
        length: number of tokens.
        source_length: number of tokens of the source.
        only_visible: whether to count only the keys that the mask allows for each query. If False,
            the number of keys is the same for all queries: the largest number that the mask allows
            for any query.
    """

    length: int
    source_length: int
    only_visible: bool = False

    def pairs(self, mask: Mask) -> int:
        """Returns the number of pairs of a query and a key whose FLOPs are counted."""
        if self.only_visible:
            return visible_pairs(mask, self.length)
        return self.length * _most_keys(mask, self.length)


@lru_cache(maxsize=256)
def _most_keys(mask: Mask, length: int) -> int:
    ranges = (mask.key_range(i, i + 1, length) for i in range(length))
    return max((stop - start for start, stop in ranges), default=0)


@lru_cache(maxsize=256)
def visible_pairs(mask: Mask, length: int) -> int:
    """Returns the number of pairs of a query and a key that a mask allows, in one document."""
    count, keys = 0, TokenInfo(length)
    for start in range(0, length, _BLOCK):
        queries = keys.part(slice(start, min(start + _BLOCK, length)))
        visible = np.asarray(mask(queries, keys))
        count += int(np.broadcast_to(visible, (queries.length, length)).sum())
    return count


def product_flops(weights: Any, num_tokens: int) -> int:
    """Returns the FLOPs of multiplying `num_tokens` tokens by all matrices in a tree.

    Args:
        weights: weights, or their shapes.
        num_tokens: the number of tokens that each matrix is applied to.
    """
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    sizes = [x.size for path, x in leaves if path[-1].key in _MATRICES]
    return 2 * sum(sizes) * num_tokens
