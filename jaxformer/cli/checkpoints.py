"""Checkpoints that the command line names: RUN of most verbs, and --from of `train`."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from jaxformer.artifacts.run import Origin, RunFolder, keep
from jaxformer.artifacts.tokenizer import (
    Tokenizer,
    lowers_case,
    parsing_special,
    report_of,
    spelled_tokens,
)
from jaxformer.cli.flags import IgnoredOptions, Switch, positional
from jaxformer.models.config import kind_of
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.runtime import start_jax
from jaxformer.terminal import say
from jaxformer.training.config import MeshSizes, PairTraining, TrainingConfig
from jaxformer.training.presets import (
    check_head,
    check_same_model,
    check_tokenizer,
    fine_tuning,
)

if TYPE_CHECKING:  # these import JAX
    import jax

    from jaxformer.artifacts.saved import Checkpoint, Stored


@dataclass(frozen=True)
class RunArguments:
    """Arguments of every verb that uses a model."""

    run: Annotated[str, positional("RUN")]
    """the model: a run folder, a saved folder, a folder in Hugging Face format or a hub id"""
    mesh: MeshSizes | None = field(default=None, kw_only=True)
    """devices along each mesh axis to shard the model over, such as data=2,tensor=4; None: one
    device"""

    def adapted(self, checkpoint: "Checkpoint") -> "Checkpoint":
        """Returns the checkpoint with the changes that the arguments ask for."""
        return checkpoint


@dataclass(frozen=True)
class TextArguments(RunArguments):
    """Arguments of every verb that reads a text with the model's tokenizer."""

    parse_special: Switch = field(default=False, kw_only=True)
    """read special tokens that the text spells out, such as <|im_start|>, as these tokens, not as
    plain text; a run that was trained with --parse-special always does"""

    def adapted(self, checkpoint: "Checkpoint") -> "Checkpoint":
        """Returns the checkpoint with a tokenizer that reads special tokens, if asked to."""
        checkpoint = super().adapted(checkpoint)
        if checkpoint.tokenizer is None or not self.parse_special:
            return checkpoint
        return checkpoint._replace(tokenizer=parsing_special(checkpoint.tokenizer))


@dataclass(frozen=True)
class DecodingArguments(TextArguments):
    """Arguments of every verb that generates text."""

    ignore_generation_config: IgnoredOptions = field(default=(), kw_only=True)
    """option of the checkpoint's generation_config.json to leave out, such as one that is not
    implemented; may be repeated"""

    def adapted(self, checkpoint: "Checkpoint") -> "Checkpoint":
        """Returns the checkpoint without the options that --ignore-generation-config names."""
        from jaxformer.hub.generation import without_options

        checkpoint = super().adapted(checkpoint)
        model = checkpoint.model
        generation = without_options(model.generation, self.ignore_generation_config)
        return checkpoint._replace(model=model.clone(generation=generation))


@contextmanager
def load_model(arguments: RunArguments) -> Iterator["Checkpoint"]:
    """Starts JAX and loads the model. With --mesh, the model is sharded and the mesh is in context.

    Args:
        arguments: The arguments of the verb.

    Yields:
        The `Checkpoint`.
    """
    start_jax()
    import jax

    from jaxformer.hub.load import load
    from jaxformer.models.mesh import make_mesh

    mesh = None if arguments.mesh is None else make_mesh(asdict(arguments.mesh))
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        checkpoint = load(arguments.run, mesh=mesh)
        yield arguments.adapted(checkpoint)


def report_special(tokenizer: Tokenizer, where: str, parts: Iterable[str]) -> None:
    """Prints on standard error how special tokens that a text spells out are read.

    Args:
        tokenizer: The tokenizer that reads the text.
        where: The name of the text, such as "the prompt".
        parts: The text, in parts of any size.
    """
    print_special(tokenizer, where, spelled_tokens(tokenizer, parts))


def print_special(tokenizer: Tokenizer, where: str, found: Counter[str]) -> None:
    """Prints the report of `report_special` for counted special tokens."""
    if (line := report_of(tokenizer, found, where)) is not None:
        say(line, file=sys.stderr)


