"""What a run's config.json says: what it reads, its model, and how it is trained."""

from dataclasses import asdict
from pathlib import Path

from jaxformer.artifacts.origin import read_origin
from jaxformer.artifacts.run import RunFolder, parse_config, parse_kind
from jaxformer.models.config import Execution, kind_of
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training.config import Inputs, MeshSizes, OptimizerConfig, TrainingConfig
from jaxformer.training.presets import TRAININGS


def read_run(folder: RunFolder) -> tuple[Inputs, TrainingConfig]:
    """What a run was started with: what it reads, and its config."""
    sections = folder.read_config("model", "training")
    model = parse_kind(sections, folder.config)
    nested = {"execution": Execution, "optimizer": OptimizerConfig, "lora": LoraConfig}
    plain = {"lora": {}, **sections["training"]}  # runs of an earlier version know of none
    for name, kind in nested.items():
        plain[name] = parse_config(kind, plain.get(name), folder.config)
    if plain.get("mesh") is not None:
        plain["mesh"] = parse_config(MeshSizes, plain["mesh"], folder.config)
    training = TRAININGS[kind_of(model)]
    inputs = parse_inputs(sections, folder.config)
    return inputs, parse_config(training, {**plain, "model": model}, folder.config)


def parse_inputs(sections: dict, where) -> Inputs:
    """The paths that a run reads, and what it began from."""
    text, source, target = (sections.get(name) for name in ("text", "source", "target"))
    if not isinstance(text, list | None) or not all(
        isinstance(path, str | None) for path in (*(text or ()), source, target)
    ):
        raise ValueError(f"{where}: text, source and target must be paths")
    paths = tuple(map(Path, text or ())), *(x and Path(x) for x in (source, target))
    return Inputs(*paths, read_origin(sections, where))


def write_run(folder: RunFolder, inputs: Inputs, config: TrainingConfig) -> None:
    """config.json: the model apart, since whoever loads the run needs that alone."""
    training = {name: x for name, x in asdict(config).items() if name != "model"}
    paths = {"text": list(map(str, inputs.text))}
    paths |= {x: str(getattr(inputs, x)) for x in ("source", "target") if getattr(inputs, x)}
    sections = {"kind": kind_of(config.model), "model": config.model, "training": training}
    began = {} if inputs.origin is None else inputs.origin.sections()
    folder.write_config({**sections, **paths, **began})
