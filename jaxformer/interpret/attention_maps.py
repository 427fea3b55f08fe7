"""Attention weights of one text by layer and head, and their picture."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxformer.artifacts.files import write_figure
from jaxformer.decoding.autoregressive import inspect
from jaxformer.interpret.encoded_text import EncodedText, token_names
from jaxformer.interpret.layers import layers_with
from jaxformer.models.language_model import LanguageModel, Variables

KINDS = {  # (point, title)
    "self": ("attention.weights", "self-attention"),
    "cross": ("cross_attention.weights", "cross-attention"),
    "encoder": ("encoder.attention.weights", "encoder attention"),
}
MOST_LABELS = {True: 48, False: 14}  # of a single panel and of one of several; more are numbered


class AttentionMaps(NamedTuple):
    """Attention weights of one text. Row i says how much token i reads from each key.

    Attributes:
        weights: the weights; each row sums to 1.
        queries: the texts of the tokens that read.
        keys: the texts of the tokens that they read from.
        title: which attention it is.
        layers: the number of the layer of each map.
    """

    weights: Float[np.ndarray, "layers heads queries keys"]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    title: str
    layers: tuple[int, ...]


def attention_maps(
    model: LanguageModel,
    variables: Variables,
    text: EncodedText,
    tokenizer: Any = None,
    which: str = "self",
) -> AttentionMaps:
    """Computes the attention weights of a text.

    Args:
        model: a model with attention.
        variables: its variables.
        text: the ids of the text and, for a model that reads a source, of the source.
        tokenizer: names the tokens; None: their ids do.
        which: "self", "cross" (from the text to its source) or "encoder" (within the source).

    Raises:
        ValueError: the model does not have this attention.
    """
    names = [name for name, (point, _) in KINDS.items() if point in model.points]
    if which not in names:
        accepted = f"it has {', '.join(names)}" if names else "it has no attention"
        kind = type(model).__name__
        raise ValueError(f"attention is {which!r}; the model is a {kind}: {accepted}")
    point, title = KINDS[which]
    ids, source = text.as_batch()
    seen = inspect(model, variables, ids, source=source, capture=(point,))
    weights = np.asarray(seen.captured[point], np.float32)[:, 0]
    tokens, source_names = (
        tuple(token_names(tokenizer, ids or ())) for ids in (text.tokens, text.source)
    )
    queries = source_names if which == "encoder" else tokens
    keys = tokens if which == "self" else source_names
    return AttentionMaps(weights, queries, keys, title, tuple(layers_with(model, point)))


def draw_attention(
    maps: AttentionMaps, path: Path, layer: int | None = None, head: int | None = None
) -> None:
    """Draws the maps of all heads, or of one layer or one head, to a PNG.

    Args:
        maps: the maps.
        path: the file to write.
        layer: the layer to draw, from 0; None: all.
        head: the head to draw, from 0; None: all.

    Raises:
        ValueError: there is no such layer or head.
    """
    from matplotlib.figure import Figure

    num_heads = maps.weights.shape[1]
    if layer is not None and layer not in maps.layers:
        there = ", ".join(map(str, maps.layers))
        raise ValueError(f"layer is {layer}; the layers with this attention are {there}")
    if head is not None and not 0 <= head < num_heads:
        raise ValueError(f"head is {head}; this model has heads 0 … {num_heads - 1}")
    layers = maps.layers if layer is None else (layer,)
    heads = range(num_heads) if head is None else (head,)
    is_one = len(layers) == len(heads) == 1
    size = _panel_size(maps, is_one)
    shape = len(layers), len(heads)
    figure = Figure(
        figsize=(size[0] * shape[1] + 1.2, size[1] * shape[0] + 1.2), layout="constrained"
    )
    panels = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    for row, number in enumerate(layers):
        for column, which in enumerate(heads):
            axes = panels[row][column]
            axes.imshow(
                maps.weights[maps.layers.index(number), which], cmap="viridis", vmin=0, vmax=1
            )
            axes.set_title(f"layer {number}, head {which}", fontsize=8)
            _label(axes, maps, is_one)
    figure.colorbar(panels[0][0].images[0], ax=panels, shrink=0.6, label="attention weight")
    figure.supxlabel("token that is read", fontsize=9)
    figure.supylabel("token that reads", fontsize=9)
    write_figure(figure, maps.title, path, dpi=130)


def _panel_size(maps: AttentionMaps, is_one: bool) -> tuple[float, float]:
    """Returns width and height of a panel in inches, which follow the numbers of tokens."""
    if not is_one:
        return 1.8, 1.8 * min(max(len(maps.queries) / len(maps.keys), 0.4), 2.5)
    width, height = (min(max(0.24 * len(x), 3.0), 11.0) for x in (maps.keys, maps.queries))
    return width, height


def _label(axes: Any, maps: AttentionMaps, is_one: bool) -> None:
    """Names the tokens of a panel if there are few enough; otherwise numbers some."""
    named = ((axes.xaxis, maps.keys, 90), (axes.yaxis, maps.queries, 0))
    for axis, texts, rotation in named:
        axis.set_tick_params(labelsize=7)
        if len(texts) <= MOST_LABELS[is_one]:
            axis.set_ticks(range(len(texts)), texts, rotation=rotation, parse_math=False)


def describe(maps: AttentionMaps, layer: int, head: int, query: int, top_k: int = 5) -> list[tuple]:
    """Returns the keys that a token reads most from in one head: (label, weight), largest first."""
    row = maps.weights[maps.layers.index(layer), head, query]
    best = np.argsort(-row, kind="stable")[:top_k]
    return [(maps.keys[i], float(row[i])) for i in best]
