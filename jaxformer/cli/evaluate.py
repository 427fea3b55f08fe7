"""`jaxformer evaluate RUN FILE…`: how well a run does on text, or on pairs, that it is given."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.arguments import parse
from jaxformer.cli.opened import RunArguments, opened

BATCH_SIZE = 16


@dataclass(frozen=True)
class EvaluateArguments(RunArguments):
    """How well a run predicts files: every byte counted once, beside gzip -9 and xz -9e.

    Of an encoder: tokens that are hidden in the files. Of a model that translates: the loss of
    targets, and BLEU of its translations of sources.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE…")] = ()
    """files or folders of UTF-8 text; each file is one document"""
    text_field: str | None = None
    """of records (.jsonl, .parquet), the field or column that has the text; None: the run's"""
    source: Path | None = None
    """for a model that translates: sentences, or a .tsv or .jsonl of both sides; may be .gz"""
    target: Path | None = None
    """their translations, line by line"""
    stride: int | None = None
    """tokens between the starts of successive windows; None: half of max_length"""
    beam_width: int | None = None
    """for a model that translates: hypotheses that are kept; None: 1, greedy"""
    batch_size: int | None = None
    """windows of text that are scored at once; None: 16"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object and nothing else"""

    def __post_init__(self):
        for name in ("batch_size", "beam_width", "stride"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        pairs = self.source is not None
        for name in ("text_field", "stride", "batch_size") if pairs else ("target", "beam_width"):
            if getattr(self, name) is not None:
                fits = "text" if pairs else "pairs, which --source names"
                raise ValueError(f"--{name.replace('_', '-')} was given; it is for {fits}")


def main(argv: list[str]) -> int:
    """Load, score, print."""
    arguments = parse(EvaluateArguments, "evaluate", argv)
    given = _read(arguments)

    with opened(arguments) as checkpoint:
        from jaxformer.training.screen import Screen

        if checkpoint.tokenizer is None:
            raise ValueError(f"{arguments.run} has no tokenizer; evaluate scores text")
        screen = Screen(stderr=True, quiet=arguments.json)
        found, lines = _scorer(checkpoint.model, arguments)(checkpoint, given, arguments, screen)
    print("\n".join([json.dumps(found)] if arguments.json else lines))
    return 0


def _read(arguments: EvaluateArguments):
    """The documents or the pairs, before anything is loaded."""
    if arguments.source:
        from jaxformer.training.data.parallel import read_pairs

        if arguments.files:
            raise ValueError(f"FILE ({arguments.files[0]}) and --source were given; one is scored")
        return read_pairs(arguments.source, arguments.target)
    if not arguments.files:
        raise ValueError("FILE is missing; name at least one file or folder to score")
    from jaxformer.training.data.corpus import read_documents

    field = arguments.text_field or getattr(run_config(arguments.run), "text_field", "text")
    documents, left_out = read_documents(arguments.files, field, drop_copies=False)
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    return documents


def _scorer(model, arguments: EvaluateArguments):
    """How this kind of model is scored; ValueError if that is not what was given."""
    from jaxformer.decoding.protocol import require_autoregressive
    from jaxformer.models.config import EncoderConfig, kind_of
    from jaxformer.models.config.encoder_decoder import ReadsSource

    translates = isinstance(model.config, ReadsSource)
    if translates != (arguments.source is not None):
        wanted = "--source and --target" if translates else "FILE"
        kind = kind_of(model.config)
        raise ValueError(f"{arguments.run} is of kind {kind}; give {wanted} to score it")
    if translates:
        return _pairs
    if isinstance(model.config, EncoderConfig):
        return _hidden
    require_autoregressive(model)
    return _text


def _text(checkpoint, documents, arguments: EvaluateArguments, screen):
    from jaxformer.training.data.held_out import baselines
    from jaxformer.training.evaluate import evaluate_documents

    model, variables, tokenizer = checkpoint
    encoded = tokenizer.encode_many(document.text for document in documents)
    with screen.count(sum(map(len, encoded)), "scoring", "tokens") as scored:
        score = evaluate_documents(
            model,
            variables,
            [[*tokenizer.opening, *ids] for ids in encoded],
            sum(document.num_bytes for document in documents),
            stride=arguments.stride,
            batch_size=arguments.batch_size or BATCH_SIZE,
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


def _hidden(checkpoint, documents, arguments: EvaluateArguments, screen):
    from jaxformer.training.evaluate import spread
    from jaxformer.training.hidden import hidden_rows, most_frequent, score_hidden

    model, variables, tokenizer = checkpoint
    if tokenizer.mask_token is None:
        raise ValueError(f"{arguments.run}: its tokenizer has no mask to hide tokens by")
    trained = run_config(arguments.run)  # the same tokens are hidden as while it was trained
    how = {} if trained is None else {"rate": trained.mask_rate, "seed": trained.seed}
    rows = hidden_rows(
        tokenizer.encode_many(document.text for document in documents),
        tokenizer.mask_token,
        model.config.max_length,
        before=tokenizer.before,
        after=tokenizer.after,
        **how,
    )
    (frequent,) = most_frequent(rows).values()
    with screen.count(int(sum(row.weights.sum() for row in rows)), "scoring", "tokens") as scored:
        batches = spread(rows, len(rows), arguments.batch_size or BATCH_SIZE)
        score = score_hidden(model, variables, batches, scored)
    return {**score._asdict(), "documents": len(documents), "most_frequent": frequent}, [
        f"{len(documents)} documents, {score.tokens:,} tokens hidden",
        f"loss           {score.loss:.4f} nats per hidden token",
        f"accuracy       {score.accuracy:.4f} (always the most frequent token: {frequent:.4f})",
    ]


def _pairs(checkpoint, pairs, arguments: EvaluateArguments, screen):
    from jaxformer.training.bleu import score_pairs

    model, variables, tokenizer = checkpoint
    encoded = [
        (tokenizer.encode_source(source), tokenizer.encode(target)) for source, target in pairs
    ]
    longest = model.config.max_source_length
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
            [target for _, target in pairs],
            beam_width=arguments.beam_width or 1,
            on_scored=scored,
        )
    found = {"loss": score.loss, "perplexity": math.exp(min(score.loss, 700))}
    found |= {"bleu": score.bleu.score, "signature": score.bleu.signature}
    return {**found, "tokens": score.tokens, "pairs": len(pairs)}, [
        f"{len(pairs)} pairs, {score.tokens:,} target tokens",
        f"loss           {score.loss:.4f} nats per token",
        f"perplexity     {found['perplexity']:.3f}",
        f"BLEU           {score.bleu.score:.2f} ({score.bleu.signature})",
    ]


def run_config(run: str):
    """The `TrainingConfig` of a run; None: it is a folder of another sort."""
    from jaxformer.training.run_config import read_run

    folder = RunFolder(run)
    return read_run(folder)[1] if folder.checkpoints.is_dir() else None
