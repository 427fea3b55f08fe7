"""`jaxformer import SOURCE OUT`: a foreign checkpoint, checked and kept in our own format."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxformer.cli.arguments import parse


@dataclass(frozen=True)
class ImportArguments:
    """Read a checkpoint in Hugging Face's format, compare it with transformers, and save it."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """a folder in Hugging Face's format, or a hub id"""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """the folder to make"""


def main(argv: list[str]) -> int:
    """Load, say what it is, compare, save."""
    arguments = parse(ImportArguments, "import", argv)
    from pathlib import Path

    from jaxformer.artifacts.tensors import require_new

    require_new(Path(arguments.out))  # before anything is read

    from jaxformer.cli.runtime import start_jax

    start_jax()
    from jaxformer.artifacts.fetch import fetched
    from jaxformer.artifacts.load import Checkpoint
    from jaxformer.artifacts.saved import read_sections, save
    from jaxformer.hub.load import foreign_folder
    from jaxformer.models.build import build, parameter_count, shape_tree

    folder = fetched(arguments.source)
    if read_sections(folder) is not None:
        raise ValueError(
            f"{arguments.source} is in this project's own format: every verb opens it as it is"
        )
    stored = foreign_folder(folder, "float32")
    model = build(stored.config)
    loaded = Checkpoint(model, {"params": stored.read(shape_tree(model))}, stored.tokenizer)
    print(f"family      {stored.family} ({stored.architecture}), a {type(model).__name__}")
    print(f"parameters  {parameter_count(model.config):,} in {stored.tensors} tensors")
    print(f"tokenizer   {_about(stored.tokenizer)}")
    _compare(folder, stored.architecture, loaded)
    save(arguments.out, *loaded, family=stored.family)
    print(f"saved       {arguments.out}")
    return 0


def _compare(folder, architecture: str, loaded) -> None:
    """Print how far apart the two are, or why that is not known: the import goes on."""
    from jaxformer.verify.parity import missing_peers, parity

    missing = missing_peers()
    if missing:
        print(f"parity      not compared: {missing} must be installed for it")
        return
    try:
        found = parity(folder, architecture, *loaded)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"parity      not compared: {error}")
        return
    print(f"parity      logits differ by {found.largest:.2e} at most, {found.mean:.2e} on average")
    if found.perplexities:
        theirs, ours = found.perplexities
        print(f"            perplexity {theirs:.4f} there, {ours:.4f} here")
        print(f"            the first {found.same_tokens} of {found.tokens} greedy tokens agree")


def _about(tokenizer) -> str:
    if tokenizer is None:
        return "none"
    return f"{tokenizer.vocab_size:,} tokens; {tokenizer.why_lossy or 'every text comes back'}"
