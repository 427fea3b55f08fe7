"""`jaxformer evaluate RUN FILE…`: how well a run does on text, or on pairs, that it is given."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.arguments import parse
from jaxformer.cli.opened import RunArguments, opened


@dataclass(frozen=True)
class EvaluateArguments(RunArguments):
    """How well a run predicts files: every byte counted once, beside gzip -9 and xz -9e.

    Of an encoder: tokens that are hidden in the files. Of a model that translates: the loss of
    targets, and BLEU of its translations of sources.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE…")] = ()
    """files or folders of UTF-8 text; each file is one document"""
    source: Path | None = None
    """for a model that translates: sentences, or a .tsv or .jsonl of both sides; may be .gz"""
    target: Path | None = None
    """what they are to become, line by line"""
    stride: int | None = None
    """tokens between the starts of successive windows; None: half of max_length"""
    beam_width: int = 1
    """hypotheses that are kept while translating; 1: greedy"""
    batch_size: int = 16
    """windows that are scored at once"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object and nothing else"""

    def __post_init__(self):
        for name in ("batch_size", "beam_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


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

    return read_documents(arguments.files)[0]


def _scorer(model, arguments: EvaluateArguments):
    """How this kind of model is scored; ValueError if that is not what was given."""
    from jaxformer.decoding.protocol import require_autoregressive
    from jaxformer.models.config import EncoderConfig
    from jaxformer.models.config.encoder_decoder import ReadsSource

    translates = isinstance(model.config, ReadsSource)
    if translates != (arguments.source is not None):
        wanted = "--source and --target" if translates else "FILE"
        raise ValueError(f"{arguments.run} is a {type(model).__name__}; give {wanted} to score it")
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
            batch_size=arguments.batch_size,
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
    rows = hidden_rows(
        tokenizer.encode_many(document.text for document in documents),
        tokenizer.mask_token,
        model.config.max_length,
        before=tokenizer.before,
        after=tokenizer.after,
    )
    (frequent,) = most_frequent(rows).values()
    with screen.count(int(sum(row.weights.sum() for row in rows)), "scoring", "tokens") as scored:
        batches = spread(rows, len(rows), arguments.batch_size)
        score = score_hidden(model, variables, batches, scored)
    return {**score._asdict(), "documents": len(documents), "most_frequent": frequent}, [
        f"{len(documents)} documents, {score.tokens:,} tokens hidden",
        f"loss           {score.loss:.4f} nats per hidden token",
        f"accuracy       {score.accuracy:.4f} (always the most frequent token: {frequent:.4f})",
    ]


def _pairs(checkpoint, pairs, arguments: EvaluateArguments, screen):
    from jaxformer.training.bleu import score_pairs

    model, variables, tokenizer = checkpoint
    lowercase = is_lowercase(arguments.run)
    texts = [[side.lower() if lowercase else side for side in pair] for pair in pairs]
    encoded = [
        (tokenizer.encode_source(source), tokenizer.encode(target)) for source, target in texts
    ]
    total = sum(len(target) + 1 for _, target in encoded)
    with screen.count(total, "scoring", "tokens") as scored:
        score = score_pairs(
            model,
            variables,
            tokenizer,
            encoded,
            lowercase=lowercase,
            beam_width=arguments.beam_width,
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


def is_lowercase(run: str) -> bool:
    """Whether the model of a run has learnt from text in lower case."""
    from jaxformer.training.config import PairTraining
    from jaxformer.training.run_config import read_run

    folder = RunFolder(run)
    if not folder.checkpoints.is_dir():
        return False
    _, config = read_run(folder)
    return isinstance(config, PairTraining) and config.lowercase
