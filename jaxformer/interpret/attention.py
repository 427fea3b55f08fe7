"""Attention weights of one text by layer and head, and a plot of the weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxformer.artifacts.files import write_figure
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.decoding.autoregressive import inspect
from jaxformer.interpret.encoded_text import EncodedText, encode_text, token_names
from jaxformer.interpret.layers import layers_with
from jaxformer.interpret.summary import summary, to_png
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.terminal import kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# {kind of attention: (hook point, title)}.
KINDS = {
    "self": ("attention.weights", "self-attention"),
    "cross": ("cross_attention.weights", "cross-attention"),
    "encoder": ("encoder.attention.weights", "encoder attention"),
}
# A plot with more tokens than this number labels only some positions. The key is True for a plot
# with a single panel and False for a plot with several panels.
MOST_LABELS = {True: 48, False: 14}


class AttentionMaps(NamedTuple):
    """Attention weights of one text. Row i of a matrix contains the weights of query token i.

    Attributes:
        weights: the attention weights; each row sums to 1.
        queries: the labels of the query tokens.
        keys: the labels of the key tokens.
        title: the name of the attention, for plots.
        layers: the indices of the layers along the first axis of `weights`.
    """

    weights: Float[np.ndarray, "layers heads queries keys"]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    title: str
    layers: tuple[int, ...]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    def _repr_png_(self) -> bytes:
        """Returns the figure of `draw_attention`, which notebooks show."""
        return to_png(draw_attention(self))


def attention_maps(
    model: LanguageModel,
    variables: Variables,
    text: str | Sequence[int] | EncodedText,
    tokenizer: Tokenizer | None = None,
    which: str = "self",
) -> AttentionMaps:
    """Computes the attention weights of a text.

    Args:
        model: a model with attention.
        variables: the model's variables.
        text: a string, token ids, or an `EncodedText`. For a model with a source, a string or token
            ids are the source, and the model generates the text, which requires a tokenizer. An
            `EncodedText` contains the ids of the text and of the source.
        tokenizer: encodes the string, and decodes the tokens for the labels. The labels are token
            ids if None.
        which: "self", "cross" (from the text to the source) or "encoder" (within the source).

    Raises:
        ValueError: The model does not have attention of the kind `which`, or the text is empty, too
            long or not accepted.
    """
    names = [name for name, (point, _) in KINDS.items() if point in model.hook_points]
    if which not in names:
        accepted = f"whose attention is {', '.join(names)}" if names else "which has no attention"
        raise ValueError(f"attention is {which!r}; the model is {kind_of(model)}, {accepted}")
    point, title = KINDS[which]
    if not isinstance(text, EncodedText):
        if model.config.reads_source and tokenizer is None:
            raise ValueError(
                "tokenizer is None, so text must be an EncodedText with the ids of text and source"
            )
        text = encode_text(model, variables, text, tokenizer, None)
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
    maps: AttentionMaps,
    path: Path | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> "Figure":
    """Draws the attention weights of all heads, or of one layer or one head.

    Args:
        maps: the attention weights.
        path: the PNG file to write; None writes no file.
        layer: the layer to draw, counted from 0; all layers if None.
        head: the head to draw, counted from 0; all heads if None.

    Returns:
        The figure, which a notebook shows.

    Raises:
        ValueError: The layer or head does not exist.
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
    figure.supxlabel("key token", fontsize=9)
    figure.supylabel("query token", fontsize=9)
    if path is not None:
        write_figure(figure, maps.title, path, dpi=130)
    return figure


def _panel_size(maps: AttentionMaps, is_one: bool) -> tuple[float, float]:
    """Returns the width and height of a panel in inches, proportional to the numbers of tokens."""
    if not is_one:
        return 1.8, 1.8 * min(max(len(maps.queries) / len(maps.keys), 0.4), 2.5)
    width, height = (min(max(0.24 * len(x), 3.0), 11.0) for x in (maps.keys, maps.queries))
    return width, height


def _label(axes: "Axes", maps: AttentionMaps, is_one: bool) -> None:
    """Labels the axes with the tokens or, if there are too many tokens, with some positions."""
    named = ((axes.xaxis, maps.keys, 90), (axes.yaxis, maps.queries, 0))
    for axis, texts, rotation in named:
        axis.set_tick_params(labelsize=7)
        if len(texts) <= MOST_LABELS[is_one]:
            axis.set_ticks(range(len(texts)), texts, rotation=rotation, parse_math=False)


def describe(maps: AttentionMaps, layer: int, head: int, query: int, top_k: int = 5) -> list[tuple]:
    """Returns the keys with the largest weights for one query and head: (label, weight) pairs."""
    row = maps.weights[maps.layers.index(layer), head, query]
    best = np.argsort(-row, kind="stable")[:top_k]
    return [(maps.keys[i], float(row[i])) for i in best]
