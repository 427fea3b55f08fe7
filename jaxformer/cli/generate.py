"""`jaxformer generate RUN TEXT`: continues a prompt and prints each token when it is generated."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.cli.arguments import complete, read_given, refuse_unread
from jaxformer.cli.checkpoints import DecodingArguments, load_model, report_special
from jaxformer.cli.flags import positional
from jaxformer.models.config.encoder import check_reads_text
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.needs import Needs, is_above
from jaxformer.terminal import write
from jaxformer.training.config import check_seed

if TYPE_CHECKING:
    from jaxformer.decoding.sampling import Sampler
    from jaxformer.models.language_model import LanguageModel


@dataclass(frozen=True)
class GenerateArguments(DecodingArguments):
    """Print a prompt and its continuation.

    For a model that translates, the prompt is the source, and only the translation is printed. The
    same seed gives the same text.
    """

    needs: ClassVar[Needs] = dict.fromkeys(
        ("top_k", "top_p", "min_p", "seed"), (is_above("temperature", 0),)
    )

    prompt: Annotated[str, positional("TEXT")] = ""
    """text to continue or, for models that translate, the source; default: start a new document"""
    max_new_tokens: int | None = None
    """maximum number of tokens to generate; default: the checkpoint's setting, or 200, but never
    more than fit into max_length"""
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

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_seed(self.seed)

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `Sampler` that flags set."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return {x: getattr(self, x) for x in names if getattr(self, x) is not None}


def main(argv: list[str]) -> int:
    """Loads the model and prints the generated text token by token."""
    given = read_given(GenerateArguments, "generate", argv)
    arguments = complete(GenerateArguments, given)
    from jaxformer.decoding.sampling import Sampler

    # This raises an error for invalid values before the model is loaded.
    Sampler(**arguments.sampling)
    with load_model(arguments) as (model, variables, tokenizer):
        import jax

        from jaxformer.decoding.constraints import check_supported
        from jaxformer.decoding.generate import generate
        from jaxformer.models.autoregressive import require_autoregressive

        sampler = _sampler(model.generation, arguments.sampling)
        refuse_unread(replace(arguments, temperature=sampler.temperature), given)
        require_autoregressive(model)
        check_supported(model.generation)
        if tokenizer is None:
            raise ValueError(
                f"{arguments.run} has no tokenizer; the Python function "
                "jaxformer.generate takes ids"
            )
        report_special(tokenizer, "the prompt", [arguments.prompt])
        prompt, source = encode_prompt(model, tokenizer, arguments.prompt)
        stream = tokenizer.stream(prompt)
        max_length = model.config.max_length
        usual_length = model.generation.most_new_tokens(len(prompt), max_length) or 200
        max_new_tokens = fitting(len(prompt), arguments.max_new_tokens, max_length, usual_length)
        write("" if source else arguments.prompt)
        generate(
            model,
            variables,
            [prompt],
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            key=jax.random.key(arguments.seed),
            stop_tokens=tokenizer.stop_tokens,
            source=source,
            on_tokens=lambda new_tokens: write(stream.push(new_tokens[0])),
        )
        write(f"{stream.flush()}\n")
    return 0


def _sampler(defaults: GenerationDefaults, given: dict[str, Any]) -> "Sampler":
    """Builds the `Sampler` from a checkpoint's settings and the flags."""
    from jaxformer.decoding.sampling import Sampler, default_sampler

    if defaults.do_sample is None:
        return replace(Sampler(0.8, top_p=0.95), **given)
    if given and "temperature" not in given:
        # --top-k, --top-p and --min-p imply sampling.
        defaults = replace(defaults, do_sample=True)
    return replace(default_sampler(defaults), **given)


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


def fitting(prompt_tokens: int, max_new_tokens: int | None, max_length: int, usual: int) -> int:
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
            f"model's max_length is {max_length}"
        )
    if max_new_tokens is None:
        return min(usual, room)
    if not 1 <= max_new_tokens <= room:
        raise ValueError(
            f"--max-new-tokens is {max_new_tokens} and the prompt has {prompt_tokens} tokens; this "
            f"model has room for 1 to {room} more (max_length {max_length})"
        )
    return max_new_tokens
