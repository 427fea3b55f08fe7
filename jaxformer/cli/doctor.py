"""`jaxformer doctor`: shows this machine's setup, or what a model requires of a target machine."""

import textwrap
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Literal

from jaxformer.artifacts.files import json_text
from jaxformer.cli.arguments import parse
from jaxformer.cli.flags import Switch
from jaxformer.cli.help import text_width
from jaxformer.doctor.report import decoding_rows, machine_setup, setup_rows, step_rows
from jaxformer.doctor.targets import Target, parse_target, start_for
from jaxformer.models.config import KINDS, Execution
from jaxformer.models.config.check import check_at_least
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.needs import Needs, is_given, is_one_of
from jaxformer.terminal import say
from jaxformer.training.config import MeshSizes
from jaxformer.training.presets import kinds_with_preset, training_preset

_PRESET, _COMPILES = is_given("preset"), is_one_of("explain_attention", False)


@dataclass(frozen=True)
class DoctorArguments:
    """Show this machine's setup: devices, versions, memory and missing packages.

    With --preset, compile the training step of a model for a target machine, which may be absent,
    and show the required memory, communication and time. With --decode, compile the decoding loop
    instead.
    """

    needs: ClassVar[Needs] = {
        "model": (_PRESET,),
        "target": (_PRESET,),
        "mesh": (_PRESET, _COMPILES),
        "batch_size": (_PRESET, _COMPILES),
        "length": (_PRESET,),
        "dtype": (_PRESET,),
        "attention_implementation": (_PRESET,),
        "scan_layers": (_PRESET, _COMPILES),
        "remat": (_PRESET, _COMPILES, is_one_of("decode", False)),
        "decode": (_PRESET, _COMPILES),
        "explain_attention": (_PRESET,),
    }

    preset: str | None = None
    """name of a model or of a training preset, such as gpt2-124m or stdlib"""
    model: str | None = None
    """kind of model, if the preset exists for several kinds"""
    target: str | None = None
    """machine: gpu:h100:8 (GPUs of one host), tpu:v5e:4x4 (a TPU slice) or cpu:8 (simulated
    devices); default: cpu with the devices of --mesh"""
    mesh: MeshSizes | None = None
    """devices along each mesh axis: data=2,fsdp=4; default: data=N for all N devices of the
    target"""
    batch_size: int | None = None
    """global batch size in sequences; default: 8 × data × fsdp × expert"""
    length: int | None = None
    """tokens per sequence; default: the model's max_length"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of activations; default: float32 on CPUs, bfloat16 elsewhere"""
    execution: Execution = field(default_factory=Execution)
    decode: Switch = False
    """examine the decoding loop instead of the training step"""
    explain_attention: Switch = False
    """show the attention kernel of each layer, and why a fused kernel is not used; nothing is
    compiled"""
    json: Switch = False
    """print one JSON object and nothing else"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_at_least(1, self, "batch_size", "length")
        if self.model not in (None, *KINDS):
            raise ValueError(f"model is {self.model!r}; it must be one of {', '.join(KINDS)}")

    @property
    def kind(self) -> str:
        """The architecture of the model to examine."""
        return self.model or next(iter(kinds_with_preset(self.preset or "")), "decoder")

    @property
    def implied(self) -> dict[str, Any]:
        """The config values of the examined model, on which conditions (`needs`) may depend."""
        if self.preset is None:
            return {}
        return {**vars(training_preset(self.preset, self.kind).model), "model": self.kind}


def main(argv: list[str]) -> int:
    """Prints the setup or, with --preset, compiles the program and prints its requirements.

    The exit status is 1 if the program exceeds the memory or computes all experts for every token.
    """
    arguments, fits = parse(DoctorArguments, "doctor", argv), True
    if arguments.preset is None:
        found = machine_setup()
        title, lines = "jaxformer doctor", setup_rows(found)
    elif arguments.explain_attention:
        config, target, _, _, length = _requested(arguments.preset, arguments)
        start_for(target)
        from jaxformer.doctor.attention import attention_rows, explain_attention

        layers = explain_attention(config, arguments.execution, target, length)
        title = f"attention of {arguments.preset} on {target}, {config.dtype}"
        lines = attention_rows(layers)
        found = {"preset": arguments.preset, "target": str(target)}
        found |= {"layers": [x._asdict() for x in layers]}
    else:
        config, target, mesh, batch_size, length = _requested(arguments.preset, arguments)
        start_for(target)
        from jaxformer.doctor.examine import ProgramCase, examine_decoding, examine_step
        from jaxformer.models.kinds import build

        examine = examine_decoding if arguments.decode else examine_step
        model = build(config, arguments.execution)
        found = examine(ProgramCase(model, target, asdict(mesh), batch_size, length))
        title = f"{arguments.preset} on {target}"
        lines = (decoding_rows if arguments.decode else step_rows)(found)
        experts = found["experts"] or {"only_chosen": True}
        fits = found["memory"]["fits"] is not False and experts["only_chosen"]
        found = {"preset": arguments.preset, **found}
    say(json_text(found) if arguments.json else table_of_cells(title, lines))
    return 0 if fits else 1


def _requested(
    preset: str, arguments: DoctorArguments
) -> tuple[ModelConfig, Target, MeshSizes, int, int]:
    """Returns (config, target, mesh, batch size, length) as requested on the command line.

    This function does not start JAX, because the target determines how JAX must start.
    """
    config = training_preset(preset, arguments.kind).model
    num_devices = prod(asdict(arguments.mesh or MeshSizes()).values())
    target = parse_target(f"cpu:{num_devices}" if arguments.target is None else arguments.target)
    mesh = arguments.mesh or MeshSizes(data=target.count)
    dtype = arguments.dtype or ("float32" if target.platform == "cpu" else "bfloat16")
    length = arguments.length or config.max_length
    if length > config.max_length:
        raise ValueError(
            f"length is {length}; {preset} accepts at most {config.max_length} (its max_length)"
        )
    batch_size = arguments.batch_size or 8 * mesh.parts
    return replace(config, dtype=dtype), target, mesh, batch_size, length


def table_of_cells(title: str, lines: list[tuple[str, ...]]) -> str:
    """Returns a table of (label, value, remark), as wide as the terminal.

    Values are wrapped at spaces. A remark, such as a path or a command, is never wrapped. A remark
    that is too long for the line is printed on a separate line.

    Args:
        title: The first line.
        lines: The cells of each line, at most three; an empty tuple prints an empty line.
    """
    rows = [(*line, "", "", "")[:3] for line in lines]
    left = max(len(label) for label, _, _ in rows) + 4
    middle = min(max((len(value) for _, value, remark in rows if remark), default=0) + 2, 32)
    shown = [title, ""]
    for label, value, remark in rows:
        begin = f"  {label}".ljust(left)
        whole = begin + value.ljust(middle) + remark
        if remark and len(whole) <= text_width() and len(value) < middle:
            shown.append(whole)
            continue
        fill = {"initial_indent": begin, "subsequent_indent": " " * left}
        shown += textwrap.wrap(value, text_width(), **fill) or [begin.rstrip()]
        shown += [" " * left + remark] if remark else []
    return "\n".join(shown)
