"""`jaxformer explain RUN TEXT -o page.html`: writes a page about a model and a text."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from jaxformer.artifacts.files import next_free
from jaxformer.cli.arguments import parse
from jaxformer.cli.checkpoints import DecodingArguments, load_model, report_special
from jaxformer.cli.flags import OutFile, check_out, positional
from jaxformer.models.config.needs import Needs, Spelling, is_one_of
from jaxformer.terminal import say

# For pages of at least this size in bytes, the command says why the page is large.
LARGE_PAGE = 8_000_000


@dataclass(frozen=True)
class ExplainArguments(DecodingArguments):
    """Write an interactive page about a model and a text, as one HTML file.

    The page shows attention, predictions after each layer, norms, dependencies and decoding. The
    file works offline. For a model of at most 30 million parameters, the page contains
    the weights and runs the model in the browser. The reader can then edit tokens and ablate heads.
    Such a page takes up to 40 MB.
    """

    needs: ClassVar[Needs] = {"ignore_generation_config": (is_one_of("target", None),)}

    text: Annotated[str, positional("TEXT")]
    """text to show; for models that translate, the source"""
    out: OutFile = None
    """the .html file to write; an existing file is replaced; default: page.html, or page-2.html,
    … if that exists"""
    target: str | None = None
    """for models that translate, the text of the decoder; default: the model's own translation"""

    compare: Annotated[str | None, Spelling(placeholder="RUN2")] = None
    """a second model, which an additional tab compares with the first one on the same text; both
    models must have the same tokenizer"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        if not self.text:
            raise ValueError("text is empty; give at least one character")
        check_out(self.out, ".html")


def main(argv: list[str]) -> int:
    """Loads the model, computes the page and writes it."""
    arguments = parse(ExplainArguments, "explain", argv)
    with load_model(arguments) as (model, variables, tokenizer), _second(arguments) as second:
        from jaxformer.interpret import explain
        from jaxformer.interpret.page_compare import Compared
        from jaxformer.interpret.page_weights import num_parameters

        if tokenizer is None:
            raise ValueError(
                f"{arguments.run} has no tokenizer; the Python function "
                "jaxformer.interpret.explain takes ids"
            )
        if arguments.ignore_generation_config and not model.config.reads_source:
            raise ValueError(
                "--ignore-generation-config has no effect here; it needs a model that translates, "
                "because it changes only how the translation is generated"
            )
        report_special(tokenizer, "the text", [arguments.text, "\n", arguments.target or ""])
        options: dict[str, Any] = {"target": arguments.target, "title": _title(arguments.run)}
        if arguments.compare is not None:
            options["compare"] = Compared(second, _title(arguments.compare))
        page = explain(model, variables, arguments.text, tokenizer, **options)
    path = page.write(arguments.out or next_free(Path(), "page", ".html"))
    say(f"{path}: {page.num_bytes / 1e6:.1f} MB, {page.num_tokens} tokens; open it in a browser")
    if page.reason is None:
        say("live: the page contains the weights and runs the model in the browser")
        if page.num_bytes > LARGE_PAGE:
            size = num_parameters(variables["params"])
            say(
                f"large: the page holds {size:,} weights, rounded to 8 bits each; it takes a few "
                "seconds to open"
            )
    else:
        say(f"captured: the page shows values that JAX computed, because {page.reason}")
    return 0


def _second(arguments: ExplainArguments) -> Any:
    """Returns a context manager that yields the model of --compare, or None without --compare."""
    if arguments.compare is None:
        return nullcontext()
    # The second model does not generate text, so its generation options have no effect.
    return load_model(replace(arguments, run=arguments.compare, ignore_generation_config=()))


def _title(run: str) -> str:
    """Returns the name of a model on the page."""
    return Path(run).name or run
