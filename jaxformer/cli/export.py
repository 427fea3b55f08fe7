"""`jaxformer export RUN OUT`: a model as transformers, or llama.cpp, opens it."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jaxformer.cli.arguments import parse


@dataclass(frozen=True)
class ExportArguments:
    """Write a model as transformers opens it, or as llama.cpp does (gguf)."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """a run, a saved folder, a folder in Hugging Face's format or a hub id"""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """the folder to make; for gguf, the file"""
    format: Literal["transformers", "gguf"] = "transformers"
    """what to write"""
    family: str | None = None
    """a model_type of transformers; None: what it was imported from, or the first that fits"""
    dtype: Literal["f32", "q8_0"] = "f32"
    """of the matrices in a gguf file"""
    adapter: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """of a run with a LoRA rank the adapter alone, as PEFT opens it; else it is added to the
    weights"""

    def __post_init__(self):
        if self.adapter and self.format == "gguf":
            raise ValueError("--adapter was given, but a gguf file has all the weights of a model")


def main(argv: list[str]) -> int:
    """Load, write."""
    arguments = parse(ExportArguments, "export", argv)
    from pathlib import Path

    from jaxformer.artifacts.tensors import require_new

    require_new(Path(arguments.out))  # before anything is read

    from jaxformer.cli.runtime import start_jax

    start_jax()
    from jaxformer.hub.load import family_name, load

    if arguments.adapter:
        from jaxformer.hub.peft import export_adapter

        name = export_adapter(arguments.out, arguments.run, family=arguments.family)
        print(f"{arguments.out}: an adapter for transformers.{name}, as peft.PeftModel opens it")
        return 0
    checkpoint = load(arguments.run)
    family = arguments.family or family_name(arguments.run)
    if arguments.format == "gguf":
        from jaxformer.hub.gguf import export_gguf

        export_gguf(arguments.out, *checkpoint, dtype=arguments.dtype, family=family)
        print(f"{arguments.out}: GGUF, {arguments.dtype}")
        return 0
    from jaxformer.hub.export import export

    name = export(arguments.out, *checkpoint, family=family)
    print(f"{arguments.out}: open it with transformers.{name}.from_pretrained({arguments.out!r})")
    return 0
