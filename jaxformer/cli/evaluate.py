"""`jaxformer evaluate RUN FILE…`: loss, perplexity and bits per byte over whole documents."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxformer.cli.arguments import parse


@dataclass(frozen=True)
class EvaluateArguments:
    """How well a run predicts files: every byte counted once, beside gzip -9 and xz -9e."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """a run, a saved folder, a folder in Hugging Face's format or a hub id"""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE…")]
    """files or folders of UTF-8 text; each file is one document"""
    stride: int | None = None
    """tokens between the starts of successive windows; None: half of max_length"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object and nothing else"""


def main(argv: list[str]) -> int:
    """Load, score, print."""
    arguments = parse(EvaluateArguments, "evaluate", argv)
    if not arguments.files:
        raise ValueError("FILE is missing; name at least one file or folder to score")
    from jaxformer.training.corpus import baselines, read_documents

    documents, _ = read_documents(arguments.files)

    from jaxformer.cli.runtime import start_jax

    start_jax()
    from jaxformer.hub.load import load
    from jaxformer.models.config import DecoderConfig
    from jaxformer.training.evaluate import evaluate_documents
    from jaxformer.training.screen import Screen

    model, variables, tokenizer = load(arguments.run)
    if type(model.config) is not DecoderConfig or tokenizer is None:
        lacks = "" if tokenizer else " and has no tokenizer"
        raise ValueError(
            f"{arguments.run} is a {type(model).__name__}{lacks}; evaluate scores decoders on text"
        )
    encoded = tokenizer.encode_many(document.text for document in documents)
    screen = Screen(stderr=True, quiet=arguments.json)
    with screen.count(sum(map(len, encoded)), "scoring", "tokens") as scored:
        score = evaluate_documents(
            model,
            variables,
            [[*tokenizer.opening, *ids] for ids in encoded],
            sum(document.num_bytes for document in documents),
            stride=arguments.stride,
            on_scored=scored,
        )
    compressors = baselines(documents)
    if arguments.json:
        print(json.dumps({**score._asdict(), "documents": len(documents), **compressors}))
        return 0
    print(f"{len(documents)} documents, {score.bytes:,} bytes, {score.tokens:,} tokens")
    print(f"loss           {score.loss:.4f} nats per token")
    print(f"perplexity     {score.perplexity:.3f}")
    print(f"bits per byte  {score.bits_per_byte:.4f}")
    for name, value in compressors.items():
        print(f"{name:14} {value:.4f} bits per byte")
    return 0
