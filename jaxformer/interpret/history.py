"""The checkpoints of a run, read one at a time."""

from collections.abc import Iterator, Sequence

from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.run import RunFolder, parse_kind
from jaxformer.hub.load import lora_of
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.mesh import parameter_shapes


def run_model(folder: RunFolder) -> LanguageModel:
    """Returns the model of a run, without its variables.

    Raises:
        ValueError: the folder holds no run.
    """
    return build(parse_kind(folder.read_config("model"), folder.config))


def read_checkpoints(
    folder: RunFolder, steps: Sequence[int] | None = None
) -> Iterator[tuple[int, Variables]]:
    """Yields (step, variables) of the checkpoints of a run, oldest first.

    A run keeps only its newest checkpoints, unless it was trained with `--keep-every`. Each
    checkpoint is read when the iterator reaches it.

    Args:
        folder: the run.
        steps: the steps to read; None: every complete checkpoint.

    Raises:
        ValueError: the run trains a LoRA adapter, or has no checkpoint of a step, or it is damaged.
    """
    sections = folder.read_config("model")
    if lora_of(sections, folder.config).lora_rank is not None:
        raise ValueError(
            f"{folder.path} is a LoRA run, whose checkpoints hold only the adapter; give the run "
            "of a complete model"
        )
    checkpoints = Checkpoints(folder.checkpoints)
    there = checkpoints.steps()
    missing = sorted(set(there if steps is None else steps) - set(there))
    if missing or not there:
        raise ValueError(
            f"{folder.path} has no complete checkpoint of step {missing[0] if missing else 0}; its "
            f"checkpoints are of steps {', '.join(map(str, there)) or 'none'}"
        )
    like = parameter_shapes(run_model(folder), None)
    for step in sorted(there if steps is None else steps):
        yield step, {"params": checkpoints.read(step, like)}
