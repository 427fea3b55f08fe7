"""`jaxformer train --from CHECKPOINT`: what a run begins with."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.artifacts.origin import Origin, digest_of, keep
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.first import First
from jaxformer.models.config import kind_of
from jaxformer.training.config import PairTraining, TrainingConfig
from jaxformer.training.fine_tuning import fine_tuning, refuse_another_model, refuse_tokenizer


class Base(NamedTuple):
    """A checkpoint, of which nothing large is read yet. stored: its config, tokenizer and how its
    parameters are read; training: the settings of a run that begins from it; step: of a run, that
    of its newest checkpoint."""

    path: Path
    stored: Any
    training: TrainingConfig
    family: str | None
    step: int | None

    @property
    def kind(self) -> str:
        return kind_of(self.stored.config)

    @property
    def name(self) -> str:
        """Of a run that begins from it."""
        return f"{self.path.name}-tuned"

    @property
    def tokenizer(self):
        return self.stored.tokenizer

    @property
    def origin(self) -> Origin:
        """As config.json has it, but for the digest."""
        from jaxformer.artifacts.subwords import Subwords

        others = isinstance(self.tokenizer, Subwords)
        special = asdict(self.tokenizer.special) if others else None
        return Origin(self.path, family=self.family, special_tokens=special)

    def accept(self, training: TrainingConfig) -> None:
        """ValueError for settings with which a run cannot begin from it."""
        from jaxformer.models.build import build, shape_tree
        from jaxformer.models.lora import adapted_maps

        refuse_another_model(self.path, self.training, training)
        refuse_tokenizer(self.path, self.tokenizer, training)
        if training.lora.lora_rank is not None:
            adapted_maps(shape_tree(build(training.model)), training.lora)

    def keep(self, folder: RunFolder, training: TrainingConfig) -> None:
        """Put what may change, or is no file of another's, into the folder of a new run: the
        tokenizer and, for an adapter of a run, that run."""
        self.tokenizer.save(folder.tokenizer)
        if training.lora.lora_rank is not None and self.step is not None:
            keep(self.path, folder.base, self.step)

    def read(self, mesh) -> tuple[dict, Origin]:
        """Its parameters, where they live on a mesh (None: one device), and what config.json is to
        say of them."""
        from jaxformer.models.build import build
        from jaxformer.models.placement import parameter_shapes

        params = self.stored.read(parameter_shapes(build(self.stored.config), mesh))
        if _newest_step(self.path) != self.step:
            raise ValueError(f"{self.path} is being trained and has gone on meanwhile; start again")
        return params, self.origin._replace(digest=digest_of(params))


def open_base(first: First) -> Base:
    """What --from names."""
    from jaxformer.cli.runtime import start_jax

    start_jax()
    from jaxformer.artifacts.fetch import fetched
    from jaxformer.hub.load import family_name, opened

    path = fetched(first.base).absolute()
    stored = opened(path)
    kind = kind_of(stored.config)
    if first.asked not in (None, kind):
        raise ValueError(f"--model is {first.asked!r}, but {path} is of kind {kind}")
    training = fine_tuning(kind, stored.config, first.asked_preset)
    if isinstance(training, PairTraining):
        from jaxformer.artifacts.lowercase import lowers_case

        lowercase = stored.tokenizer is not None and lowers_case(stored.tokenizer)
        training = replace(training, lowercase=lowercase)
    return Base(path, stored, training, family_name(path), _newest_step(path))


def _newest_step(path: Path) -> int | None:
    """Of a run, that of its newest checkpoint; None: it is none."""
    from jaxformer.artifacts.checkpoint import Checkpoints

    *_, newest = (None, *Checkpoints(RunFolder(path).checkpoints).steps())
    return newest


def origin_of(folder: RunFolder, origin: Origin, config: TrainingConfig, mesh) -> dict | None:
    """The parameters that a run to be resumed began with, where they live on a mesh; None where its
    checkpoints have all."""
    from jaxformer.artifacts.checkpoint import Checkpoints
    from jaxformer.hub.load import origin_params
    from jaxformer.models.build import build
    from jaxformer.models.placement import parameter_shapes

    if config.lora.lora_rank is None and Checkpoints(folder.checkpoints).steps():
        return None
    return origin_params(origin, parameter_shapes(build(config.model), mesh), folder)
