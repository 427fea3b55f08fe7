"""`jaxformer export RUN OUT`: writes a model for transformers, PEFT or llama.cpp."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from jaxformer.artifacts.files import require_new
from jaxformer.artifacts.own_code import foreign_names
from jaxformer.artifacts.run import read_sections
from jaxformer.cli.arguments import parse
from jaxformer.cli.flags import Switch, positional
from jaxformer.models.config.model import CheckpointDType
from jaxformer.models.config.needs import Needs, is_one_of
from jaxformer.runtime import start_jax
from jaxformer.terminal import say


@dataclass(frozen=True)
class ExportArguments:
    """Write a model in the format of transformers or, as a GGUF file, of llama.cpp."""

    needs: ClassVar[Needs] = {
        "dtype": (is_one_of("adapter", False),),
        "adapter": (is_one_of("format", "transformers"),),
    }

    run: Annotated[str, positional("RUN")]
    """the model: a run folder, a folder that jf.save wrote, a folder in Hugging Face format or a
    hub id"""
    out: Annotated[str, positional("OUT")]
    """path to create: a folder for transformers, a file for gguf"""
    format: Literal["transformers", "gguf"] = "transformers"
    """format to write"""
    model_type: str | None = None
    """model_type of transformers, such as gpt2; default: the type of the imported checkpoint, or
    else the first type that supports the model"""
    dtype: Literal["float32", "bfloat16", "float16", "f32", "q8_0"] | None = None
    """dtype of the tensors. transformers: float32, bfloat16 or float16 (default: the dtype of the
    imported checkpoint, otherwise float32). gguf: f32 (default) or q8_0, for matrices only"""
    adapter: Switch = False
    """write only the LoRA adapter of a run, in the format of PEFT; by default, the adapter is
    merged into the weights"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        accepted = ("f32", "q8_0") if self.format == "gguf" else get_args(CheckpointDType)
        if self.dtype not in (None, *accepted):
            raise ValueError(
                f"--dtype is {self.dtype}; for --format {self.format} it must be one of "
                f"{', '.join(accepted)}"
            )


def _check_own(folder: Path) -> None:
    """Raises ValueError if the model has user-defined parts, which no other format can store."""
    sections = read_sections(folder) or {}
    for part in ("mask", "layers", "activation", "positions"):
        for name in foreign_names(sections.get(part)):
            raise ValueError(
                f"{folder}: {part} is {name}, which is not part of jaxformer; only jaxformer's own "
                "format can store it"
            )


def main(argv: list[str]) -> int:
    """Loads the model and writes it."""
    arguments = parse(ExportArguments, "export", argv)
    out, model_type = arguments.out, arguments.model_type
    # This check precedes slow imports and file reads, so that an invalid path is reported at once.
    require_new(Path(out))

    start_jax()
    from jaxformer.hub.load import fetched, load

    _check_own(fetched(arguments.run))
    if arguments.adapter:
        from jaxformer.hub.peft import export_adapter

        name = export_adapter(out, arguments.run, model_type=model_type)
        say(f"{out}: adapter for transformers.{name}; open it with peft.PeftModel.from_pretrained")
    elif arguments.format == "gguf":
        from jaxformer.hub.gguf import export_gguf

        dtype = arguments.dtype or "f32"
        export_gguf(out, *load(arguments.run), dtype=dtype, model_type=model_type)
        say(f"{out}: GGUF, {dtype}")
    else:
        from jaxformer.hub.export import export

        name = export(out, *load(arguments.run), model_type=model_type, dtype=arguments.dtype)
        say(f"{out}: open it with transformers.{name}.from_pretrained({out!r})")
    return 0
