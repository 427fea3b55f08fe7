"""Masked cells of attention maps, from the model's mask rule and not from attention weights."""

from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.interpret.page_file import pack
from jaxformer.models.config.check import entries
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel


def masked_keys(model: LanguageModel, layers: list[int], length: int) -> dict[str, Any] | None:
    """Returns which keys the self-attention of each layer masks.

    Args:
        model: Any model.
        layers: The indices of the layers with self-attention.
        length: The number of tokens.

    Returns:
        A dict with two entries. "hidden" contains the different masks, as an array [masks, queries,
        keys] from `pack`, in which a masked key is 1. "layers" contains the index of each layer's
        mask. The result is None if no key is masked, or if the rule is unknown because the caller
        defined the layers.
    """
    if not isinstance(model.config, TransformerConfig) or model.layers is not None:
        return None
    masks: list[Bool[np.ndarray, "length length"]] = []
    indices, known = [], {}
    windows = entries(model.config.window)
    for layer in layers:
        window = windows[layer % len(windows)]
        if window not in known:
            known[window] = len(masks)
            masks.append(~_visible(model, window, length))
        indices.append(known[window])
    if not np.any(masks):
        return None
    return {"hidden": pack(np.array(masks), "uint8"), "layers": indices}


def _visible(
    model: LanguageModel, window: int | None, length: int
) -> Bool[np.ndarray, "length length"]:
    """Returns which keys (columns) each query (row) attends to."""
    if model.mask is not None:
        tokens = TokenInfo(length, np.arange(length), np.ones(length, int))
        return np.broadcast_to(np.asarray(model.mask(tokens, tokens)), (length, length))
    query, key = np.arange(length)[:, None], np.arange(length)
    if model.config.bidirectional:
        return np.abs(query - key) <= (length if window is None else window)
    in_window = query - key < (length if window is None else window)
    return in_window & ((key <= query) | (key < model.config.prefix))