class Base(NamedTuple):
    """An opened checkpoint whose parameters are not read yet.

    Attributes:
        path: The checkpoint's folder.
        stored: Its config, its tokenizer and a function that reads its parameters.
        training: The default settings of a run that starts from it.
        step: The step of its newest checkpoint; None if the folder is not a run.
    """

    path: Path
    stored: "Stored"
    training: TrainingConfig
    step: int | None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None if it has none."""
        return self.stored.tokenizer

    def accept(self, training: TrainingConfig) -> None:
        """Raises ValueError if a run with these settings cannot start from the checkpoint."""
        from jaxformer.models.kinds import build
        from jaxformer.models.lora import adapted_maps
        from jaxformer.models.parameters import shape_tree

        check_same_model(self.path, self.training, training)
        check_tokenizer(self.path, self.tokenizer, training)
        if training.lora.lora_rank is not None:
            adapted_maps(shape_tree(build(training.model)), training.lora)

    def ignoring(self, names: Iterable[str]) -> "Base":
        """Returns the checkpoint without these options for generation.

        Raises:
            ValueError: An option has an unknown name, or the run could not generate its samples
                because of an option that is not implemented.
        """
        generation = usable_generation(self.stored.generation, names, self.training)
        return self._replace(stored=self.stored._replace(generation=generation))

    def keep(self, folder: RunFolder, training: TrainingConfig) -> None:
        """Copies the tokenizer into the folder of a new run.

        If the new run trains an adapter and the checkpoint is a run, this also copies the
        checkpoint, because the base run may continue and replace it.
        """
        # pyrefly: ignore[missing-attribute] (`accept` raises if there is no tokenizer)
        self.tokenizer.save(folder.tokenizer)
        if training.lora.lora_rank is not None and self.step is not None:
            keep(self.path, folder.base, self.step)

    def read(self, mesh: "jax.sharding.Mesh | None") -> tuple[dict, Origin]:
        """Reads the parameters.

        Args:
            mesh: The mesh on which to place them; None: one device.

        Returns:
            The parameters, and their `Origin` for config.json.

        Raises:
            ValueError: Another process has trained the base run further in the meantime.
        """
        from jaxformer.artifacts.tensors import digest_of
        from jaxformer.models.kinds import build
        from jaxformer.models.mesh import parameter_shapes

        params = self.stored.read(parameter_shapes(build(self.stored.config), mesh))
        if _newest_step(self.path) != self.step:
            raise ValueError(
                f"{self.path} was trained further while it was being read; run the command again"
            )
        stored, special = self.stored, getattr(self.tokenizer, "special", None)
        special = None if special is None else asdict(special)
        digest = digest_of(params)
        about = (stored.family, special, stored.generation, stored.checkpoint_dtype)
        return params, Origin(self.path, digest, *about)


def usable_generation(
    generation: GenerationDefaults, names: Iterable[str], training: TrainingConfig
) -> GenerationDefaults:
    """Returns a checkpoint's settings for the samples of a run; see `Base.ignoring`."""
    from jaxformer.decoding.constraints import check_supported
    from jaxformer.hub.generation import without_options

    generation = without_options(generation, names)
    if not training.model.bidirectional:  # such a run generates nothing
        check_supported(generation)
    return generation


def open_base(source: str, model: str | None, preset: str | None) -> Base:
    """Opens the checkpoint that --from names.

    Args:
        source: The value of --from.
        model: The value of --model, or None.
        preset: The value of --preset, or None.

    Raises:
        ValueError: There is no such checkpoint, it is not of the kind that --model names, or it
            is a classifier.
    """
    start_jax()
    from jaxformer.hub.load import fetched, opened

    path = fetched(source).absolute()
    stored = opened(path)
    check_head(path, stored.config, stored.family)
    kind = kind_of(stored.config)
    if model not in (None, kind):
        raise ValueError(f"--model is {model!r}, but {path} is of kind {kind}")
    training = fine_tuning(kind, stored.config, preset)
    if stored.tokenizer is not None:
        training = replace(training, parse_special=stored.tokenizer.parses_special)
        if isinstance(training, PairTraining):
            training = replace(training, lowercase=lowers_case(stored.tokenizer))
    return Base(path, stored, training, _newest_step(path))


def _newest_step(path: Path) -> int | None:
    """Returns the step of a run's newest checkpoint; None if the path is not a run."""
    from jaxformer.artifacts.checkpoint import Checkpoints

    return max(Checkpoints(RunFolder(path).checkpoints).steps(), default=None)


def origin_of(
    folder: RunFolder, origin: Origin, config: TrainingConfig, mesh: "jax.sharding.Mesh | None"
) -> dict | None:
    """Returns the parameters that a resumed run started from, placed on a mesh.

    Returns None if they are not needed, because the run's own checkpoints hold all parameters.
    """
    from jaxformer.artifacts.checkpoint import Checkpoints
    from jaxformer.hub.load import origin_params
    from jaxformer.models.kinds import build
    from jaxformer.models.mesh import parameter_shapes

    if config.lora.lora_rank is None and Checkpoints(folder.checkpoints).steps():
        return None
    return origin_params(origin, parameter_shapes(build(config.model), mesh), folder)
