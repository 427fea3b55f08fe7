"""Flags of the subcommands that generate text: sampling, constraints, and where a text ends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from jaxformer.artifacts.files import parse_json, read_text
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.cli.arguments import refuse_unread
from jaxformer.cli.checkpoints import DecodingArguments
from jaxformer.models.config.generation import Constraints, GenerationDefaults
from jaxformer.models.config.needs import Needs, Spelling, is_above, is_one_of
from jaxformer.training.config import check_seed

if TYPE_CHECKING:
    import jax

    from jaxformer.artifacts.saved import Checkpoint
    from jaxformer.decoding.generate import Generation
    from jaxformer.decoding.grammars import Grammar
    from jaxformer.decoding.sampling import Sampler
    from jaxformer.decoding.stop_strings import StopStrings
    from jaxformer.decoding.text_stream import TextStream
    from jaxformer.models.language_model import LanguageModel, Variables

Texts = Annotated[tuple[str, ...], Spelling(placeholder="TEXT", is_repeated=True)]
_SAMPLER = ("temperature", "top_k", "top_p", "min_p")
_CONSTRAINTS = (
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("no_repeat_ngram_size", "min_new_tokens"),
)


@dataclass(frozen=True)
class SamplingArguments(DecodingArguments):
    """Arguments of every subcommand that samples a text."""

    needs: ClassVar[Needs] = {
        **dict.fromkeys(("top_k", "top_p", "min_p", "seed"), (is_above("temperature", 0),)),
        "regex": (is_one_of("json_schema", None),),
        "grammar": (is_one_of("json_schema", None), is_one_of("regex", None)),
    }

    max_new_tokens: int | None = None
    """maximum number of tokens to generate; default: the checkpoint's setting, otherwise 200 (in
    chat, no limit); max_length limits the default"""
    temperature: float | None = None
    """divisor of the logits before sampling; 0 always chooses the most probable token; default: the
    checkpoint's setting, otherwise 0.8 (0 for a checkpoint in Hugging Face format without
    do_sample, unless another sampling flag is given)"""
    top_k: int | None = None
    """sample only from the k most probable tokens; 0: from all tokens; default: the checkpoint's
    setting, or 0"""
    top_p: float | None = None
    """sample only from the smallest set of most probable tokens whose total probability is at least
    this; default: the checkpoint's setting, or 0.95"""
    min_p: float | None = None
    """sample only from tokens with at least this fraction of the largest probability; default: the
    checkpoint's setting, or 0"""
    seed: int = 0
    """random seed for sampling"""
    repetition_penalty: float | None = None
    """penalty on tokens that occur in the prompt or the generated text: divides their positive
    logits and multiplies their negative logits; default: the checkpoint's setting, or 1"""
    frequency_penalty: float | None = None
    """subtract this from the logit of a token for each time that it was generated; default: the
    checkpoint's setting, or 0"""
    presence_penalty: float | None = None
    """subtract this from the logit of a token that was generated before; default: the checkpoint's
    setting, or 0"""
    no_repeat_ngram_size: int | None = None
    """generate no sequence of this many tokens that already occurs in the prompt or the generated
    text; 0 turns this off; default: the checkpoint's setting, or 0"""
    min_new_tokens: int | None = None
    """generate at least this many tokens; default: the checkpoint's setting, or 0"""
    stop: Texts = ()
    """generation stops at this text, which is left out of the output; the flag may be repeated"""
    json_schema: Path | None = None
    """file with a JSON schema; the generated text is a JSON value that fits it"""
    regex: str | None = None
    """regular expression; the whole generated text matches it"""
    grammar: Path | None = None
    """file with a grammar in the Lark syntax of llguidance; the generated text follows it"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_seed(self.seed)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        Constraints(**self.given(_CONSTRAINTS))
        if "" in self.stop:
            raise ValueError("--stop is ''; it must not be empty")

    def given(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Returns the values of the named flags that the user set."""
        return {x: getattr(self, x) for x in names if getattr(self, x) is not None}


@dataclass(frozen=True)
class TextGenerator:
    """A model with its tokenizer and its settings for generation.

    Attributes:
        model: The model.
        variables: Its packed variables.
        tokenizer: Its tokenizer.
        sampler: The sampling parameters.
        constraints: The constraints on the next token.
        stop_strings: Texts that end a generated text, or None.
        grammar: The texts that may be generated, or None for all texts.
    """

    model: "LanguageModel"
    variables: "Variables"
    tokenizer: Tokenizer
    sampler: "Sampler"
    constraints: Constraints
    stop_strings: "StopStrings | None"
    grammar: "Grammar | None"

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        key: "jax.Array",
        stop_tokens: Iterable[int],
        *,
        source: list[list[int]] | None = None,
        on_tokens: Callable[[list[list[int]]], None] | None = None,
        batch_size: int | None = None,
    ) -> "Generation":
        """Continues prompts (see `jaxformer.generate`)."""
        from jaxformer.decoding.generate import generate

        return generate(
            self.model,
            self.variables,
            prompts,
            max_new_tokens=max_new_tokens,
            sampler=self.sampler,
            key=key,
            stop_tokens=stop_tokens,
            source=source,
            constraints=self.constraints,
            stop_strings=self.stop_strings,
            grammar=self.grammar,
            on_tokens=on_tokens,
            batch_size=batch_size,
        )

    def stream(self, prompt: list[int]) -> "TextStream":
        """Returns an incremental decoder that stops before the first stop string after a prompt."""
        stream = self.tokenizer.stream(prompt)
        return stream if self.stop_strings is None else self.stop_strings.stream(stream)


