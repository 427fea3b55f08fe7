"""`jaxformer import SOURCE OUT`: converts a checkpoint in Hugging Face format and checks it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxformer.artifacts.files import require_new
from jaxformer.cli.arguments import parse
from jaxformer.cli.flags import positional
from jaxformer.runtime import start_jax
from jaxformer.terminal import say

if TYPE_CHECKING:
    from jaxformer.artifacts.saved import Checkpoint
    from jaxformer.artifacts.tokenizer import Tokenizer


@dataclass(frozen=True)
class ImportArguments:
    """Read a checkpoint in Hugging Face format and save it in jaxformer's format.

    If transformers and PyTorch are installed, the model's outputs are compared with transformers'
    outputs, and the differences are printed.
    """

    source: Annotated[str, positional("SOURCE")]
    """a folder in Hugging Face format or a hub id"""
    out: Annotated[str, positional("OUT")]
    """the folder to create"""


def main(argv: list[str]) -> int:
    """Loads the checkpoint, prints a summary, compares it with transformers and saves it."""
    arguments = parse(ImportArguments, "import", argv)
    # This check precedes slow imports and file reads, so that an invalid path is reported at once.
    require_new(Path(arguments.out))

    start_jax()
    from jaxformer.artifacts.run import read_sections
    from jaxformer.artifacts.saved import Checkpoint, save
    from jaxformer.hub.huggingface import foreign_folder
    from jaxformer.hub.load import fetched
    from jaxformer.models.kinds import build
    from jaxformer.models.parameters import parameter_count, shape_tree

    folder = fetched(arguments.source)
    if read_sections(folder) is not None:
        raise ValueError(
            f"{arguments.source} is already in jaxformer's format; use it without importing it"
        )
    stored, architecture, num_tensors, num_updates = foreign_folder(folder, "float32")
    model = build(
        stored.config,
        model_type=stored.model_type,
        generation=stored.generation,
        checkpoint_dtype=stored.checkpoint_dtype,
    )
    loaded = Checkpoint(model, {"params": stored.read(shape_tree(model))}, stored.tokenizer)
    say(
        f"model type  {stored.model_type} ({architecture}); class in jaxformer: "
        f"{type(model).__name__}"
    )
    say(f"parameters  {parameter_count(model.config):,} in {num_tensors} tensors")
    if num_updates:
        say(f"adapter     the updates of {num_updates} linear layers are added to the weights")
    say(f"tokenizer   {_about(stored.tokenizer)}")
    _compare(folder, architecture, loaded)
    save(arguments.out, *loaded)
    say(f"saved       {arguments.out}")
    return 0


def _compare(folder: Path, architecture: str, loaded: "Checkpoint") -> None:
    """Prints the differences from transformers, or the reason why a comparison is not possible."""
    from jaxformer.hub.flax_weights import flax_file
    from jaxformer.verify.parity import missing_peers, parity

    if flax_file(folder):
        say("parity      not compared: transformers 5 does not read Flax weights")
        return
    missing = missing_peers()
    if missing:
        say(f"parity      not compared: {missing} must be installed for it")
        return
    # The safetensors library raises this error for a path that is not UTF-8.
    from safetensors import SafetensorError

    try:
        found = parity(folder, architecture, *loaded)
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        say(f"parity      the logits were not compared with transformers: {error}")
        return
    say(f"parity      logits differ by {found.largest:.2e} at most, {found.mean:.2e} on average")
    if found.perplexities:
        theirs, ours = found.perplexities
        say(f"            perplexity {theirs:.4f} in transformers, {ours:.4f} in jaxformer")
        say(f"            the first {found.same_tokens} of {found.tokens} greedy tokens agree")


def _about(tokenizer: "Tokenizer | None") -> str:
    if tokenizer is None:
        return "none"
    lossy = tokenizer.why_lossy or "decoding restores every text"
    return f"{tokenizer.vocab_size:,} tokens; {lossy}"
