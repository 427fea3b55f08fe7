"""`jaxformer plot-attention RUN "text" -o attention.png`: draws the attention weights of a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxformer.artifacts.files import next_free
from jaxformer.cli.arguments import parse
from jaxformer.cli.checkpoints import TextArguments, load_model, report_special
from jaxformer.cli.flags import OutFile, check_out, positional
from jaxformer.terminal import say


@dataclass(frozen=True)
class PlotAttentionArguments(TextArguments):
    """Draw the attention weights of each head of a model for one text.

    For a model that translates, the text is the source; the model translates it greedily.
    """

    text: Annotated[str, positional("TEXT")]
    """the text to read"""
    out: OutFile = None
    """the .png file to write; default: attention.png, or attention-2.png, … if that exists"""
    layer: int | None = None
    """draw only this layer, counted from 0; default: all layers"""
    head: int | None = None
    """draw only this head, counted from 0; default: all heads"""
    attention: Literal["self", "cross", "encoder"] | None = None
    """which attention to draw. self: within the text; cross: from the translation to the source;
    encoder: within the source; default: cross for a model that translates, otherwise self"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_out(self.out, ".png")


def main(argv: list[str]) -> int:
    """Loads the model, reads the text and draws the picture."""
    arguments = parse(PlotAttentionArguments, "plot-attention", argv)
    with load_model(arguments) as (model, variables, tokenizer):
        from jaxformer.interpret.attention import attention_maps, draw_attention
        from jaxformer.interpret.encoded_text import encode_text

        if tokenizer is not None:
            report_special(tokenizer, "the text", [arguments.text])
        usual = "cross" if model.config.reads_source else "self"
        text = encode_text(model, variables, arguments.text, tokenizer, None)
        maps = attention_maps(model, variables, text, tokenizer, arguments.attention or usual)
        path = arguments.out or next_free(Path(), "attention", ".png")
        draw_attention(maps, path, arguments.layer, arguments.head)
        layers, heads, queries, keys = maps.weights.shape
        tokens = f"{queries} query tokens × {keys} key tokens"
        say(f"{maps.title}: {layers} layers × {heads} heads, {tokens}")
        say(f"picture: {path}")
    return 0