def check_sampling(arguments: SamplingArguments) -> None:
    """Raises ValueError for flags that are invalid for every model, before the model is loaded."""
    from jaxformer.decoding.sampling import Sampler

    Sampler(**arguments.given(_SAMPLER))
    for path in (arguments.json_schema, arguments.grammar):
        if path is not None and not path.is_file():
            raise ValueError(f"{path}: no such file")


def make_generator(
    arguments: SamplingArguments, given: Mapping[str, Any], checkpoint: "Checkpoint"
) -> TextGenerator:
    """Builds a `TextGenerator`. Flags take precedence over the checkpoint's settings.

    Args:
        arguments: The arguments of the subcommand.
        given: The values of the arguments on the command line, by key.
        checkpoint: The checkpoint.

    Raises:
        ValueError: The model cannot generate text, or a flag is invalid or has no effect.
    """
    from jaxformer.decoding.constraints import check_supported
    from jaxformer.decoding.stop_strings import StopStrings
    from jaxformer.models.autoregressive import require_autoregressive

    model, _, tokenizer = checkpoint
    sampler = _make_sampler(model.generation, arguments.given(_SAMPLER))
    refuse_unread(replace(arguments, temperature=sampler.temperature), given)
    require_autoregressive(model)
    check_supported(model.generation)
    if tokenizer is None:
        raise ValueError(
            f"{arguments.run} has no tokenizer; the Python function jaxformer.generate takes ids"
        )
    constraints = replace(model.generation.constraints, **arguments.given(_CONSTRAINTS))
    stop = StopStrings(tokenizer, arguments.stop) if arguments.stop else None
    grammar = _read_grammar(arguments, tokenizer)
    packed = checkpoint.packed()
    return TextGenerator(model, packed, tokenizer, sampler, constraints, stop, grammar)


def _make_sampler(defaults: GenerationDefaults, given: dict[str, Any]) -> "Sampler":
    """Builds the `Sampler` from a checkpoint's settings and the flags."""
    from jaxformer.decoding.sampling import Sampler, default_sampler

    if defaults.do_sample is None:
        return replace(Sampler(0.8, top_p=0.95), **given)
    if given and "temperature" not in given:
        # --top-k, --top-p and --min-p imply sampling.
        defaults = replace(defaults, do_sample=True)
    return replace(default_sampler(defaults), **given)


def _read_grammar(arguments: SamplingArguments, tokenizer: Tokenizer) -> "Grammar | None":
    """Returns the grammar of --json-schema, --regex or --grammar, or None."""
    from jaxformer.decoding.grammars import json_schema, lark_grammar, regular_expression

    if arguments.regex is not None:
        return regular_expression(tokenizer, arguments.regex)
    path = arguments.json_schema or arguments.grammar
    if path is None:
        return None
    try:
        text = read_text(path)
        if path == arguments.grammar:
            return lark_grammar(tokenizer, text)
        return json_schema(tokenizer, parse_json(text))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def room_for_answer(
    prompt_tokens: int, max_new_tokens: int | None, max_length: int, usual: int
) -> int:
    """Returns the number of tokens to generate.

    Args:
        prompt_tokens: Number of tokens of the prompt.
        max_new_tokens: The value of --max-new-tokens. If None, the function returns `usual`, but at
            most the number of tokens that `max_length` allows.
        max_length: The model's maximum number of tokens.
        usual: The number of tokens to generate by default.

    Raises:
        ValueError: The prompt and the new tokens exceed `max_length`.
    """
    room = max_length - prompt_tokens
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens, which leaves no room for new ones: this "
            f"model's max_length is {max_length}; shorten the prompt, or add --truncate-prompt to "
            "drop its beginning"
        )
    if max_new_tokens is None:
        return min(usual, room)
    if not 1 <= max_new_tokens <= room:
        raise ValueError(
            f"--max-new-tokens is {max_new_tokens}, but it must be 1 to {room}: the prompt has "
            f"{prompt_tokens} tokens, and this model's max_length is {max_length}; "
            "--truncate-prompt drops the beginning of the prompt"
        )
    return max_new_tokens
