"""`jaxformer fill RUN --text "if x is [MASK] None:"`: what an encoder expects at a mask."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxformer.cli.arguments import parse
from jaxformer.cli.opened import RunArguments, opened

MASK = "[MASK]"


@dataclass(frozen=True)
class FillArguments(RunArguments):
    """Fill in what is hidden in a text: each [MASK] is one token, with the space before it, told
    from both sides of it."""

    text: str
    """with at least one [MASK]"""
    top_k: int = 5
    """how many tokens are shown for each"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object and nothing else"""

    def __post_init__(self):
        if MASK not in self.text:
            raise ValueError(f"text is {self.text!r}; it must hold at least one {MASK}")


def main(argv: list[str]) -> int:
    """Load, fill in, print."""
    arguments = parse(FillArguments, "fill", argv)
    with opened(arguments) as checkpoint:
        _print(checkpoint, arguments)
    return 0


def _print(checkpoint, arguments: FillArguments) -> None:
    from jaxformer.decoding.fill import fill
    from jaxformer.models.config import EncoderConfig, kind_of

    model, variables, tokenizer = checkpoint
    if not isinstance(model.config, EncoderConfig):
        raise ValueError(
            f"{arguments.run} is of kind {kind_of(model.config)}; fill is for an encoder, which "
            "sees both sides of what is hidden"
        )
    if tokenizer is None or tokenizer.mask_token is None:
        raise ValueError(f"{arguments.run} has no tokenizer with a mask; fill cannot hide a token")
    parts = [tokenizer.encode(part) for part in around(arguments.text)]
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
        print(json.dumps({"text": text, "masks": places}))
        return
    print(text)
    for number, (some, shares) in enumerate(zip(words, found.probabilities, strict=True), 1):
        said = (f"{word!r} {share:.1%}" for word, share in zip(some, shares, strict=True))
        print(f"{MASK} {number}: " + ", ".join(said))


def around(text: str) -> list[str]:
    """What stands before, between and after the masks. A space before a mask is hidden with it:
    tokens begin with the space before a word, and never end with one."""
    *before, last = text.split(MASK)
    return [*(part.removesuffix(" ") for part in before), last]
