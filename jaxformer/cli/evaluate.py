"""`jaxformer evaluate RUN FILE…`: scores a model on text or on pairs of sentences."""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from jaxformer.artifacts.files import json_text
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.cli.arguments import parse
from jaxformer.cli.checkpoints import DecodingArguments, load_model, report_special
from jaxformer.cli.flags import Switch, positional
from jaxformer.models.config.check import check_at_least
from jaxformer.models.config.needs import Needs, is_given, is_one_of, spell_flag
from jaxformer.terminal import say
from jaxformer.training.data.records import has_records

if TYPE_CHECKING:
    from jaxformer.models.language_model import LanguageModel, Variables
    from jaxformer.training.config import TrainingConfig
    from jaxformer.training.data.corpus import Documents
    from jaxformer.training.data.pairs import Pair
    from jaxformer.training.screen import Screen

BATCH_SIZE = 16
# The scores by name, and the lines that report them.
Scored = tuple[dict[str, Any], list[str]]


@dataclass(frozen=True)
class EvaluateArguments(DecodingArguments):
    """Score a model on files.

    For a language model, the scores are the loss and the bits per byte of the text, compared with
    gzip -9 and xz -9e. For an encoder, the scores are the loss and the accuracy on masked tokens of
    the text. For a model that translates, the scores are the loss of the target sentences, and the
    BLEU of the model's translations.
    """

    needs: ClassVar[Needs] = {
        "text_field": (is_one_of("source", None), has_records("files")),
        "stride": (is_one_of("source", None),),
        "batch_size": (is_one_of("source", None),),
        "score_first_token": (is_one_of("source", None),),
        "ignore_generation_config": (is_given("source"),),
        "target": (is_given("source"),),
        "beam_width": (is_given("source"),),
        "bleu_tokenize": (is_given("source"),),
    }

    files: Annotated[tuple[Path, ...], positional("FILE…")] = ()
    """files or folders of UTF-8 text; each file is one document"""
    text_field: str | None = None
    """field or column of .jsonl and .parquet files that holds the text; default: the run's setting,
    or text"""
    source: Path | None = None
    """for models that translate: a file with one source sentence per line, or a .tsv or .jsonl file
    with both sides; may be .gz"""
    target: Path | None = None
    """for models that translate: a file with the translation of each line of --source"""
    stride: int | None = None
    """distance in tokens between the starts of successive windows; default: half of max_length"""
    beam_width: int | None = None
    """for models that translate: beam width of the translations that BLEU scores; 1: greedy
    decoding; default: the checkpoint's setting, or 4, as in translate and in training"""
    bleu_tokenize: str | None = None
    """for models that translate: tokenizer of sacrebleu, such as zh for Chinese; default: the run's
    setting, or 13a"""
    batch_size: int | None = None
    """windows of text per batch; default: 16, or fewer to keep a batch within 16,384 tokens"""
    score_first_token: Switch = False
    """also score the first token of each document, after a beginning-of-text or end-of-text token;
    without this flag, the first token is scored only if the tokenizer puts a token before each
    text, as in transformers"""
    json: Switch = False
    """print one JSON object and nothing else"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_at_least(1, self, "batch_size", "beam_width", "stride")

    @cached_property
    def trained(self) -> "TrainingConfig | None":
        """The training settings of the run, or None if RUN is not a run folder."""
        from jaxformer.training.run_folders import read_run

        folder = RunFolder(self.run)
        return read_run(folder)[1] if folder.checkpoints.is_dir() else None

    @property
    def metric(self) -> str | None:
        """The name of BLEU's tokenizer, from the flag or else from the run's training settings."""
        return self.bleu_tokenize or getattr(self.trained, "bleu_tokenize", None)


class Loaded(NamedTuple):
    """A loaded model, the arguments of `evaluate`, and the screen that shows the progress."""

    model: "LanguageModel"
    variables: "Variables"
    tokenizer: Tokenizer
    arguments: EvaluateArguments
    screen: "Screen"

    @property
    def batch_size(self) -> int:
        """The number of windows per batch."""
        from jaxformer.decoding.batches import batch_size_for_width

        most = batch_size_for_width(self.model.config.max_length)
        return self.arguments.batch_size or min(BATCH_SIZE, most)


def main(argv: list[str]) -> int:
    """Loads the model, scores it on the files and prints the scores."""
    arguments = parse(EvaluateArguments, "evaluate", argv)
    given = _read(arguments)

    with load_model(arguments) as checkpoint:
        from jaxformer.training.screen import Screen

        model, variables, tokenizer = checkpoint
        if tokenizer is None:
            raise ValueError(f"{arguments.run} has no tokenizer, which `jaxformer evaluate` needs")
        report_special(tokenizer, "the text", _parts(given))
        screen = Screen(stderr=True, quiet=arguments.json)
        loaded = Loaded(model, variables, tokenizer, arguments, screen)
        found, lines = _scorer(model, arguments)(loaded, given)
    # `json_text` is called even without --json, because it raises an error for a score that is not
    # finite.
    report = json_text(found)
    say(report if arguments.json else "\n".join(lines))
    return 0


def _read(arguments: EvaluateArguments) -> "Documents | list[Pair]":
    """Reads the documents or the pairs, before the model is loaded."""
    if arguments.source:
        from jaxformer.training.data.pairs import read_pairs
        from jaxformer.training.evaluate import bleu_metric

        if arguments.files:
            raise ValueError(
                f"FILE ({arguments.files[0]}) and --source were given; only one of them is accepted"
            )
        bleu_metric(arguments.metric)  # This raises an error for an unknown name.
        return read_pairs(arguments.source, arguments.target)
    if not arguments.files:
        raise ValueError(
            "FILE is missing; give files or folders of text or, for a model that translates, "
            "--source"
        )
    from jaxformer.training.data.corpus import read_documents

    field = arguments.text_field or getattr(arguments.trained, "text_field", "text")
    documents, left_out = read_documents(arguments.files, field, drop_copies=False)
    for line in left_out:
        say(f"left out: {line}", file=sys.stderr)
    if (divided := documents.separators()) is not None:
        say(divided, file=sys.stderr)
    return documents


def _parts(given: "Documents | list[Pair]") -> Iterable[str]:
    """Yields the text of the documents as successive strings, or both sides of each pair."""
    from jaxformer.training.data.documents import text_parts

    if isinstance(given, list):
        return (f"{side}\n" for pair in given for side in pair)
    return text_parts(given)


def _scorer(
    model: "LanguageModel", arguments: EvaluateArguments
) -> Callable[[Loaded, Any], Scored]:
    """Returns the function that scores this model.

    Raises:
        ValueError: The arguments do not match the model's architecture, or models of this
            architecture cannot be scored.
    """
    from jaxformer.models.autoregressive import require_autoregressive
    from jaxformer.models.config import architecture_name
    from jaxformer.models.config.encoder import check_reads_text

    translates = model.config.reads_source
    if translates != (arguments.source is not None):
        wanted = "--source and --target" if translates else "FILE"
        kind = architecture_name(model.config)
        raise ValueError(
            f"{arguments.run} has a model of the architecture {kind}; give {wanted} to score it"
        )
    if translates:
        check_reads_text(model.config)
        return _pairs
    if model.config.bidirectional:
        return _hidden
    require_autoregressive(model)
    return _text


def _text(loaded: Loaded, documents: "Documents") -> Scored:
    from jaxformer.training.data.split import baselines
    from jaxformer.training.evaluate import evaluate_documents

    model, variables, tokenizer, arguments, screen = loaded
    opening = tokenizer.opening if arguments.score_first_token else tokenizer.text_opening
    encoded = tokenizer.encode_many(document.text for document in documents)
    num_bytes = sum(document.num_bytes for document in documents)
    if not opening:  # The first token of each document is not scored.
        num_bytes -= sum(len(tokenizer.decode(ids[:1]).encode()) for ids in encoded)
        encoded = [ids for ids in encoded if len(ids) > 1]
        if not encoded:
            raise ValueError("the text has no token to score; see --score-first-token")
    with screen.count(sum(map(len, encoded)), "scoring", "tokens") as scored:
        score = evaluate_documents(
            model,
            variables,
            [[*opening, *ids] for ids in encoded],
            num_bytes,
            stride=arguments.stride,
            batch_size=loaded.batch_size,
            on_scored=scored,
        )
    compressors = baselines(documents)
    return {**score._asdict(), "documents": len(documents), **compressors}, [
        f"{len(documents)} documents, {score.bytes:,} bytes, {score.tokens:,} tokens",
        f"loss           {score.loss:.4f} nats per token",
        f"perplexity     {score.perplexity:.3f}",
        f"bits per byte  {score.bits_per_byte:.4f}",
        *(f"{name:14} {value:.4f} bits per byte" for name, value in compressors.items()),
    ]


def _hidden(loaded: Loaded, documents: "Documents") -> Scored:
    from jaxformer.training.batch import num_targets
    from jaxformer.training.config import MaskedTokensTraining
    from jaxformer.training.evaluate import (
        masked_windows,
        most_frequent,
        score_masked_tokens,
        spread,
    )

    model, variables, tokenizer, arguments, screen = loaded
    for name in ("stride", "score_first_token"):
        if getattr(arguments, name):
            raise ValueError(
                f"{spell_flag(name)} has no effect here; it needs a model that predicts next "
                f"tokens, and {arguments.run} predicts masked tokens"
            )
    if tokenizer.mask_token is None:
        raise ValueError(
            f"{arguments.run}: its tokenizer has no mask token, which scoring an encoder needs"
        )
    masking: dict[str, Any] = {}
    if isinstance(trained := arguments.trained, MaskedTokensTraining):
        masking = {"rate": trained.mask_rate, "seed": trained.seed}
    windows = masked_windows(
        tokenizer.encode_many(document.text for document in documents),
        tokenizer,
        model.config.max_length,
        **masking,
    )
    (frequent,) = most_frequent(windows).values()
    with screen.count(sum(map(num_targets, windows)), "scoring", "tokens") as scored:
        batches = spread(windows, len(windows), loaded.batch_size)
        score = score_masked_tokens(model, variables, batches, scored)
    return {**score._asdict(), "documents": len(documents), "most_frequent": frequent}, [
        f"{len(documents)} documents, {score.tokens:,} masked tokens",
        f"loss           {score.loss:.4f} nats per masked token",
        f"accuracy       {score.accuracy:.4f} (always predicting the most frequent token: "
        f"{frequent:.4f})",
    ]


def _pairs(loaded: Loaded, pairs: "list[Pair]") -> Scored:
    from jaxformer.decoding.constraints import check_supported
    from jaxformer.training.evaluate import score_pairs

    model, variables, tokenizer, arguments, screen = loaded
    check_supported(model.generation)
    targets = [target for _, target in pairs]
    sources = [tokenizer.encode_source(source) for source, _ in pairs]
    encoded = list(zip(sources, tokenizer.encode_many(targets), strict=True))
    longest = model.config.longest_source
    for number, (source, target) in enumerate(encoded, 1):
        if not source or not target:
            raise ValueError(f"line {number}: the source or the target has no tokens")
        if len(source) > longest:
            raise ValueError(
                f"line {number} of the sources has {len(source)} tokens; this model's "
                f"max_source_length is {longest}"
            )
    long = sum(len(target) >= model.config.max_length for _, target in encoded)
    if long == len(encoded):
        raise ValueError(f"every target is longer than max_length ({model.config.max_length})")
    if long:
        screen.say(
            f"{long} of {len(encoded)} targets are longer than max_length "
            f"({model.config.max_length}); BLEU counts them, the loss does not"
        )
    total = sum(len(target) + 1 for _, target in encoded)
    with screen.count(total, "scoring", "tokens") as scored:
        score = score_pairs(
            model,
            variables,
            tokenizer,
            encoded,
            targets,
            beam_width=arguments.beam_width,
            bleu_tokenize=arguments.metric,
            on_scored=scored,
        )
    perplexity, bleu = math.exp(min(score.loss, 700)), score.bleu
    figures = {"loss": score.loss, "perplexity": perplexity, "bleu": bleu.score}
    figures |= {"signature": bleu.signature, "tokens": score.tokens, "pairs": len(pairs)}
    return figures, [
        f"{len(pairs)} pairs, {score.tokens:,} target tokens",
        f"loss           {score.loss:.4f} nats per token",
        f"perplexity     {perplexity:.3f}",
        f"BLEU           {bleu.score:.2f} ({bleu.signature})",
    ]
