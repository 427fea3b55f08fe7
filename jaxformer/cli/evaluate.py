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
from jaxformer.models.config.needs import Needs, flag_of, is_given, is_one_of
from jaxformer.terminal import say
from jaxformer.training.data.records import has_records

if TYPE_CHECKING:
    from jaxformer.models.language_model import LanguageModel, Variables
    from jaxformer.training.config import TrainingConfig
    from jaxformer.training.data.corpus import Documents
    from jaxformer.training.data.pairs import Pair
    from jaxformer.training.screen import Screen

BATCH_SIZE = 16
Scored = tuple[dict[str, Any], list[str]]  # the scores, and the lines that are printed


@dataclass(frozen=True)
class EvaluateArguments(DecodingArguments):
    """Score a model on files.

    Language models: loss and bits per byte of the text, compared with gzip -9 and xz -9e. Encoders:
    loss and accuracy on masked tokens of the text. Models that translate: loss of the target
    sentences, and BLEU of the model's translations of the source sentences.
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
    """field or column of .jsonl and .parquet files that holds the text; None: the run's setting, or
    text"""
    source: Path | None = None
    """for models that translate: a file with one source sentence per line, or a .tsv or .jsonl file
    with both sides; may be .gz"""
    target: Path | None = None
    """for models that translate: a file with the translation of each line of --source"""
    stride: int | None = None
    """tokens between the starts of successive windows; None: half of max_length"""
    beam_width: int | None = None
    """for models that translate: beam width of the translations that BLEU scores; 1: greedy
    decoding; None: the checkpoint's setting, or 4, as in translate and in training"""
    bleu_tokenize: str | None = None
    """for models that translate: tokenizer of sacrebleu, such as zh for Chinese; None: the run's
    setting, or 13a"""
    batch_size: int | None = None
    """windows of text per batch; None: 16, or fewer if they have more than 16,384 tokens"""
    score_first_token: Switch = False
    """score the first token of each document too, after the beginning- or end-of-text token;
    without this flag, as in transformers, only if the model's tokenizer puts a token before a
    text"""
    json: Switch = False
    """print one JSON object and nothing else"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_at_least(1, self, "batch_size", "beam_width", "stride")

    @cached_property
    def trained(self) -> "TrainingConfig | None":
        """The settings of the run; None if RUN is not a run folder."""
        from jaxformer.training.run_folders import read_run

        folder = RunFolder(self.run)
        return read_run(folder)[1] if folder.checkpoints.is_dir() else None

    @property
    def metric(self) -> str | None:
        """The name of BLEU's tokenizer: that of the flag, or else of the run."""
        return self.bleu_tokenize or getattr(self.trained, "bleu_tokenize", None)


class Loaded(NamedTuple):
    """A model to score, the arguments, and the screen that shows the progress."""

    model: "LanguageModel"
    variables: "Variables"
    tokenizer: Tokenizer
    arguments: EvaluateArguments
    screen: "Screen"

    @property
    def batch_size(self) -> int:
        """Number of windows of a batch."""
        from jaxformer.decoding.batches import rows_within

        most = rows_within(self.model.config.max_length)
        return self.arguments.batch_size or min(BATCH_SIZE, most)


def main(argv: list[str]) -> int:
    """Loads the model, scores it on the files and prints the scores."""
    arguments = parse(EvaluateArguments, "evaluate", argv)
    given = _read(arguments)

    with load_model(arguments) as checkpoint:
        from jaxformer.training.screen import Screen

        model, variables, tokenizer = checkpoint
        if tokenizer is None:
            raise ValueError(f"{arguments.run} has no tokenizer; evaluate scores text")
        report_special(tokenizer, "the text", _parts(given))
        screen = Screen(stderr=True, quiet=arguments.json)
        loaded = Loaded(model, variables, tokenizer, arguments, screen)
        found, lines = _scorer(model, arguments)(loaded, given)
    report = json_text(found)  # also without --json: it raises for figures that are not finite
    say(report if arguments.json else "\n".join(lines))
    return 0


def _read(arguments: EvaluateArguments) -> "Documents | list[Pair]":
    """Returns the documents or the pairs. It runs before the model is loaded."""
    if arguments.source:
        from jaxformer.training.data.pairs import read_pairs
        from jaxformer.training.evaluate import bleu_metric

        if arguments.files:
            raise ValueError(
                f"FILE ({arguments.files[0]}) and --source were given; only one of them is accepted"
            )
        bleu_metric(arguments.metric)  # raises for an unknown name
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
    """Returns the text of the documents or of both sides of the pairs, in parts."""
    from jaxformer.training.data.documents import text_parts

    if isinstance(given, list):
        return (f"{side}\n" for pair in given for side in pair)
    return text_parts(given)


def _scorer(
    model: "LanguageModel", arguments: EvaluateArguments
) -> Callable[[Loaded, Any], Scored]:
    """Returns the function that scores this kind of model.

    Raises:
        ValueError: The arguments do not match the kind, or such models cannot be scored.
    """
    from jaxformer.models.autoregressive import require_autoregressive
    from jaxformer.models.config import kind_of

    translates = model.config.reads_source
    if translates != (arguments.source is not None):
        wanted = "--source and --target" if translates else "FILE"
        kind = kind_of(model.config)
        raise ValueError(f"{arguments.run} is of kind {kind}; give {wanted} to score it")
    if translates:
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
    if not opening:  # the first token of each document is context only
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
    from jaxformer.training.config import HiddenTraining
    from jaxformer.training.evaluate import (
        hidden_rows,
        most_frequent,
        score_hidden,
        spread,
    )

    model, variables, tokenizer, arguments, screen = loaded
    for name in ("stride", "score_first_token"):
        if getattr(arguments, name):
            raise ValueError(
                f"{flag_of(name)} has no effect here; it needs a model that predicts next tokens, "
                f"and {arguments.run} predicts masked tokens"
            )
    if tokenizer.mask_token is None:
        raise ValueError(
            f"{arguments.run}: its tokenizer has no mask token, which scoring an encoder needs"
        )
    masking: dict[str, Any] = {}
    if isinstance(trained := arguments.trained, HiddenTraining):
        masking = {"rate": trained.mask_rate, "seed": trained.seed}
    rows = hidden_rows(
        tokenizer.encode_many(document.text for document in documents),
        tokenizer,
        model.config.max_length,
        **masking,
    )
    (frequent,) = most_frequent(rows).values()
    with screen.count(sum(map(num_targets, rows)), "scoring", "tokens") as scored:
        batches = spread(rows, len(rows), loaded.batch_size)
        score = score_hidden(model, variables, batches, scored)
    return {**score._asdict(), "documents": len(documents), "most_frequent": frequent}, [
        f"{len(documents)} documents, {score.tokens:,} masked tokens",
        f"loss           {score.loss:.4f} nats per masked token",
        f"accuracy       {score.accuracy:.4f} (the most frequent token alone: {frequent:.4f})",
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
            raise ValueError(f"line {number}: one side has no tokens")
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
