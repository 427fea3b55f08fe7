"""`jaxformer generate RUN TEXT`: continues a prompt, or each prompt of a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.cli.arguments import complete, read_given
from jaxformer.cli.checkpoints import load_model, report_special
from jaxformer.cli.flags import OutFile, Switch, positional
from jaxformer.cli.sampling import (
    SamplingArguments,
    TextGenerator,
    check_sampling,
    make_generator,
    room_for_answer,
)
from jaxformer.models.config.check import check_at_least
from jaxformer.models.config.encoder import check_reads_text
from jaxformer.models.config.needs import Needs, is_given
from jaxformer.terminal import write

if TYPE_CHECKING:
    from jaxformer.models.language_model import LanguageModel

USUAL_TOKENS = 200  # Default of --max-new-tokens.


@dataclass(frozen=True)
class GenerateArguments(SamplingArguments):
    """Print a prompt and its continuation, or write the continuations of a file of prompts.

    For a model that translates, the prompt is the source, and only the translation is printed. The
    same seed gives the same text.
    """

    needs: ClassVar[Needs] = {
        **SamplingArguments.needs,
        **dict.fromkeys(("out", "num_samples", "batch_size"), (is_given("prompts"),)),
    }

    prompt: Annotated[str, positional("TEXT")] = ""
    """text to continue or, for models that translate, the source; without TEXT, a new document
    starts"""
    truncate_prompt: Switch = False
    """drop the beginning of a prompt that is too long, instead of refusing it"""
    prompts: Path | None = None
    """file with one record per prompt (.jsonl, .json or .parquet); a record has the field prompt (a
    text or messages) or the field messages; - reads JSON lines from standard input"""
    out: OutFile = None
    """.jsonl file to write: the records of --prompts in the same order, with the generated text; if
    the command is interrupted, repeat it to continue"""
    num_samples: int = 1
    """number of texts to generate for each prompt"""
    batch_size: int | None = None
    """maximum number of prompts per batch; default: limited by the memory that a batch needs"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_at_least(1, self, "num_samples", "batch_size")
        if self.prompts is None:
            return
        if self.prompt:
            raise ValueError("--prompts and a prompt cannot be combined")
        if self.out is None:
            raise ValueError("--prompts needs --out, the .jsonl file to write")


def main(argv: list[str]) -> int:
    """Loads the model, then prints the text token by token, or writes a file."""
    given = read_given(GenerateArguments, "generate", argv)
    arguments = complete(GenerateArguments, given)
    check_sampling(arguments)
    if arguments.prompts is not None:
        from jaxformer.cli.prompts import open_files

        files = open_files(arguments)
        with load_model(arguments) as checkpoint:
            files.generate(make_generator(arguments, given, checkpoint))
        return 0
    with load_model(arguments) as checkpoint:
        _print_continuation(arguments, make_generator(arguments, given, checkpoint))
    return 0


def _print_continuation(arguments: GenerateArguments, generator: TextGenerator) -> None:
    import jax

    model, tokenizer = generator.model, generator.tokenizer
    report_special(tokenizer, "the prompt", [arguments.prompt])
    prompt, source = encode_prompt(model, tokenizer, arguments.prompt)
    max_length = model.config.max_length
    if arguments.truncate_prompt:
        room = reserved_tokens(model, arguments)
        prompt = without_beginning(prompt, tokenizer, max_length - room)
    usual = model.generation.most_new_tokens(len(prompt), max_length) or USUAL_TOKENS
    room = room_for_answer(len(prompt), arguments.max_new_tokens, max_length, usual)
    stream = generator.stream(prompt)
    write("" if source else arguments.prompt)
    generator.generate(
        [prompt],
        room,
        jax.random.key(arguments.seed),
        tokenizer.stop_tokens,
        source=source,
        on_tokens=lambda new_tokens: write(stream.push(new_tokens[0])),
    )
    write(f"{stream.flush()}\n")


def encode_prompt(
    model: "LanguageModel", tokenizer: Tokenizer, text: str
) -> tuple[list[int], list[list[int]] | None]:
    """Encodes a prompt.

    Args:
        model: The model.
        tokenizer: The model's tokenizer.
        text: The prompt.

    Returns:
        (prompt, source). The prompt contains the first ids of the decoder's input. The source is a
        list with the ids of one text, or None if the model reads no source.
    """
    if not model.config.reads_source:
        ids = [*tokenizer.text_opening, *tokenizer.encode_many([text])[0]]
        return ids or tokenizer.opening, None
    check_reads_text(model.config)
    return tokenizer.decoder_opening, [tokenizer.encode_source(text)]


def reserved_tokens(model: "LanguageModel", arguments: GenerateArguments) -> int:
    """Returns the number of new tokens for which a truncated prompt leaves room."""
    max_length = model.config.max_length
    usual = model.generation.most_new_tokens(1, max_length) or USUAL_TOKENS
    return arguments.max_new_tokens or min(usual, max(max_length // 2, 1))


def without_beginning(prompt: list[int], tokenizer: Tokenizer, most: int) -> list[int]:
    """Truncates a prompt to `most` tokens.

    The result has the tokens that open every text, and then the prompt's last tokens. The prompt is
    returned unchanged if it is short enough, or if `most` leaves no room for its text.
    """
    opening = tokenizer.text_opening
    is_opened = prompt[: len(opening)] == opening and len(opening) < most
    kept = most - len(opening) if is_opened else most
    if len(prompt) <= most or kept < 1:
        return prompt
    return [*(opening if is_opened else []), *prompt[-kept:]]
