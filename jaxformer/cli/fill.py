"""`jaxformer fill RUN --text "if x is [MASK] None:"`: predicts the masked tokens of a text."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxformer.artifacts.files import json_text
from jaxformer.cli.arguments import parse
from jaxformer.cli.checkpoints import RunArguments, load_model
from jaxformer.terminal import say, write

MASK = "[MASK]"


@dataclass(frozen=True)
class FillArguments(RunArguments):
    """Predict the masked tokens of a text with an encoder.

    Each [MASK], together with the space before it, stands for one token.
    """

    text: str
    """text with at least one [MASK]"""
    top_k: int = 5
    """number of predictions to show for each [MASK]"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object and nothing else"""

    def __post_init__(self):
        """Checks the fields."""
        if MASK not in self.text:
            raise ValueError(f"text is {self.text!r}; it must contain at least one {MASK}")


def main(argv: list[str]) -> int:
    """Loads the model, predicts the masked tokens and prints them."""
    arguments = parse(FillArguments, "fill", argv)
    with load_model(arguments) as checkpoint:
        _print(checkpoint, arguments)
    return 0


def _print(checkpoint, arguments: FillArguments) -> None:
    from jaxformer.decoding.fill import fill
    from jaxformer.models.config import kind_of

    model, variables, tokenizer = checkpoint
    if model.config.learns != "hidden tokens":
        raise ValueError(
            f"{arguments.run} is of kind {kind_of(model.config)}; fill needs an encoder, which "
            "reads the text on both sides of a mask"
        )
    if tokenizer is None or tokenizer.mask_token is None:
        raise ValueError(f"{arguments.run} has no tokenizer with a mask token, which fill needs")
    parts = tokenizer.encode_many(around(arguments.text))
    row = [*tokenizer.before, *parts[0]]
    for part in parts[1:]:
        row += [tokenizer.mask_token, *part]
    row += tokenizer.after
    (found,) = fill(model, variables, [row], tokenizer.mask_token, arguments.top_k)
    words = [[tokenizer.decode([token]) for token in place] for place in found.tokens.tolist()]
    filled = row.copy()
    for place, best in zip(found.positions, found.tokens[:, 0].tolist(), strict=True):
        filled[place] = best
    text = tokenizer.decode(filled)
    if arguments.json:
        places = [
            [{"text": word, "probability": p} for word, p in zip(*place, strict=True)]
            for place in zip(words, found.probabilities.tolist(), strict=True)
        ]
        say(json_text({"text": text, "masks": places}))
        return
    write(f"{text}\n")
    for number, (some, shares) in enumerate(zip(words, found.probabilities, strict=True), 1):
        said = (f"{word!r} {share:.1%}" for word, share in zip(some, shares, strict=True))
        say(f"{MASK} {number}: " + ", ".join(said))


def around(text: str) -> list[str]:
    """Splits a text at its masks.

    A space before a mask is dropped, because it is part of the masked token: tokens start with the
    space before a word and never end with one.

    Returns:
        The parts before, between and after the masks.
    """
    *before, last = text.split(MASK)
    return [*(part.removesuffix(" ") for part in before), last]
