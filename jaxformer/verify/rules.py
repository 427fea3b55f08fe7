"""Which input an output may depend on, as rules written in plain loops.

A rule is a table: bool [length, length], true where the output of that row may depend on the input
of that column. One layer's rule is who sees whom; `composed` follows the paths through the layers.
Nothing here shares code with `functional`: a mask that is wrong would agree with itself.

Tables are of one row of tokens, given by its segment ids (1, 1, 2, 2, … for packed documents, 0 for
padding) or, for one document without padding, by its length.
"""

import numpy as np

from jaxformer.functional.masks import Mask, TokenInfo
from jaxformer.models import config as configs
from jaxformer.models.language_model import Transformer


def read(segments):
    """(document, position) of each token; both 0 for padding, documents counted from 1.

    A document is a maximal run of equal non-zero ids, padding left out of account.
    """
    documents, positions = [], []
    last_id = document = position = 0
    for segment in _ids(segments):
        if segment == 0:
            documents.append(0)
            positions.append(0)
            continue
        if segment != last_id:
            last_id, document, position = segment, document + 1, 0
        documents.append(document)
        positions.append(position)
        position += 1
    return np.array(documents), np.array(positions)


def visible(segments, window=None, prefix=0, causal=True):
    """Attention: a token sees those of its document up to itself, `window` of them at most, and
    the first `prefix`; all of them if it is not causal."""
    documents, positions = read(segments)
    length = len(documents)
    seen = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(length):
            if documents[i] == 0 or documents[i] != documents[j]:
                continue
            allowed = not causal or positions[j] <= positions[i] or positions[j] < prefix
            if window is not None and positions[i] - positions[j] >= window:
                allowed = False
            seen[i, j] = allowed
    return seen


def causal(segments):
    """The lower triangle, diagonal included: of attention, and of a recurrent state."""
    return visible(segments)


def bidirectional(segments):
    """Everyone sees everyone of a document."""
    return visible(segments, causal=False)


def near(segments, distance=None):
    """Everyone of a document sees those at most so far away; None: all of it."""
    _, positions = read(segments)
    seen = bidirectional(segments)
    for i, j in np.argwhere(seen):
        seen[i, j] = distance is None or abs(int(positions[i]) - int(positions[j])) <= distance
    return seen


def windows(config) -> list:
    """The window of each layer: the config's, or of a pattern the layer's entry."""
    window = getattr(config, "window", None)
    pattern = list(window) if isinstance(window, tuple) else [window]
    return (pattern * config.num_layers)[: config.num_layers]


def convolved(segments, kernel_size, dilation=1, causal=True):
    """A convolution: the tokens that its kernel reaches, distance counted in tokens of the
    document."""
    documents, positions = read(segments)
    ahead = 0 if causal else kernel_size // 2
    reach = [dilation * (k - kernel_size + 1 + ahead) for k in range(kernel_size)]
    length = len(documents)
    seen = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(length):
            same = documents[i] != 0 and documents[i] == documents[j]
            seen[i, j] = same and positions[j] - positions[i] in reach
    return seen


def composed(layers, alive, residual=True):
    """On which inputs does each output depend after these layers?

    layers: a table for each; alive: whose input is read at all (padding is not). A layer reaches
    what the seen ones had reached; the residual adds what the position itself had.
    """
    alive = _ids(alive)
    length = len(alive)
    reached = [{i} if alive[i] else set() for i in range(length)]
    for seen in layers:
        following = []
        for i in range(length):
            through = set(reached[i]) if residual else set()
            for j in range(length):
                if seen[i, j]:
                    through |= reached[j]
            following.append(through)
        reached = following
    table = np.zeros((length, length), bool)
    for i, sources in enumerate(reached):
        table[i, list(sources)] = True
    return table


def asked(mask, segments):
    """What a mask of the caller's says, within each document: asked once for each pair of tokens.

    That rule is the specification here. What is held to it is every code path of the model.
    """
    documents, positions = read(segments)
    length = len(documents)
    seen = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(length):
            if documents[i] != 0 and documents[i] == documents[j]:
                query, key = (TokenInfo(1, positions[k : k + 1], np.ones(1, int)) for k in (i, j))
                seen[i, j] = np.asarray(mask(query, key)).item()
    return seen


def mask_of(model) -> Mask | None:
    """The caller's own mask, where the model has one."""
    return model.mask if isinstance(model, Transformer) else None


def of_layers(config, segments, mask=None) -> list:
    """Who sees whom in each layer of the model that this config describes, for one row; mask: the
    caller's, where the model has one."""
    if mask is not None:
        return [asked(mask, segments)] * config.num_layers
    if isinstance(config, configs.ConvolutionalConfig):
        dilations = [config.dilation_growth**layer for layer in range(config.num_layers)]
        return [convolved(segments, config.kernel_size, d, config.causal) for d in dilations]
    if isinstance(config, configs.EncoderConfig):
        return [near(segments, window) for window in windows(config)]
    prefix = getattr(config, "prefix", 0)
    return [visible(segments, window, prefix) for window in windows(config)]


def of(config, segments, num_layers: int | None = None, mask=None):
    """bool [batch, length, batch, length] of rows of segment ids: the rule composed over the
    model's layers (the first num_layers of them), and nothing from row to row."""
    batch, length = np.shape(segments)
    table = np.zeros((batch, length, batch, length), bool)
    residual = getattr(config, "residual", False)
    for row, ids in enumerate(segments):
        layers = of_layers(config, ids, mask)[:num_layers]
        table[row, :, row] = composed(layers, ids, residual)
    return table


def of_source(segments, source_segments):
    """bool [batch, length, batch, source length]: every token reads all of its row's source."""
    batch, length = np.shape(segments)
    table = np.zeros((batch, length, batch, np.shape(source_segments)[1]), bool)
    for row in range(batch):
        for i in range(length):
            for j, there in enumerate(source_segments[row]):
                table[row, i, row, j] = segments[row][i] != 0 and there != 0
    return table


def _ids(segments):
    return np.ones(segments, int) if np.ndim(segments) == 0 else np.asarray(segments)
