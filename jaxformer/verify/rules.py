"""Rules: tables of the inputs that an output may depend on, written in plain loops.

A rule is a table, bool [length, length]. Entry [i, j] is true if output i may depend on input j.
The rule of one layer states which tokens a token sees; `composed` follows the paths through several
layers. The loops share no code with `functional`, because a wrong mask would agree with itself.

A table describes one sequence. Its argument `segments` holds the segment ids (1, 1, 2, 2, … for
packed documents, 0 for padding) or, for one document without padding, the length.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.layers.layer import Layer, sublayers_of
from jaxformer.models import config as configs
from jaxformer.models.config.check import entries
from jaxformer.models.config.model import ModelConfig

Table = Bool[np.ndarray, "length length"]
Segments = int | Sequence[int] | np.ndarray


def read(segments: Segments) -> tuple[Int[np.ndarray, " length"], Int[np.ndarray, " length"]]:
    """Returns (document, position) of each token as two int arrays.

    Documents are numbered from 1 and positions from 0. Both are 0 for padding. A document is a
    maximal run of equal non-zero ids; padding inside a run is skipped.

    Args:
        segments: Segment ids, or a length.
    """
    tokens = []
    last_id = document = position = 0
    for segment in _ids(segments):
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
    segments: Segments, window: int | None = None, prefix: int = 0, causal: bool = True
) -> Table:
    """Returns the rule of attention within documents.

    Args:
        segments: Segment ids, or a length.
        window: The number of tokens that a token sees, counted back from itself; None: all.
        prefix: The number of first tokens of a document that all its tokens see.
        causal: Whether a token sees no later tokens (outside the prefix).
    """

    def sees(i: int, j: int) -> bool:
        in_window = window is None or i - j < window
        return in_window and (not causal or j <= i or j < prefix)

    return _within_documents(segments, sees)


def _within_documents(segments: Segments, sees: Callable[[int, int], bool]) -> Table:
    """Returns the rule in which a token sees the tokens of its document that `sees` selects.

    Args:
        segments: Segment ids, or a length.
        sees: Maps the positions of two tokens of a document to whether the first sees the second.
    """
    documents, positions = read(segments)
    length = len(documents)
    seen = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(length):
            if documents[i] != 0 and documents[i] == documents[j]:
                seen[i, j] = sees(positions[i], positions[j])
    return seen


def causal(segments: Segments) -> Table:
    """Returns the lower triangle with its diagonal: causal attention, and recurrent layers."""
    return visible(segments)


def bidirectional(segments: Segments) -> Table:
    """Returns the rule in which every token sees all tokens of its document."""
    return visible(segments, causal=False)


def near(segments: Segments, distance: int | None = None) -> Table:
    """Returns the rule in which a token sees tokens at most `distance` positions away.

    Args:
        segments: Segment ids, or a length.
        distance: The maximum distance on both sides; None: no limit.
    """
    return _within_documents(segments, lambda i, j: distance is None or abs(i - j) <= distance)


def convolved(
    segments: Segments, kernel_size: int, dilation: int = 1, causal: bool = True
) -> Table:
    """Returns the rule of a convolution: a token sees the tokens that the kernel reaches.

    Args:
        segments: Segment ids, or a length. Distances are counted in tokens of a document.
        kernel_size: The number of tokens in the kernel.
        dilation: The distance between neighbouring tokens in the kernel.
        causal: Whether the kernel ends at its position; otherwise it is centred.
    """
    ahead = 0 if causal else kernel_size // 2
    reach = [dilation * (k - kernel_size + 1 + ahead) for k in range(kernel_size)]
    return _within_documents(segments, lambda i, j: j - i in reach)


def composed(layers: Sequence[Table], alive: Segments, residual: bool = True) -> Table:
    """Returns the rule of several layers together.

    After a layer, a position depends on everything that the positions it sees depended on before.

    Args:
        layers: The table of each layer.
        alive: Segment ids, or a length. The inputs of padding are never read.
        residual: Whether a position also keeps its own dependencies, through the residual.
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


def asked(mask: Mask, segments: Segments) -> Table:
    """Returns the rule of a user's mask within documents.

    It evaluates the mask for one pair of tokens at a time. The mask itself is the specification
    here: the certificate checks that every code path of the model follows it.
    """

    def sees(i: int, j: int) -> bool:
        query, key = (TokenInfo(1, np.array([k]), np.ones(1, int)) for k in (i, j))
        return np.asarray(mask(query, key)).item()

    return _within_documents(segments, sees)


def of_layers(
    config: ModelConfig,
    segments: Segments,
    mask: Mask | None = None,
    layers: Sequence[Layer] | None = None,
) -> list[Table]:
    """Returns the rule of each layer of a model.

    Args:
        config: The model's config.
        segments: Segment ids, or a length.
        mask: The user's mask; None: the mask that the config describes.
        layers: The user's layers, whose sub-layers state their rules; None: those of the config.
    """
    if layers is not None:
        stated = [[x.rule() for x in sublayers_of(layer)] for layer in layers]
        tables = [[asked(rule, segments) for rule in each if rule is not None] for each in stated]
        return [composed(each, segments) for each in tables]
    if isinstance(config, configs.ConvolutionalConfig):
        dilations = [config.dilation_growth**layer for layer in range(config.num_layers)]
        return [convolved(segments, config.kernel_size, d, config.causal) for d in dilations]
    return [_of_layer(config, layer, segments, mask) for layer in range(config.num_layers)]


def _of_layer(config: ModelConfig, layer: int, segments: Segments, mask: Mask | None) -> Table:
    """Returns the rule of one layer of a Transformer or of a recurrent model."""
    windows, kinds = entries(config.window), entries(config.layer_types)
    window, kind = windows[layer % len(windows)], kinds[layer % len(kinds)]
    if isinstance(config, configs.DecoderConfig) and kind == "short_convolution":
        return convolved(segments, config.convolution_kernel_size)
    if isinstance(config, configs.DecoderConfig) and kind == "gated_delta":
        return visible(segments)
    if mask is not None:
        return asked(mask, segments)
    if config.bidirectional:
        return near(segments, window)
    return visible(segments, window, config.prefix)


def of(
    config: ModelConfig,
    segments: Int[np.ndarray, "batch length"],
    mask: Mask | None = None,
    layers: Sequence[Layer] | None = None,
) -> Bool[np.ndarray, "batch length batch length"]:
    """Returns the rule of a model: bool [batch, length, batch, length].

    Batch elements do not depend on each other.

    Args:
        config: The model's config.
        segments: Segment ids [batch, length].
        mask: The user's mask; None: the mask that the config describes.
        layers: The user's layers; None: those of the config.
    """
    batch, length = np.shape(segments)
    table = np.zeros((batch, length, batch, length), bool)
    for row, ids in enumerate(segments):
        tables = of_layers(config, ids, mask, layers)
        table[row, :, row] = composed(tables, ids, config.residual)
    return table


def of_source(
    segments: Int[np.ndarray, "batch length"], source_segments: Int[np.ndarray, "batch source"]
) -> Bool[np.ndarray, "batch length batch source"]:
    """Returns the rule of a source: bool [batch, length, batch, source length].

    Every token reads the whole source of its batch element, without padding.
    """
    batch, length = np.shape(segments)
    table = np.zeros((batch, length, batch, np.shape(source_segments)[1]), bool)
    for row in range(batch):
        table[row, :, row] = np.logical_and.outer(segments[row], source_segments[row])
    return table


def _ids(segments: Segments) -> np.ndarray:
    return np.ones(segments, int) if np.ndim(segments) == 0 else np.asarray(segments)
