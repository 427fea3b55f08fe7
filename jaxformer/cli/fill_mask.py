"""`jaxformer fill-mask RUN "if x is [MASK] None:"`: predicts the masked tokens of a text."""

from dataclasses import dataclass
from typing import Annotated

from jaxformer.artifacts.files import json_text
from jaxformer.cli.arguments import parse
from jaxformer.cli.checkpoints import TextArguments, load_model, report_special
from jaxformer.cli.flags import Switch, positional
from jaxformer.terminal import say, write

MASK = "[MASK]"


@dataclass(frozen=True)
class FillMaskArguments(TextArguments):
    """Predict the masked tokens of a text with an encoder.

    Each [MASK], together with a space before it, is replaced by one predicted token.
    """

    text: Annotated[str, positional("TEXT")]
    """text with at least one [MASK]"""
    top_k: int = 5
    """number of predictions to show for each [MASK]"""
    json: Switch = False
    """print one JSON object and nothing else"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        if MASK not in self.text:
            raise ValueError(f"text is {self.text!r}; it must contain at least one {MASK}")


def main(argv: list[str]) -> int:
    """Loads the model, predicts the masked tokens and prints them."""
    arguments = parse(FillMaskArguments, "fill-mask", argv)
    with load_model(arguments) as (model, variables, tokenizer):
        from jaxformer.decoding.fill import fill
        from jaxformer.models.config import architecture_name

        if not model.config.bidirectional:
            raise ValueError(
                f"{arguments.run} has a model of the architecture "
                f"{architecture_name(model.config)}; fill-mask needs an encoder, "
                "which reads the text on both sides of a mask"
            )
        if tokenizer is None or tokenizer.mask_token is None:
            raise ValueError(
                f"{arguments.run} has no tokenizer with a mask token, which fill-mask needs"
            )
        parts = around(arguments.text)
        report_special(tokenizer, "the text", ["\n".join(parts)])
        first, *others = tokenizer.encode_many(parts)
        sequence = [*tokenizer.before, *first]
        for part in others:
            sequence += [tokenizer.mask_token, *part]
        sequence += tokenizer.after
        (filled,) = fill(model, variables, [sequence], tokenizer.mask_token, arguments.top_k)
        for position, best in zip(filled.positions, filled.tokens[:, 0].tolist(), strict=True):
            sequence[position] = best
        text = tokenizer.decode(sequence)
        masks = [
            [(tokenizer.decode([token]), share) for token, share in zip(*mask, strict=True)]
            for mask in zip(filled.tokens.tolist(), filled.probabilities.tolist(), strict=True)
        ]
    if arguments.json:
        places = [[{"text": word, "probability": p} for word, p in mask] for mask in masks]
        say(json_text({"text": text, "masks": places}))
        return 0
    write(f"{text}\n")
    for number, mask in enumerate(masks, 1):
        say(f"{MASK} {number}: " + ", ".join(f"{word!r} {share:.1%}" for word, share in mask))
    return 0


def around(text: str) -> list[str]:
    """Splits a text at its masks.

    A space before a mask is dropped, because tokens include the space before a word and never end
    with a space. The space thus belongs to the masked token.

    Returns:
        The texts before, between and after the masks.
    """
    *before, last = text.split(MASK)
    return [*(part.removesuffix(" ") for part in before), last]
