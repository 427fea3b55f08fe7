"""Dependency rules: tables of the inputs that each output may depend on.

A rule is a table, bool [length, length]. Entry [i, j] is True if output i may depend on input j.
The rule of one layer contains the tokens that each token attends to; `composed` combines the rules
of several layers. Plain loops compute the rules, and share no code with `functional`. Otherwise an
error in a mask would also be in the rule, and the comparison would find no difference.

Such a table describes one sequence. The argument `segment_ids` is an array of segment ids (1, 1, 2,
2, … for packed documents, 0 for padding) or, for one document without padding, the length.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.layers.layer import Layer
from jaxformer.models import config as configs
from jaxformer.models.config.check import entries
from jaxformer.models.config.model import ModelConfig

Table = Bool[np.ndarray, "length length"]
Segments = int | Sequence[int] | np.ndarray


def read(segment_ids: Segments) -> tuple[Int[np.ndarray, " length"], Int[np.ndarray, " length"]]:
    """Returns the document number and the position of each token, as two int arrays.

    Documents are numbered from 1 and positions from 0. At padding, both numbers are 0. A document
    is a maximal run of equal non-zero ids; padding inside a run is skipped.

    Args:
        segment_ids: Segment ids [length], or the length of one document.
    """
    tokens = []
    last_id = document = position = 0
    for segment in _ids(segment_ids):
        if segment == 0:
            tokens.append((0, 0))
            continue
        position += 1
        if segment != last_id:
            last_id, document, position = segment, document + 1, 0
        tokens.append((document, position))
    documents, positions = np.array(tokens, int).reshape(-1, 2).T
    return documents, positions


def visible(
    segment_ids: Segments, window: int | None = None, prefix: int = 0, causal: bool = True
) -> Table:
    """Returns which tokens of the same document each token attends to in self-attention.

    Args:
        segment_ids: Segment ids [length], or the length of one document.
        window: The number of tokens that a token attends to: itself and the tokens before it. If
            None, the window is unlimited.
        prefix: The number of tokens at the beginning of a document to which all tokens of the
            document attend.
        causal: Whether tokens after the query are masked (except in the prefix).
    """

    def sees(i: int, j: int) -> bool:
        in_window = window is None or i - j < window
        return in_window and (not causal or j <= i or j < prefix)

    return _within_documents(segment_ids, sees)


def _within_documents(segment_ids: Segments, sees: Callable[[int, int], bool]) -> Table:
    """Returns the rule in which a token attends to tokens of its document for which `sees` is True.

    Args:
        segment_ids: Segment ids [length], or the length of one document.
        sees: Returns whether a query attends to a key, given the positions of both in their
            document.
    """
    documents, positions = read(segment_ids)
    length = len(documents)
    seen = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(length):
            if documents[i] != 0 and documents[i] == documents[j]:
                seen[i, j] = sees(positions[i], positions[j])
    return seen


def causal(segment_ids: Segments) -> Table:
    """Returns the lower triangle, the dependency rule of causal attention and recurrent layers."""
    return visible(segment_ids)


def bidirectional(segment_ids: Segments) -> Table:
    """Returns the rule in which every token attends to all tokens of its document."""
    return visible(segment_ids, causal=False)


def near(segment_ids: Segments, distance: int | None = None) -> Table:
    """Returns the rule in which a token attends to tokens at most `distance` positions away.

    Args:
        segment_ids: Segment ids [length], or the length of one document.
        distance: The maximum distance on both sides; unlimited if None.
    """
    return _within_documents(segment_ids, lambda i, j: distance is None or abs(i - j) <= distance)


def convolved(segment_ids: Segments, kernel_size: int, dilation: int = 1) -> Table:
    """Returns which tokens of the same document each output of a causal convolution depends on.

    Args:
        segment_ids: Segment ids [length], or the length of one document. Padding does not count as
            a position.
        kernel_size: The number of tokens that each output depends on.
        dilation: The distance between neighbouring tokens among these tokens.
    """
    reach = [dilation * (k - kernel_size + 1) for k in range(kernel_size)]
    return _within_documents(segment_ids, lambda i, j: j - i in reach)


def composed(layers: Sequence[Table], alive: Segments, residual: bool = True) -> Table:
    """Returns the dependency rule of a stack of layers, composed from the rules of the layers.

    In each layer, a position gets the dependencies of all positions to which it attends.

    Args:
        layers: The dependency rule of each layer, starting with the first layer.
        alive: Segment ids [length], or the length of one document. In the result, no output
            depends on a padding token.
        residual: Whether each layer has a residual connection, so that a position keeps the
            dependencies that it had before the layer.
    """
    alive = _ids(alive)
    length = len(alive)
    reached = [{i} if alive[i] else set() for i in range(length)]
    for table in layers:
        through = [set().union(*(reached[j] for j in np.flatnonzero(row))) for row in table]
        if residual:
            through = [before | seen for before, seen in zip(reached, through, strict=True)]
        reached = through
    table = np.zeros((length, length), bool)
    for i, sources in enumerate(reached):
        table[i, list(sources)] = True
    return table


def mask_rule(mask: Mask, segment_ids: Segments) -> Table:
    """Returns the dependency rule of attention with a user's mask within documents.

    The function evaluates the mask for one pair of tokens at a time, and assumes that the mask is
    correct. A certificate compares every code path of the model with this rule.
    """

    def sees(i: int, j: int) -> bool:
        query, key = (TokenInfo(1, np.array([k]), np.ones(1, int)) for k in (i, j))
        return np.asarray(mask(query, key)).item()

    return _within_documents(segment_ids, sees)


def with_residuals(
    config: ModelConfig,
    segment_ids: Segments,
    mask: Mask | None = None,
    layers: Sequence[Layer] | None = None,
) -> list[Table]:
    """Returns the dependency rule of each layer of a model, with residual connections.

    Through a residual connection, outputs at padding positions depend on inputs at these positions.

    Args:
        config: The model's config.
        segment_ids: Segment ids [length], or the length of one document.
        mask: The user's mask; the mask of the config if None.
        layers: The user's layers, whose sub-layers return their rules; the layers of the config if
            None.
    """
    if layers is None:
        tables = layer_rules(config, segment_ids, mask)
        return [composed([table], len(table), config.residual) for table in tables]
    return [_user_layer_rule(layer, segment_ids) for layer in layers]


def _user_layer_rule(layer: Layer, segment_ids: Segments) -> Table:
    """Returns the dependency rule of a user's layer, composed from its sub-layers' rules."""
    stated = [(x.rule(), part.adds) for part in layer for x in part.sublayers]
    length = len(_ids(segment_ids))
    tables = [
        composed([mask_rule(rule, segment_ids)], length, adds)
        for rule, adds in stated
        if rule is not None
    ]
    return composed(tables, length, residual=False)


def layer_rules(
    config: ModelConfig, segment_ids: Segments, mask: Mask | None = None
) -> list[Table]:
    """Returns the dependency rule of each layer of a config, without residual connections.

    Args:
        config: The model's config.
        segment_ids: Segment ids [length], or the length of one document.
        mask: The user's mask; the mask of the config if None.
    """
    if isinstance(config, configs.ConvolutionalConfig):
        dilations = [config.dilation_growth**layer for layer in range(config.num_layers)]
        return [convolved(segment_ids, config.kernel_size, dilation) for dilation in dilations]
    return [_layer_rule(config, layer, segment_ids, mask) for layer in range(config.num_layers)]


def _layer_rule(config: ModelConfig, layer: int, segment_ids: Segments, mask: Mask | None) -> Table:
    """Returns the dependency rule of one layer of `config`, without residual connections."""
    windows, kinds = entries(config.window), entries(config.layer_types)
    window, kind = windows[layer % len(windows)], kinds[layer % len(kinds)]
    if isinstance(config, configs.DecoderConfig) and kind == "short_convolution":
        return convolved(segment_ids, config.convolution_kernel_size)
    if isinstance(config, configs.DecoderConfig) and kind == "gated_delta":
        return visible(segment_ids)
    if mask is not None:
        return mask_rule(mask, segment_ids)
    if config.bidirectional:
        return near(segment_ids, window)
    return visible(segment_ids, window, config.prefix)


def model_rule(
    config: ModelConfig,
    segment_ids: Int[np.ndarray, "batch length"],
    mask: Mask | None = None,
    layers: Sequence[Layer] | None = None,
) -> Bool[np.ndarray, "batch length batch length"]:
    """Returns the dependency rule of a whole model: bool [batch, length, batch, length].

    Batch elements do not depend on each other.

    Args:
        config: The model's config.
        segment_ids: Segment ids [batch, length].
        mask: The user's mask; the mask of the config if None.
        layers: The user's layers; the layers of the config if None.
    """
    batch, length = np.shape(segment_ids)
    table = np.zeros((batch, length, batch, length), bool)
    for index, ids in enumerate(segment_ids):
        tables = with_residuals(config, ids, mask, layers)
        table[index, :, index] = composed(tables, ids, residual=False)
    return table


def source_rule(
    segment_ids: Int[np.ndarray, "batch length"],
    source_segment_ids: Int[np.ndarray, "batch source"],
) -> Bool[np.ndarray, "batch length batch source"]:
    """Returns the source tokens that each token attends to: bool [batch, length, batch, source].

    Every token attends to all source tokens of its batch element, except padding.
    """
    batch, length = np.shape(segment_ids)
    table = np.zeros((batch, length, batch, np.shape(source_segment_ids)[1]), bool)
    for index in range(batch):
        table[index, :, index] = np.logical_and.outer(segment_ids[index], source_segment_ids[index])
    return table


def _ids(segment_ids: Segments) -> np.ndarray:
    return np.ones(segment_ids, int) if np.ndim(segment_ids) == 0 else np.asarray(segment_ids)
