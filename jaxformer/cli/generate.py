"""`jaxformer generate RUN --prompt TEXT`: continue a prompt, character by character."""

import sys
from dataclasses import dataclass

from jaxformer.cli.arguments import parse
from jaxformer.cli.opened import RunArguments, opened
from jaxformer.training.config import check_seed


@dataclass(frozen=True)
class GenerateArguments(RunArguments):
    """Continue a prompt, or answer it if the model reads a source. The same seed gives the same
    text."""

    prompt: str = ""
    """the text to continue, or to read as the source; empty: start a new document"""
    max_new_tokens: int | None = None
    """maximum number of tokens to generate; None: 200, or as many as fit into max_length"""
    temperature: float = 0.8
    """divides the logits before sampling; 0: always the most probable token"""
    top_k: int = 0
    """sample from the k most probable tokens only; 0: from all"""
    top_p: float = 0.95
    """sample from the fewest most probable tokens whose total probability is at least this"""
    min_p: float = 0.0
    """sample only tokens with at least this fraction of the largest probability"""
    seed: int = 0
    """seed for sampling"""

    def __post_init__(self):
        check_seed(self.seed)


def main(argv: list[str]) -> int:
    """Load, then print the prompt and what follows as it is generated."""
    arguments = parse(GenerateArguments, "generate", argv)
    from jaxformer.decoding.sampling import Sampler

    sampler = Sampler(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)
    with opened(arguments) as checkpoint:
        _print(checkpoint, arguments, sampler)
    return 0


def _print(checkpoint, arguments: GenerateArguments, sampler) -> None:
    import jax

    from jaxformer.decoding.generate import generate
    from jaxformer.decoding.protocol import require_autoregressive

    model, variables, tokenizer = checkpoint
    require_autoregressive(model)
    if tokenizer is None:
        raise ValueError(f"{arguments.run} has no tokenizer; jaxformer.generate takes ids")
    prompt, source = prompt_of(model, tokenizer, arguments.prompt)
    stream = tokenizer.stream(prompt)

    def show(rows):
        print(stream.push(rows[0]), end="", flush=True)

    max_new_tokens = fitting(len(prompt), arguments.max_new_tokens, model.config.max_length)
    print("" if source else arguments.prompt, end="", flush=True)
    generate(
        model,
        variables,
        [prompt],
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        key=jax.random.key(arguments.seed),
        stop_tokens=tokenizer.stop_tokens,
        source=source,
        on_tokens=show,
    )
    print(stream.flush())
    sys.stdout.flush()


def prompt_of(model, tokenizer, text: str) -> tuple[list, list | None]:
    """(the prompt's ids, the sources or None)."""
    from jaxformer.models.config.encoder_decoder import ReadsSource

    if not isinstance(model.config, ReadsSource):
        return [*tokenizer.opening, *tokenizer.encode(text)], None
    return tokenizer.decoder_opening, [tokenizer.encode_source(text)]


def fitting(prompt_tokens: int, max_new_tokens: int | None, max_length: int) -> int:
    """How many tokens to ask for; what cannot fit is refused in the command line's words."""
    room = max_length - prompt_tokens
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens, which leaves no room: this model's max_length "
            f"is {max_length}"
        )
    if max_new_tokens is None:
        return min(200, room)
    if not 1 <= max_new_tokens <= room:
        raise ValueError(
            f"--max-new-tokens is {max_new_tokens} and the prompt has {prompt_tokens} tokens; this "
            f"model has room for 1 to {room} more (max_length {max_length})"
        )
    return max_new_tokens
